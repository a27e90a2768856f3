"""Tensors and pipelines that were made under ``torch.inference_mode``, which nothing can be trained with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import StageError
from penstock.nest import tensors_in


def refuse_inference_mode(modules: Iterable[nn.Module], example: object = ()) -> None:
    """Raise StageError if the mode is on, or if a tensor of the modules or of the example was made while it was on."""
    if torch.is_inference_mode_enabled():
        raise StageError(
            "a pipeline is built under torch.inference_mode(): its stages could never be trained, and torch refuses their "
            "tensors outside of that mode. Build it before, and call evaluate() under torch.inference_mode(), or not: it keeps "
            "no graph"
        )
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not is_lazy(tensor) and tensor.is_inference():
                raise StageError(
                    f"{name} of {type(module).__name__} was made under torch.inference_mode(), and cannot be differentiated or "
                    "changed outside of it. Make or load the model outside of that mode"
                )
    if any(tensor.is_inference() for tensor in tensors_in(example)):
        raise StageError(
            "the example holds a tensor that was made under torch.inference_mode(), and a model cannot be differentiated with "
            "it. Give a clone() of it, made outside of that mode"
        )
