"""Tensors of a stage held against what is known of them, and what a user says of them held together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.compat._metadata import _TensorMeta, extract_tensor_meta, is_dtensor
from penstock.errors import ShapeError
from penstock.nest import Value


def validate_and_normalize_to_tuple(args: Value, allow_none: bool = False) -> tuple[Value, ...] | None:
    """A tensor, or a tuple or list of tensors, as a tuple."""
    if args is None:
        return None
    if isinstance(args, Tensor):
        return (args,)
    if not isinstance(args, (tuple, list)):
        raise ShapeError(f"expected a tensor, or a tuple or list of them, got {type(args).__name__}")
    for place, arg in enumerate(args):
        if not isinstance(arg, Tensor) and not (arg is None and allow_none):
            what = "None" if arg is None else f"a {type(arg).__name__}"
            raise ShapeError(f"argument {place} of the stage is {what}; expected a tensor, pass others as keywords")
    return tuple(args)


def validate_metadata(
    desc: str, expected: _TensorMeta, actual: Any, *, raise_on_mismatch: bool = False, warn_on_mismatch: bool = False
) -> list[str]:
    """Compare a tensor, or what is known of it, with what was expected; the differences in words."""
    found = extract_tensor_meta(actual) if isinstance(actual, Tensor) else actual
    diffs = expected.get_diff(found)
    if diffs and raise_on_mismatch:
        raise ShapeError(f"{desc}: {'; '.join(diffs)}")
    if diffs and warn_on_mismatch:
        warnings.warn(f"{desc}: Metadata mismatch, what was found holds: {'; '.join(diffs)}", UserWarning, stacklevel=2)
    return diffs


def validate_tensors_metadata(
    desc: str,
    expected: Sequence[_TensorMeta | None],
    actual: Sequence[object],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """The same for several tensors, of which some may be missing on both sides."""
    problems: list[str] = []
    if len(expected) != len(actual):
        problems.append(f"{desc}: {len(actual)} tensors; expected {len(expected)}")
    else:
        for place, (meta, tensor) in enumerate(zip(expected, actual, strict=True)):
            if (meta is None) != (tensor is None):
                what = "missing" if tensor is None else "there, where none was expected"
                problems.append(f"{desc}[{place}] is {what}")
            elif meta is not None:
                problems += [f"{desc}[{place}]: {diff}" for diff in validate_metadata(desc, meta, tensor)]
    if problems and raise_on_mismatch:
        raise ShapeError("; ".join(problems))
    if problems and warn_on_mismatch:
        warnings.warn(f"Metadata mismatch: {'; '.join(problems)}", UserWarning, stacklevel=2)
    return problems


def validate_static_arg_grad_correspondence(
    stage_index: int, args: Sequence[Tensor], grads: Sequence[Tensor | None], is_input: bool
) -> None:
    """What the user gave as arguments and as their gradients must fit together."""
    kind = "input" if is_input else "output"
    if len(args) != len(grads):
        raise ShapeError(f"stage {stage_index}: {len(args)} {kind}_args, {len(grads)} {kind}_grads; expected as many")
    for place, (arg, grad) in enumerate(zip(args, grads, strict=True)):
        name = f"stage {stage_index}: {kind}_args[{place}]"
        if grad is None:
            if arg.requires_grad:
                text = f"{name} requires a gradient, and {kind}_grads[{place}] is None"
                warnings.warn(text, UserWarning, stacklevel=2)
        elif not arg.requires_grad:
            raise ShapeError(f"{name} requires no gradient, and {kind}_grads[{place}] is one; expected None there")
        elif is_dtensor(arg) and not is_dtensor(grad):
            raise ShapeError(f"{name} is a DTensor, and {kind}_grads[{place}] is none; expected a DTensor or None")
