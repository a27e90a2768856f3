"""The steps of a LightningModule around a pipeline: where they call the model, and what they do with its output.

A step is run twice. On every rank, up to the call of the model: that says what the model is called with, for the whole batch.
On the rank of the last stage, once for each microbatch, with the model's output in place of the call: that gives the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batch import batch_size_of
from penstock.errors import RunError
from penstock.front import Pipeline

Logged = list[tuple[str, float, dict[str, Any]]]


_FLAGS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
)  # of LightningModule.log


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
        self._rest: tuple[str, tuple[Any, ...]] = (
            "training_step",
            (),
        )  # the step that is running, and its other arguments
        self._divide = 1.0
        self._logged: list[tuple[int, Logged]] = []  # for each microbatch its rows, and what was logged

    def train(self, batch: Any, *rest: Any, divide: int) -> Tensor:
        """A training step; the loss of the batch, on every rank."""
        args, kwargs = self.call_of("training_step", batch, *rest)
        self._begin("training_step", rest, divide)
        result = self.pipe.step(*args, target=batch, **kwargs)
        self._tell(batch)
        assert result.loss is not None
        return torch.tensor(result.loss * divide, device=self.module.device)

    def evaluate(self, method: str, batch: Any, *rest: Any) -> Tensor:
        args, kwargs = self.call_of(method, batch, *rest)
        self._begin(method, rest, 1)
        result = self.pipe.evaluate(*args, target=batch, **kwargs)
        self._tell(batch)
        assert result.loss is not None
        return torch.tensor(result.loss, device=self.module.device)

    def predict(self, batch: Any, *rest: Any) -> Any:
        """What `predict_step` makes of the model's output for the whole batch, on every rank."""
        args, kwargs = self.call_of("predict_step", batch, *rest)
        output = self.pipe.predict(*args, **kwargs)
        self.stand.answer = lambda *args, **kwargs: output
        return self.module.predict_step(batch, *rest)

    def call_of(self, method: str, batch: Any, *rest: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the step calls its model with."""
        found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def answer(*args: Any, **kwargs: Any) -> Any:
            found.append((args, kwargs))
            raise _Called

        self.stand.answer = answer
        try:
            with self._collecting([]), torch.no_grad():
                getattr(self.module, method)(batch, *rest)
        except _Called:
            return found[0]
        finally:
            self.stand.answer = None
        raise RunError(f"{type(self.module).__name__}.{method} does not call its model; nothing could be pipelined")

    def loss(self, output: Any, batch: Any) -> Tensor:
        """On the last stage, for one microbatch: the rest of the step."""
        method, rest = self._rest
        logged: Logged = []
        self.stand.answer = lambda *args, **kwargs: output
        with self._collecting(logged):
            found = getattr(self.module, method)(batch, *rest)
        self._logged.append((batch_size_of((batch,)) or 1, logged))
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if isinstance(loss, Tensor):
            return loss / self._divide if self._divide != 1 else loss
        if method == "training_step":
            raise RunError(f"training_step returned {type(found).__name__}; expected the loss, or a dictionary with it")
        return torch.zeros((), device=self.module.device)

    def _begin(self, method: str, rest: tuple[Any, ...], divide: float) -> None:
        self._rest, self._divide = (method, rest), divide
        self._logged = []

    @contextmanager
    def _collecting(self, logged: Logged) -> Iterator[None]:
        """What is logged inside is kept for later."""

        def log(name: str, value: Any, *flags: Any, **options: Any) -> None:
            options |= dict(zip(_FLAGS, flags, strict=False))
            if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
                raise RunError(
                    f"log({name!r}, reduce_fx={options['reduce_fx']!r}): what microbatches log is averaged; log a mean"
                )
            known = value.compute() if hasattr(value, "compute") else value  # a metric of torchmetrics
            logged.append((name, float(known), options))

        def log_dict(values: Mapping[str, Any], *flags: Any, **options: Any) -> None:
            for name, value in values.items():
                log(name, value, *flags, **options)

        self.module.log, self.module.log_dict = log, log_dict
        try:
            yield
        finally:
            del self.module.log, self.module.log_dict

    def _tell(self, batch: Any) -> None:
        """The mean over the microbatches of each thing that was logged, on every rank."""
        sums: dict[str, list[Any]] = {}
        for rows, logged in self._logged:
            for name, value, options in logged:
                plain = {k: v for k, v in options.items() if isinstance(v, bool | int | str) and k != "batch_size"}
                entry = sums.setdefault(name, [0.0, 0, plain])
                entry[0] += rows * value
                entry[1] += rows
        everyone = self.pipe.gather("what was logged", sums)
        size = batch_size_of((batch,))
        for told in everyone:
            for name, (total, rows, options) in told.items():
                self.module.log(name, total / rows, **options, batch_size=size)
