"""What happens in a training run, as a stream of events: one for each step, with the figures of all ranks.

    log = penstock.train.EventLog(pipe, "tensorboard", folder="runs/mine", optimizer=optimizer)

This line before a loop is enough: a step begins with `pipe.step` and ends with `optimizer.step`. Or the loop says it itself:

    log = penstock.train.EventLog(pipe, "tensorboard", folder="runs/mine")
    for step, (tokens, labels) in enumerate(loader):
        with log.step(step, optimizer=optimizer, tokens=tokens.numel()) as event:
            event.loss = pipe.step(tokens, target=labels).loss
            event.norm = pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    log.close()

The time and the memory of a step are the largest over the ranks: the others wait for the slowest, and the fullest is the one
that runs out. The ranks meet once a step for that, with a few numbers; without an EventLog they do not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path

import torch

from penstock.batch import batch_size_of
from penstock.checks import check_types
from penstock.errors import RunError
from penstock.front import Pipeline, Result
from penstock.nest import Value
from penstock.observe.live_memory import allocator_counts
from penstock.train.loggers import Logger, open_logger

_NAMES = {"norm": "gradient_norm", "rate": "learning_rate"}
_NO_METRICS = ("step", "time", "ranks")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class RankFigures:
    """What one rank had of a step, for example ``RankFigures(seconds=0.21, busy=0.17, span=0.2, memory=812_000_000)``."""

    seconds: float  # of the whole step, with the optimizer
    busy: float  # in which it did something in the pipeline
    span: float  # from its first action in the pipeline to its last
    memory: int  # bytes: the peak on an accelerator, what is resident on a CPU


@dataclass
class Noted:
    """What the body of `EventLog.step` fills in."""

    loss: float | None = None
    norm: float | None = None
    tokens: int = 0  # or rows
    rate: float | None = None  # what the optimizer had as the step began


@dataclass(frozen=True)
class StepEvent:
    """One step of a run, ready to be written down.

    >>> figures = [RankFigures(2.0, busy=1.5, span=2.0, memory=10), RankFigures(1.9, busy=0.5, span=1.0, memory=30)]
    >>> event = StepEvent.of(7, Noted(loss=3.5, norm=1.0, tokens=100), figures)
    >>> event.seconds, event.memory, event.bubble, event.tokens_per_second
    (2.0, 30, 0.5, 50.0)
    """

    step: int
    loss: float | None
    norm: float | None  # of the gradients, before they were clipped
    rate: float | None  # the learning rate of the first group
    seconds: float  # of the slowest rank
    tokens_per_second: float | None
    bubble: float  # the share of the ranks' time in the pipeline in which they waited
    memory: int  # bytes of the fullest rank
    time: float  # when it ended, in seconds since 1970
    ranks: tuple[RankFigures, ...]

    @classmethod
    def of(cls, step: int, noted: Noted, ranks: Sequence[RankFigures]) -> StepEvent:
        seconds = max(rank.seconds for rank in ranks)
        speed = noted.tokens / seconds if noted.tokens and seconds > 0 else None
        whole = max(rank.span for rank in ranks) * len(ranks)
        bubble = max(0.0, 1.0 - sum(rank.busy for rank in ranks) / whole) if whole > 0 else 0.0
        memory = max(rank.memory for rank in ranks)
        said = (noted.loss, noted.norm, noted.rate)
        return cls(step, *said, seconds, speed, bubble, memory, time.time(), tuple(ranks))

    @property
    def metrics(self) -> dict[str, float]:
        """The figures as loggers take them: names to numbers, without those that are not known."""
        found = {_NAMES.get(one.name, one.name): getattr(self, one.name) for one in fields(self)}
        return {name: float(value) for name, value in found.items() if value is not None and name not in _NO_METRICS}


class EventLog(AbstractContextManager["EventLog"]):
    """Writes the events of a run to loggers: names ("jsonl", "tensorboard", "wandb", "mlflow") or objects of your own.

        log = EventLog(pipe, "jsonl", "tensorboard", folder="runs/mine")

    Every rank makes it and calls `step`; the first rank writes. With an `optimizer` nobody calls `step`: every step of the
    optimizer is one of the log, with the mean loss of the batches since the one before, the norm by which `pipe` clipped,
    and their rows; a step that a scaler skips counts with the next one.
    """

    def __init__(
        self,
        pipe: Pipeline,
        *loggers: str | Logger,
        folder: str | Path = "runs",
        first_step: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        check_types("EventLog", RunError, pipe=(pipe, Pipeline), folder=(folder, str | PathLike))
        self.pipe = pipe
        self._loggers: list[Logger] = []
        self._allocator_counts = pipe.transport.device.type != "cpu" and allocator_counts()
        pipe.ranks.broadcast("the loggers of a run", lambda: self._open(loggers, Path(folder), first_step))
        self._followed = None if optimizer is None else _Followed(self, optimizer, first_step)

    def _open(self, loggers: Iterable[str | Logger], folder: Path, first_step: int) -> str:
        """On the first rank; the others hear of it if that fails."""
        for one in loggers:
            self._loggers.append(open_logger(one, folder, first_step=first_step) if isinstance(one, str) else one)
        return ""

    @contextmanager
    def step(self, step: int, *, optimizer: torch.optim.Optimizer | None = None, tokens: int = 0) -> Iterator[Noted]:
        """Around a training step: `tokens` (or rows) that it takes; the body fills in the loss and the norm."""
        noted = Noted(tokens=tokens)
        if optimizer is not None and optimizer.param_groups:
            noted.rate = float(optimizer.param_groups[0]["lr"])
        if self._allocator_counts:
            torch.accelerator.reset_peak_memory_stats()
        began = time.perf_counter()
        with self.pipe.schedule.watch() as recorder:
            yield noted
        mine = RankFigures(time.perf_counter() - began, recorder.busy, recorder.span, self._memory())
        ranks = [RankFigures(**post) for post in self.pipe.ranks.all_gather("figures of a step", asdict(mine))]
        if self.pipe.is_first:
            event = StepEvent.of(step, noted, ranks)
            for logger in self._loggers:
                logger.step(event)

    def validation(self, step: int, loss: float) -> None:
        """Note a validation loss."""
        for logger in self._loggers:
            logger.validation(step, loss)

    def _memory(self) -> int:
        """The most that the device held in this step; of a device that does not count, and of the host, what the process has."""
        if self._allocator_counts:
            return int(torch.accelerator.max_memory_allocated())
        statm = Path("/proc/self/statm")
        return int(statm.read_text(encoding="ascii").split()[1]) * _PAGE if statm.is_file() else 0

    def close(self) -> None:
        """Write what is still held back."""
        if self._followed is not None:
            self._followed.leave()
        while self._loggers:
            self._loggers.pop().close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Followed:
    """A loop that knows nothing of its log: a step is all from `pipe.step` to the end of `optimizer.step`."""

    def __init__(self, log: EventLog, optimizer: torch.optim.Optimizer, first_step: int) -> None:
        self._log, self._optimizer, self._number = log, optimizer, first_step
        self._noted: Noted | None = None  # of the step that is under way
        self._stack = ExitStack()  # around it
        self._results: list[Result] = []
        pipe = log.pipe
        self._step, self._clip = pipe.step, pipe.clip_grad_norm_
        vars(pipe).update(step=self._stepped, clip_grad_norm_=self._clipped)  # until the log is closed
        self._hook = optimizer.register_step_post_hook(lambda *_: self._end())

    def leave(self) -> None:
        """The loop is nobody's any more; a step that has no end is not written."""
        self._hook.remove()
        for name in ("step", "clip_grad_norm_"):
            vars(self._log.pipe).pop(name, None)
        self._drop(GeneratorExit())

    def _drop(self, error: BaseException) -> None:
        """Nothing is written of the step that is under way."""
        self._stack.__exit__(type(error), error, error.__traceback__)
        self._noted = None
        self._results.clear()

    def _stepped(self, *args: object, **kwargs: Value) -> Result:
        if self._noted is None:
            self._noted = self._stack.enter_context(self._log.step(self._number, optimizer=self._optimizer))
        try:
            result = self._step(*args, **kwargs)
        except BaseException as error:
            self._drop(error)
            raise
        self._results.append(result)
        batch = {name: value for name, value in kwargs.items() if name not in ("target", "outputs", "loss_kwargs")}
        self._noted.tokens += (batch_size_of(args, batch) or 0) * self._log.pipe.num_replicas
        return result

    def _clipped(self, *args: Value, **kwargs: Value) -> float:
        norm = self._clip(*args, **kwargs)
        if self._noted is not None:
            self._noted.norm = norm
        return norm

    def _end(self) -> None:
        if self._noted is None:  # an optimizer that was called without a step of the pipeline
            return
        losses = [result.loss for result in self._results if result.loss is not None]
        self._noted.loss = sum(losses) / len(losses) if losses else None
        self._noted = None
        self._results.clear()
        self._number += 1
        self._stack.close()
