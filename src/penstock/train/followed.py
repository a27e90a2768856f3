"""A loop that knows nothing of its log: what `pipe.step`, `pipe.clip_grad_norm_` and `optimizer.step` do is noted beside it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from penstock.batch import batch_size_of
from penstock.front import Result
from penstock.nest import Value

if TYPE_CHECKING:
    from penstock.train.events import EventLog, Noted


class Followed:
    """For example ``Followed(log, optimizer, first_step=0)``: a step is all from `pipe.step` to the end of `optimizer.step`."""

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
