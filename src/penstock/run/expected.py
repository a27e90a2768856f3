"""Shapes that the user gave for a stage (`input_args`, `output_args`), held against what really comes."""

from __future__ import annotations

from torch import Tensor

from penstock.comm.messages import kind_of
from penstock.errors import ShapeError
from penstock.stage.boundary import flatten
from penstock.stage.pipeline_stage import PipelineStage


def check_given(stage: PipelineStage, value: object, *, microbatch: int, name: str) -> None:
    """Raise unless the tensors of `value` have the shapes and types that the stage has under that name, if any."""
    given = getattr(stage, name)
    expected, found = tensors_given(given), tensors_given(value)
    if given is not None and [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in found]:
        said, there = (", ".join(map(kind_of, tensors)) for tensors in (expected, found))
        raise ShapeError(
            f"microbatch {microbatch}, stage {stage.stage_index}: {name} says ({said}), but there is ({there}). "
            f"Give the shapes of one microbatch, or leave {name} out: they are found without it"
        )


def tensors_given(value: object) -> list[Tensor]:
    """The tensors of what stands for all arguments or all outputs of a stage; one of them may stand there by itself."""
    return flatten(tuple(value) if isinstance(value, tuple | list) else (value,))[0]
