"""Shapes that the user gave for a stage (`input_args`, `output_args`), held against what really comes."""

from __future__ import annotations

from torch import Tensor

from penstock.errors import ShapeError
from penstock.stage.boundary import flatten


def check_given(given: object, value: tuple[object, ...], *, stage: int, microbatch: int, name: str) -> None:
    """Raise unless the tensors of `value` have the shapes and types of those in `given`; None: anything goes."""
    if given is None:
        return
    expected, _ = flatten(tuple(given) if isinstance(given, (tuple, list)) else (given,))
    found, _ = flatten(value)
    if [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in found]:
        raise ShapeError(
            f"microbatch {microbatch}, stage {stage}: {name} says ({_listed(expected)}), but there is ({_listed(found)}). "
            f"Give the shapes of one microbatch, or leave {name} out: they are found without it"
        )


def _listed(tensors: list[Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
