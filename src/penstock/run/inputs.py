"""What a step is given: how it is cut into microbatches, how much each counts, and what tells one shape of it from another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.batch import Microbatches, sizes_of, weights
from penstock.errors import StageError
from penstock.nest import Value
from penstock.run.feed import Feed
from penstock.run.preamble import UNKNOWN, Rows
from penstock.stage.boundary import flatten


@dataclass(frozen=True)
class Given:
    """What `step` or `eval` was called with."""

    args: tuple[Value, ...] = ()
    kwargs: dict[str, Value] = field(default_factory=dict)
    target: Value = None
    loss_kwargs: Mapping[str, Value] = field(default_factory=dict)
    keep_outputs: bool = True

    def rows(self, specs: Specs, *, of_target: bool, of_kwargs: bool) -> Rows:
        """How many rows there are, where the default rule cuts: along the first dimension."""
        if self.args:
            arguments = UNKNOWN if specs.args is not None else _rows_of(self.args[0])
        else:  # all that have rows have as many
            known = map(_rows_of, self.kwargs.values()) if of_kwargs and specs.kwargs is None else ()
            arguments = next((rows for rows in known if rows != UNKNOWN), UNKNOWN)
        return Rows(arguments, _rows_of(self.target) if of_target and specs.target is None else UNKNOWN)


@dataclass(frozen=True)
class Specs:
    """How a batch is cut and put together again; None: by the default rule of `penstock.batch`."""

    args: Value = None
    kwargs: Value = None
    target: Value = None
    output: Value = None


@dataclass
class StepInputs:
    """What the user gave for one step, cut into microbatches."""

    args: list[tuple[Value, ...]] | None = None  # on the rank of the first stage
    kwargs: list[dict[str, Value]] = field(default_factory=list)
    targets: list[Value] | None = None  # on the rank of the last stage
    loss_kwargs: Mapping[str, Value] = field(default_factory=dict)
    weights: Sequence[float | Tensor] | None = None  # of the microbatches in the loss; None: each counts 1
    keep_outputs: bool = False
    loss_fn: Callable[..., Tensor] | None = None
    look: Callable[[Value, Value], None] | None = (
        None  # called with the first output and target, once its loss is there
    )
    uneven: bool = False  # input and target have different numbers of rows
    feed: Feed | None = None  # brings what is in host memory to the device; None: everything is where it is needed


def shares(inputs: StepInputs, size: int) -> list[float]:
    """The share of each of the `size` microbatches in the batch."""
    given = (inputs.targets, inputs.args, inputs.kwargs)
    sizes = next((found for each in given if each for found in [sizes_of(each)] if found is not None), None)
    if sizes is None or len(set(sizes)) == 1 or not sum(sizes):
        return [1 / size] * size
    return [float(weight) for weight in weights(sizes)]


def shapes_of(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    """What tells one shape of input from another."""
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:
        return args[0].shape, args[0].dtype, args[0].requires_grad
    tensors, spec = flatten(_plain((args, kwargs)))
    return tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors), spec


def _plain(value: Value) -> object:
    """What cannot cross a boundary may still be an argument (a mask object, a cache): its type stands for it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple) or isinstance(value, Microbatches):
        return [_plain(item) for item in value]
    try:
        flatten(value)
    except StageError:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return value


def _rows_of(value: object) -> int:
    """How many rows a tensor has. Where those of a nest are, only its owner knows."""
    if isinstance(value, Microbatches):
        return sum(sizes_of(list(value)) or (UNKNOWN,))
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else UNKNOWN
