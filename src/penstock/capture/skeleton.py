"""A copy of the user's model that holds no data, to be traced in either mode.

    skeleton = Skeleton.of(model)
    skeleton.module        # same classes, same attributes; parameters and buffers are fake tensors

The user's module is only read. Tracing it in another mode later does not need it any more, nor its memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from penstock.errors import CaptureError
from penstock.nest import Value


@dataclass(frozen=True)
class Skeleton:
    """The data-free copy, and the device on which its fake tensors pretend to be."""

    module: nn.Module
    device: torch.device

    @staticmethod
    def of(model: nn.Module, leaves: list[Value]) -> Skeleton:
        lazy = [name for name, value in model.named_parameters() if is_lazy(value)]
        if lazy:
            raise CaptureError(
                f"{lazy[0]} has no shape yet: its module is a lazy one; run the model once with the example before the capture"
            )
        device = device_of((*model.parameters(), *model.buffers(), *leaves))
        fake = fake_mode()
        memo: dict[int, object] = {id(v): _fake(fake, v, device) for v in (*model.parameters(), *model.buffers())}
        for constant in _plain_tensors(model):
            memo.setdefault(id(constant), constant)
        try:
            return Skeleton(copy.deepcopy(model, memo), device)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise CaptureError(
                f"{type(model).__name__} cannot be deep-copied ({error}), and capture traces a copy so that yours "
                "stays as it is. Give the attribute that cannot be copied a __deepcopy__, or create it in forward; or "
                "build the stages by hand: penstock.split_modules(model, [...], num_stages)"
            ) from error


def has_no_data(tensor: torch.Tensor) -> bool:
    """On the meta device, or made under fake tensors."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have sizes and no data, fit for torch.export."""
    return FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)


def fake_leaves(leaves: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Data-free stand-ins of the example's tensors."""
    mode = fake_mode()
    return [_fake(mode, leaf, device) for leaf in leaves]


def _fake(mode: FakeTensorMode, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    where = device if value.is_meta else value.device
    made: torch.Tensor = FakeTensor(
        mode, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"), where
    )
    if isinstance(value, nn.Parameter):
        return nn.Parameter(made, requires_grad=value.requires_grad)
    return made.requires_grad_(value.requires_grad)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where a model is; one without data will be on the CPU."""
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _plain_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that are plain attributes: small constants, kept as they are."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                inside = value.values() if isinstance(value, dict) else value
                items = inside if isinstance(value, dict | list | tuple) else (value,)
                yield from (item for item in items if isinstance(item, torch.Tensor))
