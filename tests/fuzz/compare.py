"""Hold what ranks left against what the plain loop left."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fuzz.oracle import Left

TOLERANCE = 1e-9


def differences(ranks: Sequence[Sequence[Left]], wanted: Sequence[Left], *, tolerance: float = TOLERANCE) -> list[str]:
    """All that differs by more than the tolerance, in words; and names that no rank has."""
    found: list[str] = []
    for number, want in enumerate(wanted):
        lefts = [lefts[number] for lefts in ranks]
        for rank, left in enumerate(lefts):
            found += [f"{want.what}, rank {rank}: {text}" for text in _of_one(left, want, tolerance)]
        held = set().union(*((left.grads or {}).keys() for left in lefts))
        missing = sorted(set(want.grads or {}) - held - want.aliases)
        found += [f"{want.what}: no rank has {name}" for name in missing]
    return found


def _of_one(left: Left, want: Left, tolerance: float) -> list[str]:
    found = []
    for name in ("loss", "norm"):
        got, right = getattr(left, name), getattr(want, name)
        if got is not None and right is not None and not _near(got, right, tolerance):
            found.append(f"{name} {got!r} instead of {right!r}")
    if left.outputs is not None and want.outputs is not None:
        found += _tensor("outputs", left.outputs, want.outputs, tolerance)
    if want.grads is not None:
        for name, grad in (left.grads or {}).items():
            found += _tensor(f"gradient of {name}", grad, want.grads[name], tolerance)
    for name, value in left.state.items():
        found += _tensor(name, value, want.state[name], tolerance)
    found += [
        f"hook of {name} was called {count} times instead of {want.fired[name]}"
        for name, count in left.fired.items()
        if name in want.fired and count != want.fired[name]
    ]
    return found


def _near(got: float, want: float, tolerance: float) -> bool:
    return math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance)


def _tensor(name: str, got: Tensor | None, want: Tensor | None, tolerance: float) -> list[str]:
    if got is None or want is None:
        if got is want:
            return []
        there, gone = ("a tensor", "None") if want is None else ("None", "a tensor")
        return [f"{name} is {there} instead of {gone}"]
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name} is {got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"]
    if not want.numel():
        return []
    if not want.is_floating_point() and not want.is_complex():
        return [] if torch.equal(got, want) else [f"{name} differs"]
    off = float((got - want).abs().max())
    size = float(want.abs().max())
    return [] if off <= tolerance * max(1.0, size) else [f"{name} is off by {off:.3g}, its largest is {size:.3g}"]
