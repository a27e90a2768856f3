"""One rank of a training run: connect, listen to Ctrl-C, run, and leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from threading import Event

import torch
import torch.distributed as dist

from penstock.front.saving import let_savings_end
from penstock.train.history import RANKS
from penstock.train.launch import RESTARTS, fitted, restarts
from penstock.train.loggers import check_logger
from penstock.train.loop import Run
from penstock.train.meet import connected, where_of
from penstock.train.owner import in_use, owned
from penstock.train.screen import Screen
from penstock.train.train_job import make_job, options_unheard
from penstock.train.train_options import TrainOptions


def run_rank(options: TrainOptions, undecided: Collection[str] = ()) -> bool:
    """Train as one rank; whether it went to its end. The job may decide what is `undecided`."""
    first = int(os.environ.get("RANK", "0")) == 0
    decides = first and RESTARTS not in os.environ  # else the launcher owns the folder
    with (
        owned(options.folder) if decides else nullcontext(),
        ExitStack() as folder,
        connected(options),
        _stop_requests() as stop,
    ):
        folder.enter_context(in_use(options.folder))
        folder.callback(let_savings_end)  # before the folder is another's
        job = make_job(options)
        options = options.with_those_of(job.options, undecided)
        for name in options.loggers:
            check_logger(name, opens=first)
        options.check_validated(job.validation)
        options = fitted(options, int(os.environ.get("WORLD_SIZE", "1")))
        screen = Screen(enabled=first)
        if unheard := options_unheard(options):
            screen.say(unheard)
        if decides and not restarts():
            (options.folder / RANKS).unlink(missing_ok=True)  # as a launcher does
        # A run that was killed before it began has not put aside what an earlier one left.
        begun = first and (options.folder / RANKS).exists()
        facts = torch.tensor([restarts(), int(begun)], device=where_of(options))
        if dist.is_initialized():
            # Torch counts for each host, and all ranks must see alike whether this follows a crash.
            dist.all_reduce(facts, dist.ReduceOp.MAX)
        options = replace(options, resume=options.resume or bool(facts.all()))
        with screen.hearing():
            return Run(options, job, screen, stop).train()


@contextmanager
def _stop_requests() -> Iterator[Event]:
    """Ctrl-C and SIGTERM ask for the end after the present step; the second time they mean it at once."""
    stop = Event()

    def ask(number: int, _: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
