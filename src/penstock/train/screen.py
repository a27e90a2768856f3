"""What a run shows: a bar that moves on a terminal, plain lines anywhere else; only rank 0 speaks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console


class ProgressBar(Protocol):
    def update(self, done: int, *, loss: float, speed: float, unit: str) -> None: ...


class Screen:
    """The terminal of rank 0; the other ranks have one that says nothing."""

    def __init__(self, *, enabled: bool, console: Console | None = None) -> None:
        self.enabled = enabled
        self.console = console if console is not None else Console(highlight=False)

    def say(self, text: str) -> None:
        if self.enabled:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Inside, what penstock tells its logger is said here: which stages are being compiled, and how long that took."""
        if not self.enabled:
            yield
            return
        logger, handler = logging.getLogger("penstock"), _Saying(self)
        before = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)

    @contextmanager
    def bar(self, total: int, start: int) -> Iterator[ProgressBar]:
        if not self.enabled:
            yield _Silent()
        elif self.console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self.console) as progress:
                yield _Moving(progress, progress.add_task("", total=total, completed=start, figures=""))
        else:
            yield _Lines(self, total, start)


class _Saying(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.INFO)
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self.screen.say(record.getMessage())


class _Silent:
    def update(self, done: int, *, loss: float, speed: float, unit: str) -> None:
        """Another rank speaks."""


class _Moving:
    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task

    def update(self, done: int, *, loss: float, speed: float, unit: str) -> None:
        self.progress.update(self.task, completed=done, figures=f"loss {loss:.4f}  {speed:,.0f} {unit}/s")


class _Lines:
    """A line now and then: the first step, the last, and about twenty between."""

    def __init__(self, screen: Screen, total: int, start: int) -> None:
        self.screen, self.total, self.start = screen, total, start
        self.every = max(1, (total - start) // 20)
        self.began = time.monotonic()

    def update(self, done: int, *, loss: float, speed: float, unit: str) -> None:
        number = done - self.start
        if number != 1 and done != self.total and number % self.every:
            return
        left = (time.monotonic() - self.began) / number * (self.total - done)
        self.screen.say(f"step {done}/{self.total}  loss {loss:.4f}  {speed:,.0f} {unit}/s  {left:.0f} s left")
