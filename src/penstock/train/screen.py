"""What a run shows: a bar that moves on a terminal, plain lines anywhere else; only rank 0 speaks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


class Screen(logging.Handler):
    """The terminal of rank 0; the other ranks have one that says nothing. It also shows what is logged."""

    def __init__(self, *, enabled: bool, console: Console | None = None) -> None:
        super().__init__(logging.INFO)
        self.enabled = enabled
        self.console = console if console is not None else Console(highlight=False)

    def say(self, text: str) -> None:
        if self.enabled:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Inside, what penstock tells its logger is said here: which stages are being compiled, and how long that took."""
        logger = logging.getLogger("penstock")
        before = logger.level
        if self.enabled:
            logger.addHandler(self)
            logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(before)

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    @contextmanager
    def bar(self, total: int, start: int) -> Iterator[Callable[[int, str], object]]:
        """A bar, or a line now and then: of the first step, of the last, and of about twenty between. It is told how many steps
        are done, and what to say of the last of them."""
        if self.enabled and self.console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            figures = TextColumn("{task.fields[figures]}")
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), figures, TimeRemainingColumn())
            with Progress(*columns, console=self.console) as progress:
                task = progress.add_task("", total=total, completed=start, figures="")
                yield lambda done, figures: progress.update(task, completed=done, figures=figures)
            return
        every, began = max(1, (total - start) // 20), time.monotonic()

        def line(done: int, figures: str) -> None:
            number = done - start
            if number == 1 or done == total or number % every == 0:
                left = (time.monotonic() - began) / number * (total - done)
                self.say(f"step {done}/{total}  {figures}  {left:.0f} s left")

        yield line
