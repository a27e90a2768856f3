"""How much the loss of each microbatch counts, so that a batch in microbatches has the loss and gradients of the whole batch.

    policy = RowPolicy(weight_of=LossWeights(nn.CrossEntropyLoss(), None).shares)      # by the labels that count

In this order: `loss_weight=` of the user; what the loss says of itself (`.reduction`, `ignore_index`, `weight` of torch's own);
what is found out of a function that can be called once more (`penstock.front.loss_probe`); else the share of the rows.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.batch.batch import Batch, Shares, Weights, precise_on
from penstock.errors import LabelsNotCounted, RunError
from penstock.front.loss_probe import (
    LabelCall,
    adds_up,
    aside,
    depends_on_arguments_alone,
    is_function_of_torch,
    is_loss_of_torch,
    label_call,
    labels_of,
)
from penstock.nest import Value, tensors_in
from penstock.run.last_stage import OwnLoss

IGNORED = -100  # the label that torch's losses ignore unless they are told otherwise
_ROWS, _SUM, _LABELS = "rows", "sum", "labels"
_COUNTING = (functional.cross_entropy, functional.nll_loss)


class LossWeights:
    """Knowledge about the loss of one pipeline; `shares` is a `weight_of` of a `RowPolicy`."""

    def __init__(
        self,
        loss_fn: Callable[..., Tensor] | None,
        given: Callable[..., Value] | None,
        *,
        by_dimension_0: bool = True,  # rows of outputs and targets lie along their first dimension
    ) -> None:
        loss_fn = _not_compiled(loss_fn)
        self.loss_fn, self.given, self.by_dimension_0 = loss_fn, given, by_dimension_0
        self._is_tried = depends_on_arguments_alone(loss_fn)  # a function that can be called once more
        self._found: dict[object, str | Tensor] = {}  # by the options that the loss was called with
        self._warned = False
        self._on_host: tuple[Tensor, int, Tensor] | None = None  # weights of classes, their version, and a copy

    def shares(self, inputs: Batch, by_rows: Sequence[float]) -> Shares:
        """Return the shares of the microbatches, or the function that finds them with the first output."""
        if self.given is not None:
            return as_shares([_number(self.given(*args, **kwargs)) for args, kwargs in _arguments(inputs)], by_rows)
        assert inputs.targets is not None, "there is nothing to weigh without a loss"
        stated = self._stated(inputs.targets[0], inputs.loss_kwargs)
        if stated == _SUM:
            return [1.0] * len(by_rows)
        if isinstance(stated, LabelCall):
            return as_shares([self._count(stated, labels) for labels in inputs.targets], by_rows)
        if stated == _ROWS:
            return by_rows
        if self._is_tried:
            return functools.partial(self._seen, inputs, by_rows)
        self._warn(inputs, by_rows)
        return by_rows

    def _seen(self, inputs: Batch, by_rows: Sequence[float], output: Value, target: Value) -> Weights:
        """What a function shows with the first output of a step."""
        loss_fn, targets, options = self.loss_fn, inputs.targets, inputs.loss_kwargs
        assert loss_fn is not None, "there was a loss"
        assert targets is not None, "there was a loss"
        key = tuple((k, v if isinstance(v, bool | int | float | str) else None) for k, v in sorted(options.items()))
        found = self._found.get(key)
        if found not in (_ROWS, _SUM) and not isinstance(found, Tensor):
            with aside(loss_fn, output):
                found = found or self._try(output, target, options)
                if found == _LABELS:
                    calls = [labels_of(loss_fn, output, one, options, only_labels=True) for one in targets]
                    if None not in calls:
                        self._found[key] = _LABELS
                        return as_shares([self._count(one, one.labels) for one in calls if one is not None], by_rows)
                elif found is not None:
                    self._found[key] = found
        if found == _SUM:
            return [1.0] * len(by_rows)
        if isinstance(found, Tensor):  # nobody reads it
            return [torch.where(found, torch.ones_like(one), one) for one in _on(found.device, by_rows)]
        self._warn(inputs, by_rows)
        return by_rows

    def _try(self, output: Value, target: Value, options: Mapping[str, Value]) -> str | Tensor | None:
        """What a function is, by a few calls of it; None: not with these rows."""
        assert self.loss_fn is not None, "there was a loss"
        call = labels_of(self.loss_fn, output, target, options)
        if call is not None and call.reduction in ("mean", "sum"):
            return _SUM if call.reduction == "sum" else _LABELS
        flags = adds_up(self.loss_fn, output, target, options) if self.by_dimension_0 else None
        if flags is None:
            return _ROWS
        if flags.device.type != "cpu":
            return flags[0]
        adds, known = flags.tolist()
        return None if not known else _SUM if adds else _ROWS

    def _stated(self, target: Value, options: Mapping[str, Value]) -> str | LabelCall | None:
        """What a loss of torch says of itself."""
        loss_fn: Value = self.loss_fn
        if isinstance(loss_fn, OwnLoss | None):
            return None
        if isinstance(loss_fn, functools.partial) and not loss_fn.args:
            loss_fn, options = loss_fn.func, {**loss_fn.keywords, **options}
        counts = loss_fn in _COUNTING
        if is_loss_of_torch(loss_fn):
            counts = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss)
            options = {name: getattr(loss_fn, name, None) for name in ("reduction", "weight")}
            options["ignore_index"] = getattr(loss_fn, "ignore_index", IGNORED)
        elif not is_function_of_torch(loss_fn):
            return _SUM if getattr(loss_fn, "reduction", None) == "sum" else None
        elif options.get("size_average") is not None or options.get("reduce") is not None:
            return _ROWS
        if options.get("reduction") == "sum":
            return _SUM
        return (label_call(target, options) if counts else None) or _ROWS

    def _count(self, call: LabelCall, labels: Tensor) -> float | Tensor:
        """What the labels count that are not ignored, each by the weight of its class."""
        counted = labels != call.ignore_index
        if call.weight is None:
            total = counted.sum()
        else:
            of_class = self._class_weight(call.weight, labels.device)
            total = (of_class[labels.where(counted, 0).long()] * counted).sum()
        return float(total) if total.device.type == "cpu" else total

    def _class_weight(self, weight: Tensor, device: torch.device) -> Tensor:
        """Read weights of classes that are on a device once, not in each step."""
        if weight.device == device:
            return weight.to(precise_on(device))
        if self._on_host is None or self._on_host[0] is not weight or self._on_host[1] != weight._version:
            self._on_host = weight, weight._version, weight.detach().to(device, precise_on(device))
        return self._on_host[2]

    def _warn(self, inputs: Batch, by_rows: Sequence[float]) -> None:
        """Say once that labels which do not count are there, and that nothing says how they weigh."""
        if self._warned:
            return
        given: Sequence[Value] = _arguments(inputs, or_none=True) if _is_own(inputs) else inputs.targets or ()
        labels = [_labels_in(one) for one in given]
        if not any(bool((one == IGNORED).any()) for some in labels for one in some):
            return
        shares = as_shares([float(sum(int((one != IGNORED).sum()) for one in some)) for some in labels], by_rows)
        if all(math.isclose(float(one), rows) for one, rows in zip(shares, by_rows, strict=True)):
            return
        self._warned = True
        warnings.warn(
            f"the target holds labels of {IGNORED}, which losses ignore, and the microbatches count by their rows: a mean over "
            "the labels of the whole batch is another number. Give loss_fn=nn.CrossEntropyLoss(), or say what a microbatch "
            f"counts: loss_weight=lambda target: (target != {IGNORED}).sum(); if rows are right, silence this warning",
            LabelsNotCounted,
            stacklevel=2,
        )


def _not_compiled(loss_fn: Value) -> Value:
    """The loss that torch.compile was given."""
    if isinstance(loss_fn, nn.Module):
        return getattr(loss_fn, "_orig_mod", loss_fn)
    given = getattr(loss_fn, "_torchdynamo_orig_callable", None)
    return loss_fn if given is None else getattr(given, "__wrapped__", given)  # torch wraps functions of its own first


def as_shares(counts: Weights, by_rows: Sequence[float]) -> Weights:
    """The part of each microbatch in what all count together; that of its rows, if none counts anything.

    >>> as_shares([3.0, 1.0], [0.5, 0.5]), as_shares([0.0, 0.0], [0.5, 0.5])
    ([0.75, 0.25], [0.5, 0.5])
    """
    place = next((one.device for one in counts if isinstance(one, Tensor)), None)
    if place is None:
        total = sum(counts)
        return [one / total for one in counts] if total else by_rows
    each = _on(place, counts)
    whole = torch.stack(each).sum()
    return [torch.where(whole > 0, one / whole, rows) for one, rows in zip(each, _on(place, by_rows), strict=True)]


def _on(device: torch.device, numbers: Weights) -> list[Tensor]:
    dtype = precise_on(device)
    return [
        one.to(dtype) if isinstance(one, Tensor) else torch.full((), one, dtype=dtype, device=device) for one in numbers
    ]


def _is_own(inputs: Batch) -> bool:
    return isinstance(inputs.loss_fn, OwnLoss)


def _arguments(inputs: Batch, *, or_none: bool = False) -> list[tuple[tuple[Value, ...], dict[str, Value]]]:
    """What `loss_weight` is called with for each microbatch: its target; the arguments of a model with a loss of its own."""
    if not _is_own(inputs):
        return [((target,), {}) for target in inputs.targets or ()]
    size = len(inputs.targets or ())
    if inputs.args is None and not inputs.kwargs:
        if or_none:
            return []
        raise RunError(
            "loss_weight= for a model with a loss of its own, and the rank of the last stage has no arguments to call it with; "
            "give them there too: step(x, labels=y) on every rank"
        )
    kwargs = [dict(one) for one in inputs.kwargs or [{}] * size]
    return list(zip(inputs.args or [()] * size, kwargs, strict=True))


def _number(value: object) -> float | Tensor:
    """What `loss_weight` gave: a number, or one on a device, which is not read."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().reshape(())
        if value.device.type != "cpu":
            return value
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        given = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise RunError(f"loss_weight gave {given:.80}; expected a number from 0: how much the microbatch counts")
    return float(value)


def _labels_in(value: object) -> list[Tensor]:
    """What may be labels, in host memory: on a device nobody looks, since the host would wait for it."""
    return [one for one in tensors_in(value) if one.dtype in (torch.int64, torch.int32) and one.device.type == "cpu"]
