"""The steps of a LightningModule around a pipeline: where they call the model, and what they do with its output.

A step is run twice. On every rank, up to the call of the model: that says what the model is called with, for the whole batch.
On the rank of the last stage, once for each microbatch, with the model's output in place of the call: that gives the loss. Where
the last stage is recomputed, that part runs again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from math import isnan
from operator import is_

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from penstock.backward.recompute import recomputing
from penstock.batch import batch_size_of
from penstock.errors import RunError
from penstock.front import Pipeline
from penstock.front.spread import receive_from, send_to
from penstock.integrations.data_numbers import DataNumbers
from penstock.integrations.hf_batches import count_labels
from penstock.nest import Value, has_tensor, open_node
from penstock.stage.buffers import Tables

# The arguments of LightningModule.log behind name and value.
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
_REDUCED = {"mean": "mean", "avg": "mean", "sum": "sum", "amax": "max", "max": "max", "amin": "min", "min": "min"}
_JOINED: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}
_WHERE = ("sync_dist", "sync_dist_group", "rank_zero_only")  # every rank logs the same, so none of them is asked


@dataclass
class Means:
    """What the loss of a batch is a mean of, where that is not its rows."""

    weight: Callable[[Value], Value] | None = None  # of a batch or a microbatch: how many of them it has
    of_labels: bool = False  # the model is one of transformers, whose own loss is a mean over the labels that count
    shifted: bool = False  # of which the first of a row does not
    scaled: bool = True  # False: the loss is a sum
    spec: object = None  # how the batch is cut

    def count(self, batch: Value, call: Mapping[str, Value]) -> float | None:
        """How much a (micro)batch counts, with which the model is called so; None: by its rows."""
        if self.weight is not None:
            return float(self.weight(batch))
        return count_labels(call, shifted=self.shifted) if self.of_labels else None

    def rows(self, batch: Value) -> int | None:
        return batch_size_of((batch,), args_spec=None if self.spec is None else (self.spec,))


@dataclass
class _Logged:
    """What one microbatch logged under a name."""

    value: float | None  # None: of a metric that is asked for its value later
    options: dict[str, Value]  # with `metric_attribute`, if it is a metric: its name in the LightningModule
    weight: float | None = None  # in the mean of the batch, in place of its rows


class PerRow:
    """A list with an entry for each row of a batch, such as the names of its texts: cut as the rows are."""

    __slots__ = ("values",)

    def __init__(self, values: list[Value] | tuple[Value, ...]) -> None:
        self.values = values

    def of(self, rows: list[int]) -> Value:
        return type(self.values)(self.values[row] for row in rows)


def _replaced(value: Value, make: Callable[[Value], Value]) -> Value:
    """The value with what `make` makes of its parts, unless that is None; the same object if nothing is replaced."""
    made = make(value)
    node = open_node(value) if made is None else None
    if node is None:
        return value if made is None else made
    parts = [_replaced(child, make) for child in node.children]
    return value if all(map(is_, parts, node.children)) else node.build(parts)


class _Called(Exception):
    """The step has come to the call of its model."""


class Stand(nn.Module):
    """Stands where the model was. It holds the stages of this rank, so that their parameters are the LightningModule's."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        self.answer: Callable[..., Value] | None = None

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        if self.answer is None:
            raise RunError(
                "the model is called outside of a step, or twice in one; with a PipelineStrategy a step calls its model once"
            )
        answer, self.answer = self.answer, None
        return answer(*args, **kwargs)


class LoggedSteps:
    """Runs the steps of a LightningModule with a pipeline in place of its model."""

    pipe: Pipeline
    numbers: DataNumbers | None = None  # what is drawn before the model is called, the same on all ranks

    def __init__(self, module: Value, stand: Stand, means: Means | None = None) -> None:
        apart = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if apart:
            raise RunError(
                f"{type(module).__name__} trains {', '.join(apart)} beside the model that is cut into stages, and only the last "
                "stage would see them; put them into that model, or freeze them"
            )
        self.module = module
        self.stand = stand
        self.means = means or Means()
        self.metrics = SharedMetrics(module)
        within = set(stand.modules())
        self._beside = [part for part in module.modules() if part not in within]  # also the module itself
        # The step that is running, and its other arguments.
        self._rest: tuple[str, tuple[Value, ...]] = ("training_step", ())
        self._divide = 1.0
        # Of the whole batch: its rows, how much it counts otherwise, and the microbatches if it shows neither.
        self._of_batch: tuple[int | None, float | None, int] = (None, None, 1)
        # What was logged, by name: for each microbatch its rows and the value.
        self._logged: dict[str, list[tuple[int, _Logged]]] = {}

    def run(self, method: str, batch: Value, *rest: Value, divide: int = 1) -> Tensor:
        """A step in the pipeline; the loss of the batch, on every rank. Gradients are divided by how many batches make a step."""
        args, kwargs = self.call_of(method, batch, *rest)
        self._rest, self._divide, self._logged = (method, rest), divide, {}
        self.metrics.begin()
        run = self.pipe.step if method == "training_step" else self.pipe.evaluate
        result = run(*args, target=self._target(batch, kwargs), **kwargs)
        self._tell()
        assert result.loss_tensor is not None, "losses are shared"
        return (result.loss_tensor * divide).to(self.module.device, torch.get_default_dtype())

    def whole(self, method: str, batch: Value, *rest: Value) -> Value:
        """What the step makes of the model's output for the whole batch, on every rank."""
        args, kwargs = self.call_of(method, batch, *rest)
        output = self.pipe.predict(*args, **kwargs)
        self.stand.answer = lambda *args, **kwargs: output
        return getattr(self.module, method)(batch, *rest)

    def call_of(self, method: str, batch: Value, *rest: Value) -> tuple[tuple[Value, ...], dict[str, Value]]:
        """What the step calls its model with."""
        found: list[tuple[tuple[Value, ...], dict[str, Value]]] = []

        def answer(*args: Value, **kwargs: Value) -> Value:
            found.append((args, kwargs))
            raise _Called

        self.stand.answer = answer
        drawing = nullcontext() if self.numbers is None else self.numbers.drawing()
        try:
            with left_alone(self.metrics.parts), self._collecting(), torch.no_grad(), drawing:
                getattr(self.module, method)(batch, *rest)
        except _Called:
            return found[0]
        finally:
            self.stand.answer = None
        raise RunError(f"{type(self.module).__name__}.{method} does not call its model; nothing could be pipelined")

    def loss(self, output: Value, target: Value) -> Tensor:
        """On the last stage, for one microbatch: the rest of the step. Its losses add up to that of the batch."""
        batch, chosen = target
        if chosen is not None:
            batch = _replaced(batch, lambda part: part.of(chosen.tolist()) if isinstance(part, PerRow) else None)
        method, rest = self._rest
        rows = self.means.rows(batch) or 1
        own = output.get("loss") if isinstance(output, Mapping) else None  # as a model of transformers computes it
        count: float | None = None

        def answer(*args: Value, **kwargs: Value) -> Value:
            nonlocal count
            count = self.means.count(batch, kwargs)
            return output

        def keep(name: str, logged: _Logged) -> None:
            if count is not None and (self.means.weight is not None or _is_of(logged.value, own)):
                logged.weight = count
            self._logged.setdefault(name, []).append((rows, logged))

        self.stand.answer = answer
        again = recomputing()
        with left_alone(self._beside if again else ()), self._collecting(None if again else keep):
            found = getattr(self.module, method)(batch, *rest)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if isinstance(loss, Tensor):
            return self._weighed(loss, rows, count if self.means.weight is not None or loss is own else None)
        if method == "training_step":
            raise RunError(f"training_step returned {type(found).__name__}; expected the loss, or a dictionary with it")
        return torch.zeros((), device=self.module.device)

    def _weighed(self, loss: Tensor, rows: int, count: float | None) -> Tensor:
        of_rows, of_counts, microbatches = self._of_batch
        share = 1.0
        if self.means.scaled and count is not None and of_counts is not None:
            share = count / of_counts if of_counts else 0.0
        elif self.means.scaled:
            share = rows / of_rows if of_rows else 1 / microbatches
        if share == 0:  # the mean of nothing is no number
            return torch.zeros_like(loss.detach())
        return loss * (share / self._divide) if share != self._divide else loss

    def _target(self, batch: Value, call: Mapping[str, Value]) -> tuple[Value, Tensor | None]:
        """What is cut for the last stage: the batch, and the numbers of its rows if there are lists to be cut with them."""
        rows, count = self.means.rows(batch), self.means.count(batch, call)
        self._of_batch = rows, count, self.pipe.plan.num_microbatches

        def mark(part: Value) -> Value:  # lists with tensors in them are cut by these
            return PerRow(part) if type(part) in (list, tuple) and len(part) == rows and not has_tensor(part) else None

        marked = _replaced(batch, mark)
        return marked, None if marked is batch or rows is None else torch.arange(rows)

    @contextmanager
    def _collecting(self, keep: Callable[[str, _Logged], None] | None = None) -> Iterator[None]:
        """What is logged inside is kept for later, or dropped: of a run of which another is kept."""

        def log(name: str, value: Value, *flags: Value, **options: Value) -> None:
            options |= dict(zip(_FLAGS, flags, strict=False))
            logged = self._value_of(name, value, {k: v for k, v in options.items() if k not in _WHERE})
            if keep is not None:
                keep(name, logged)

        def log_dict(values: Mapping[str, Value], *flags: Value, **options: Value) -> None:
            for name, value in values.items():
                log(name, value, *flags, **options)

        self.module.log, self.module.log_dict = log, log_dict
        try:
            yield
        finally:
            del self.module.log, self.module.log_dict

    def _value_of(self, name: str, value: Value, options: dict[str, Value]) -> _Logged:
        if isinstance(value, Metric):
            metric = next((name for name, one in self.metrics.by_name.items() if one is value), None)
            if metric is None:
                raise RunError(
                    f"log({name!r}, ...) of a {type(value).__name__} that is no attribute of {type(self.module).__name__}; make "
                    "it one, so that every rank has it"
                )
            now = value._forward_cache  # what the metric was for these rows; None after update()
            known = float(now) if isinstance(now, Tensor) and now.numel() == 1 else None
            return _Logged(known, {"metric_attribute": metric, **options})
        given = options.pop("reduce_fx", "mean")
        kind = _REDUCED.get((given if isinstance(given, str) else getattr(given, "__name__", "")).lower())
        if kind is None:
            raise RunError(
                f"log({name!r}, reduce_fx={given!r}): what microbatches log is put together by their mean, sum, min or max"
            )
        return _Logged(float(value.detach() if isinstance(value, Tensor) else value), {**options, "reduce_fx": kind})

    def _tell(self) -> None:
        """Log on every rank what the last stage has logged for the microbatches of a batch, as one value for the batch."""
        pipe, last = self.pipe, self.pipe.plan.placement.ranks[-1]
        if pipe.rank == last:
            logged, changes = {name: _of_batch(one) for name, one in self._logged.items()}, self.metrics.changes()
            send_to(pipe.transport, [rank for rank in range(pipe.num_ranks) if rank != last], (logged, changes))
        else:
            logged, changes = receive_from(pipe.transport, last)
            self.metrics.take(changes)
        for name, (value, options) in logged.items():
            known: Value = value
            if "metric_attribute" in options:
                known = self.metrics.by_name[options["metric_attribute"]]
                known._forward_cache = None if value is None else torch.tensor(value, device=self.module.device)
            self.module.log(name, known, **options)


def _of_batch(logged: list[tuple[int, _Logged]]) -> tuple[float | None, dict[str, Value]]:
    """The value of a batch, of those of its microbatches; a mean counts by rows, or by the `batch_size` that was logged too."""
    sizes = [int(each.options.get("batch_size") or rows) for rows, each in logged]
    values = [each.value for _, each in logged if each.value is not None]
    said = logged[0][1].options.items()
    options = {k: v for k, v in said if isinstance(v, bool | int | str)} | {"batch_size": sum(sizes)}
    if len(values) < len(logged):
        return None, options
    if reduced := _JOINED.get(str(options.get("reduce_fx"))):
        return reduced(values), options
    own = [each.weight for _, each in logged if each.weight is not None and "batch_size" not in each.options]
    parts: Sequence[float] = own if len(own) == len(sizes) and any(own) else sizes
    return sum(part * value for part, value in zip(parts, values, strict=True) if part) / sum(parts), options


def _is_of(value: float | None, own: Tensor | None) -> bool:
    """Whether a value that was logged is that of a loss."""
    if value is None or own is None:
        return False
    return value == own.item() or (isnan(value) and bool(own.isnan()))  # a mean over no label is none


@contextmanager
def left_alone(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Takes back what a step does besides its result, where it runs once more: what is counted there would count twice.

        with left_alone([module.accuracy]):
            module.training_step(batch, 0)

    Afterwards modules have the attributes that they had, and these hold what they held: lists, sets, dictionaries, tensors.

    All stay the same objects, since others may refer to them, as metrics of one collection do.
    """
    attributes = [vars(part) for part in parts]
    inside = [value for one in attributes for value in one.values()]
    inside += [
        value for one in inside if isinstance(one, dict) for value in one.values() if not isinstance(value, dict)
    ]
    tables = Tables([*attributes, *(value for value in inside if isinstance(value, dict | list | deque | set))])
    tensors = [value for value in inside if type(value) is Tensor and not value.is_inference()]
    before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        tables.put_back()
        with torch.no_grad():
            for tensor, version, values in before:
                if tensor._version != version:
                    tensor.copy_(values)


class SharedMetrics:
    """The metrics of torchmetrics in a LightningModule, by name: the last stage updates them, and every rank has their state.

    So `self.log("accuracy", self.accuracy)`, and `self.accuracy.compute()` at the end of an epoch, give on every rank what they
    give in one process. torchmetrics' own exchange between processes is left out: it would add up what all ranks have already.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = dict(module.named_modules())
        self.by_name = {name: part for name, part in parts.items() if isinstance(part, Metric)}
        self._groups = [part for part in parts.values() if isinstance(part, MetricCollection)]
        self.parts: list[nn.Module] = [*self.by_name.values(), *self._groups]
        self._before: dict[str, tuple[int, dict[str, list[Tensor]]]] = {}
        for metric in self.by_name.values():
            metric.distributed_available_fn = bool  # which says False: no exchange between processes

    def begin(self) -> None:
        """Before a step, on every rank: what all have."""
        for name, metric in self.by_name.items():
            lists = {key: [*value] for key, value in metric.metric_state.items() if isinstance(value, list)}
            self._before[name] = metric.update_count, lists

    def changes(self) -> dict[str, tuple[int, dict[str, Value]]]:
        """On the last stage, after a step: how often each metric was updated so far, and its state; of a list that is how many of
        its first values the other ranks have, and those that they lack."""
        for group in self._groups:
            group.values(copy_state=False)  # metrics of a collection that share a state all refer to it from here on
        found = {}
        for name, metric in self.by_name.items():
            count, lists = self._before[name]
            if count or metric.update_count:
                state: dict[str, Value] = dict(metric.metric_state)
                for key, old in lists.items():
                    kept = sum(1 for _ in takewhile(bool, map(is_, old, [*state[key]])))
                    state[key] = kept, state[key][kept:]
                found[name] = metric.update_count, state
        return found

    def take(self, changes: dict[str, tuple[int, dict[str, Value]]]) -> None:
        """On the other ranks: the changes of the last stage."""
        for name, (count, state) in changes.items():
            metric: Value = self.by_name[name]
            for key, value in state.items():
                before = getattr(metric, key)
                setattr(metric, key, before[: value[0]] + list(value[1]) if isinstance(before, list) else value)
            metric._update_count, metric._computed = count, None  # as its own update would leave them
