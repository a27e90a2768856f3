"""What a stage receives, and which of the methods here a program has put something of its own in the place of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from penstock.compat._metadata import _TensorMeta
from penstock.errors import ShapeError


def renamed(name: str) -> object:
    """An attribute of penstock's under torch's name; a program may set it."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


@dataclass(eq=False, repr=False)
class RecvInfo:
    """One input of a stage: from which stage it comes, what it looks like, and the buffer that it arrives in."""

    input_name: str
    source: int | None = None
    buffer: Tensor | None = None
    tensor_meta: _TensorMeta | None = None
    is_root_arg: bool = field(default=False, kw_only=True)  # an argument of the model, given by the user

    def __repr__(self) -> str:
        whence = "the model's argument" if self.is_root_arg else f"from stage {self.source}"
        shape = "" if self.tensor_meta is None else f", {list(self.tensor_meta.shape)}"
        return f"RecvInfo({self.input_name}, {whence}{shape})"

    def take(self) -> Tensor:
        """The tensor that has arrived; the buffer is given up."""
        if self.buffer is None:
            raise ShapeError(f"{self!r}: nothing has arrived; expected its receive, or a hand-over, before its use")
        buffer, self.buffer = self.buffer, None
        return buffer


class RootArgPlaceholder(RecvInfo):
    """An argument of the model, which nobody sends."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__("root", is_root_arg=True)
        self.meta = tensor.to("meta")


def is_overridden(thing: object, *names: str) -> bool:
    """Whether a program has put something of its own in the place of a method: in a subclass, on the object itself, or on one
    of the classes here. Where a function was written tells, which decorators that copy its name and module do not change.
    """
    homes = [getattr(getattr(type(thing), name), "__globals__", {}).get("__name__", "") for name in names]
    return not all(home.startswith("penstock.compat.") for home in homes) or not vars(thing).keys().isdisjoint(names)


def call_on(modules: Iterable[nn.Module], method: str) -> None:
    """Call a method of those modules that have it."""
    for call in (getattr(module, method, None) for module in modules):
        if callable(call):
            call()
