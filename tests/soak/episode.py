"""One episode on one rank: steps with faults and recoveries, each good step held against the plain loop."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

import penstock
from penstock.errors import PenstockError
from penstock.health.processes import state_of
from tests.soak.model import Bomb, Boom, batch, make_stages, plain_loop
from tests.soak.script import EXCEPTIONS, LAST, Event, Script

HEARTBEAT = 3.0
_FINE = "fine"


@dataclass
class Told:
    """What a rank tells of its episode; plain, since it crosses a process."""

    process: int
    outcomes: list[str] = field(default_factory=list)  # of each step: "fine", or the kind of what was raised
    wrong: list[str] = field(default_factory=list)  # what must not be
    threads: int = 0  # of the process, before the episode
    descriptors: int = 0
    memory: int = 0  # bytes that are resident, likewise
    growth: dict[str, int] = field(default_factory=dict)  # within the episode, from a quarter of its steps to its end


def resources() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "memory": pages * resource.getpagesize(),
    }


class Episode:
    """One rank's part; ``Episode(script, folder).run()`` in every process of a group."""

    def __init__(self, script: Script, folder: str) -> None:
        self.script, self.folder = script, Path(folder)
        self.rank = dist.get_rank()
        self.told = Told(os.getpid(), **resources())
        self.bomb = Bomb(self.act)
        self.stages = make_stages(script, self.bomb)
        self.twins = make_stages(script, None)
        self.plan = script.plan()
        self.own = self.plan.placement.stages_of(self.rank)
        made = [penstock.PipelineStage(self.stages[i], i, self.plan.num_stages, "cpu") for i in self.own]
        options: dict[str, Any] = {"rng": "per-microbatch", "seed": script.seed} if script.dropout else {}
        self.pipe = penstock.Pipeline(
            stages=made,
            schedule=self.plan,
            loss_fn=self.loss,
            microbatches=script.num_microbatches,
            dynamic=script.dynamic,
            **options,
        )
        self.processes = self.pipe.ranks.all_gather("the process of each rank", os.getpid())
        self.done = 0  # good steps
        self.over = threading.Event()  # the step in which a process was stopped has ended here

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        last = self.stages[-1]
        self.bomb.strike("loss", last.stage, last.forwards - 1)
        return nn.functional.mse_loss(output, target)

    def act(self, kind: str) -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)  # "stop" and "pause": another rank lets it go on, late or soon

    def run(self) -> Told:
        before: dict[str, int] = {}
        for step in range(len(self.script.rows)):
            if step == len(self.script.rows) // 4:
                before = {**resources(), "keys": self._keys()}
                self.pipe.ranks.all_gather(
                    "all have counted", None
                )  # who goes on may stop itself, and the store with it
            self._step(step, self.script.event(step))
        last = self.script.event(len(self.script.rows) - 1)
        if before and (last is None or last.kind not in LAST):
            self.told.growth = {name: value - before[name] for name, value in resources().items()}
            self.told.growth["keys"] = self._keys() - before["keys"]
        return self.told

    def resume(self) -> Told:
        """In a job that was started again: the step before the one with the kill, from the checkpoint."""
        with torch.no_grad():
            for index in self.own:
                for parameter in self.stages[index].parameters():
                    parameter.zero_()
        self.done = self.pipe.load(self.last_checkpoint)["done"]
        self._step(len(self.script.rows) - 2, None)
        return self.told

    @property
    def last_checkpoint(self) -> Path:
        return self.folder / f"last-{self.script.seed}"

    def _keys(self) -> int:
        """Keys in the store; a file has none that one could count."""
        try:
            return int(_get_default_store().num_keys())
        except RuntimeError:
            return 0

    # -- steps

    def _step(self, step: int, event: Event | None) -> None:
        x, y = batch(self.script, step)
        for index in self.own:
            self.stages[index].begin()
            self.stages[index].zero_grad()
        if event is not None and event.kind == "disk":
            self._disk(event)
        if event is not None and event.kind == "evaluate":
            self.pipe.evaluate(x, target=y)
            for index in self.own:
                self.stages[index].begin()
        after = self.script.event(step + 1)
        if after is not None and after.kind == "kill":
            self.pipe.save(self.last_checkpoint, extra={"done": self.done})
        guard: threading.Thread | None = None
        self.over.clear()
        mine = event is not None and self.plan.placement.rank_of(event.stage) == self.rank
        self.bomb.event = event if mine else None
        if event is not None and event.kind in ("pause", "stop") and not mine:
            process = self.processes[self.plan.placement.rank_of(event.stage)]
            guard = threading.Thread(target=self._watch_over, args=(process, event.kind == "stop"), name="soak")
            guard.start()
        try:
            loss = self.pipe.step(x, target=y).loss
            outcome = _FINE
        except (Boom, PenstockError) as error:
            outcome, loss = type(error).__name__, None
            self._expect(event, error, mine=mine)
        finally:
            self.bomb.event = None
            self.over.set()
            if guard is not None:
                guard.join()
        self.told.outcomes.append(outcome)
        if outcome == _FINE:
            self._compare(step, loss)
            self.done += 1

    def _expect(self, event: Event | None, error: Exception, *, mine: bool) -> None:
        fault = event is not None and event.kind in (*EXCEPTIONS, *LAST)
        if not fault:
            self.told.wrong.append(f"step {len(self.told.outcomes)}: {type(error).__name__}: {error}")
        elif event is not None and event.kind in EXCEPTIONS and isinstance(error, Boom) is not mine:
            self.told.wrong.append(f"{event}: rank {self.rank} raised {type(error).__name__}: {error}")

    def _compare(self, step: int, loss: float | None) -> None:
        want = plain_loop(self.script, self.twins, step, done=self.done)
        pairs = [
            (f"{index}.{name}", p.grad, q.grad)
            for index in self.own
            for (name, p), q in zip(self.stages[index].named_parameters(), self.twins[index].parameters(), strict=True)
        ]
        for name, mine, other in pairs:
            if mine is None or other is None or not torch.allclose(mine, other, rtol=1e-9, atol=1e-12):
                self.told.wrong.append(f"step {step}: the gradient of {name} is not that of the plain loop")
                return
        if loss is None or abs(loss - want) > 1e-9 * max(1.0, abs(want)):
            self.told.wrong.append(f"step {step}: the loss is {loss}, that of the plain loop {want}")

    def _watch_over(self, process: int, patient: bool) -> None:
        """Let a process that stops go on: soon after it did, or when the heartbeat has named it."""
        end = time.monotonic() + 60.0
        while state_of(process)[0] != "T" and time.monotonic() < end and not self.over.is_set():
            time.sleep(0.02)
        self.over.wait(60.0 if patient else 0.2)
        if state_of(process)[0] == "T":
            os.kill(process, signal.SIGCONT)

    # -- disks

    def _disk(self, event: Event) -> None:
        """A checkpoint on a disk that is full on one rank: all raise, and the one before it is still whole."""
        place = self.folder / f"checkpoint-{self.script.seed}"
        self.pipe.save(place, extra={"step": event.step})
        victim = self.plan.placement.rank_of(event.stage)
        try:
            with full_disk() if self.rank == victim else nothing():
                self.pipe.save(place, extra={"step": -1})
            self.told.wrong.append(f"{event}: a full disk was not noticed")
        except PenstockError as error:
            if "File too large" not in str(error):
                self.told.wrong.append(f"{event}: {type(error).__name__}: {error}")
        kept = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        if self.pipe.load(place)["step"] != event.step:
            self.told.wrong.append(f"{event}: another checkpoint than the last whole one was loaded")
        if any(not torch.equal(value, kept[name]) for name, value in self.pipe.state_dict().items()):
            self.told.wrong.append(f"{event}: the checkpoint holds other values")


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 64 bytes: the kernel refuses to write, as it does where no room is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def nothing() -> Iterator[None]:
    yield


def resume(script: Script, folder: str) -> Told:
    return Episode(script, folder).resume()


def play(script: Script, folder: str) -> Told:
    """What the workers of a pool are told to call."""
    os.environ["PENSTOCK_HEARTBEAT"] = str(HEARTBEAT)
    try:
        return Episode(script, folder).run()
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]
