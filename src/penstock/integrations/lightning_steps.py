"""The steps of a LightningModule around a pipeline: where they call the model, and what they do with its output.

A step is run twice. On every rank, up to the call of the model: that says what the model is called with, for the whole batch.
On the rank of the last stage, once for each microbatch, with the model's output in place of the call: that gives the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from penstock.batch import batch_size_of
from penstock.errors import RunError
from penstock.front import Pipeline
from penstock.integrations.lightning_metrics import SharedMetrics

_FLAGS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
)  # of LightningModule.log
_REDUCED = {"mean": "mean", "avg": "mean", "sum": "sum", "amax": "max", "max": "max", "amin": "min", "min": "min"}
_WHERE = ("sync_dist", "sync_dist_group", "rank_zero_only")  # every rank logs the same, so none of them is asked


@dataclass
class _Logged:
    """What one microbatch logged under a name."""

    value: float | None  # None: of a metric that is asked for its value later
    options: dict[str, Any]
    metric: str | None = None  # its name in the LightningModule


class _Called(Exception):
    """The step has come to the call of its model."""


class Stand(nn.Module):
    """Stands where the model was. It holds the stages of this rank, so that their parameters are the LightningModule's."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        self.answer: Callable[..., Any] | None = None

    def hold(self, pipe: Pipeline) -> None:
        self.stages = nn.ModuleList(stage.submod for stage in pipe.stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.answer is None:
            raise RunError(
                "the model is called outside of a step, or twice in one; with a PipelineStrategy a step calls its model once"
            )
        answer, self.answer = self.answer, None
        return answer(*args, **kwargs)


class LoggedSteps:
    """Runs the steps of a LightningModule with a pipeline in place of its model."""

    pipe: Pipeline

    def __init__(self, module: Any, stand: Stand) -> None:
        apart = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if apart:
            raise RunError(
                f"{type(module).__name__} trains {', '.join(apart)} beside the model that is cut into stages, and only the last "
                "stage would see them; put them into that model, or freeze them"
            )
        self.module = module
        self.stand = stand
        self.metrics = SharedMetrics(module)
        # The step that is running, and its other arguments.
        self._rest: tuple[str, tuple[Any, ...]] = ("training_step", ())
        self._divide = 1.0
        # What was logged, by name: for each microbatch its rows and the value.
        self._logged: dict[str, list[tuple[int, _Logged]]] = {}

    def train(self, batch: Any, *rest: Any, divide: int) -> Tensor:
        """A training step; the loss of the batch, on every rank."""
        args, kwargs = self.call_of("training_step", batch, *rest)
        self._begin("training_step", rest, divide)
        result = self.pipe.step(*args, target=batch, **kwargs)
        self._tell()
        assert result.loss is not None
        return torch.tensor(result.loss * divide, device=self.module.device)

    def evaluate(self, method: str, batch: Any, *rest: Any) -> Tensor:
        args, kwargs = self.call_of(method, batch, *rest)
        self._begin(method, rest, 1)
        result = self.pipe.evaluate(*args, target=batch, **kwargs)
        self._tell()
        assert result.loss is not None
        return torch.tensor(result.loss, device=self.module.device)

    def whole(self, method: str, batch: Any, *rest: Any) -> Any:
        """What the step makes of the model's output for the whole batch, on every rank."""
        args, kwargs = self.call_of(method, batch, *rest)
        output = self.pipe.predict(*args, **kwargs)
        self.stand.answer = lambda *args, **kwargs: output
        return getattr(self.module, method)(batch, *rest)

    def call_of(self, method: str, batch: Any, *rest: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the step calls its model with."""
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def answer(*args: Any, **kwargs: Any) -> Any:
            found.append((args, kwargs))
            raise _Called

        self.stand.answer = answer
        try:
            with self._collecting(lambda name, logged: None), torch.no_grad():
                getattr(self.module, method)(batch, *rest)
        except _Called:
            return found[0]
        finally:
            self.stand.answer = None
        raise RunError(f"{type(self.module).__name__}.{method} does not call its model; nothing could be pipelined")

    def loss(self, output: Any, batch: Any) -> Tensor:
        """On the last stage, for one microbatch: the rest of the step."""
        method, rest = self._rest
        rows = batch_size_of((batch,)) or 1
        self.stand.answer = lambda *args, **kwargs: output
        with self._collecting(lambda name, logged: self._logged.setdefault(name, []).append((rows, logged))):
            found = getattr(self.module, method)(batch, *rest)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if isinstance(loss, Tensor):
            return loss / self._divide if self._divide != 1 else loss
        if method == "training_step":
            raise RunError(f"training_step returned {type(found).__name__}; expected the loss, or a dictionary with it")
        return torch.zeros((), device=self.module.device)

    def _begin(self, method: str, rest: tuple[Any, ...], divide: float) -> None:
        self._rest, self._divide = (method, rest), divide
        self._logged = {}
        self.metrics.begin()

    @contextmanager
    def _collecting(self, keep: Callable[[str, _Logged], None]) -> Iterator[None]:
        """What is logged inside is kept for later."""

        def log(name: str, value: Any, *flags: Any, **options: Any) -> None:
            options |= dict(zip(_FLAGS, flags, strict=False))
            keep(name, self._value_of(name, value, {k: v for k, v in options.items() if k not in _WHERE}))

        def log_dict(values: Mapping[str, Any], *flags: Any, **options: Any) -> None:
            for name, value in values.items():
                log(name, value, *flags, **options)

        self.module.log, self.module.log_dict = log, log_dict
        try:
            yield
        finally:
            del self.module.log, self.module.log_dict

    def _value_of(self, name: str, value: Any, options: dict[str, Any]) -> _Logged:
        if isinstance(value, Metric):
            metric = self.metrics.name_of(value)
            if metric is None:
                raise RunError(
                    f"log({name!r}, ...) of a {type(value).__name__} that is no attribute of {type(self.module).__name__}; make "
                    "it one, so that every rank has it"
                )
            now = value._forward_cache  # what the metric was for these rows; None after update()
            known = float(now) if isinstance(now, Tensor) and now.numel() == 1 else None
            return _Logged(known, {"metric_attribute": metric, **options}, metric)
        given = options.pop("reduce_fx", "mean")
        kind = _REDUCED.get((given if isinstance(given, str) else getattr(given, "__name__", "")).lower())
        if kind is None:
            raise RunError(
                f"log({name!r}, reduce_fx={given!r}): what microbatches log is put together by their mean, sum, min or max"
            )
        return _Logged(float(value.detach() if isinstance(value, Tensor) else value), {**options, "reduce_fx": kind})

    def _tell(self) -> None:
        """Log on every rank what the last stage has logged for the microbatches of a batch, as one value for the batch."""
        last = self.pipe.plan.placement.ranks[-1]
        mine = {name: _of_batch(logged) for name, logged in self._logged.items()}
        changes = self.metrics.changes() if self.pipe.rank == last else {}
        logged, changes = self.pipe.gather("what was logged", [mine, changes])[last]
        self.metrics.share(self.pipe, changes)
        for name, (value, metric, options) in logged.items():
            known: Any = value
            if metric is not None:
                known = self.metrics.by_name[metric]
                known._forward_cache = None if value is None else torch.tensor(value, device=self.module.device)
            self.module.log(name, known, **options)


def _of_batch(logged: list[tuple[int, _Logged]]) -> tuple[float | None, str | None, dict[str, Any]]:
    """The value of a batch, of those of its microbatches; a mean counts by rows, or by the `batch_size` that was logged too."""
    one = logged[0][1]
    sizes = [int(each.options.get("batch_size") or rows) for rows, each in logged]
    values = [each.value for _, each in logged if each.value is not None]
    options = {k: v for k, v in one.options.items() if isinstance(v, bool | int | str)} | {"batch_size": sum(sizes)}
    if len(values) < len(logged):
        return None, one.metric, options
    match options.get("reduce_fx", "mean"):
        case "sum":
            value = sum(values)
        case "max":
            value = max(values)
        case "min":
            value = min(values)
        case _:
            value = sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)
    return value, one.metric, options
