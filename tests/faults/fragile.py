"""Stages that fail when they are told to, and steps around them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from penstock.errors import PeerFailed
from penstock.plan import Plan
from penstock.run import Schedule
from penstock.stage.pipeline_stage import PipelineStage, place_in
from tests.parity.harness import left_in

WIDTH = 4
SOON = 45.0  # seconds: more than a busy machine takes, and nothing beside the 30 minutes of a process group


class Trip:
    """Where to fail: in which pass, of which stage, for which microbatch, in which step."""

    def __init__(self, where: str, stage: int, microbatch: int, *, step: int, error: type[BaseException]) -> None:
        self.where, self.stage, self.microbatch, self.step, self.error = where, stage, microbatch, step, error

    def maybe(self, where: str, stage: int, microbatch: int, step: int) -> None:
        if (where, stage, microbatch, step) == (self.where, self.stage, self.microbatch, self.step):
            raise self.error(f"on purpose, in {where}")


class Fragile(nn.Module):
    """A block whose forward, backward or gradient hook may fail."""

    def __init__(self, stage: int, trips: list[Trip]) -> None:
        super().__init__()
        self.stage, self.trips = stage, trips
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.step = 0
        self.forwards = self.grads = 0
        self.second.weight.register_post_accumulate_grad_hook(self.count)

    def begin(self, step: int) -> None:
        self.step, self.forwards, self.grads = step, 0, 0

    def trip(self, where: str, microbatch: int) -> None:
        for trip in self.trips:
            trip.maybe(where, self.stage, microbatch, self.step)

    def count(self, _: Tensor) -> None:
        self.trip("hook", self.grads)
        self.grads += 1

    def forward(self, x: Tensor) -> Tensor:
        microbatch = self.forwards
        self.forwards += 1
        self.trip("forward", microbatch)
        y = torch.tanh(self.first(x))
        if y.requires_grad:
            y.register_hook(lambda grad: self.trip("backward", microbatch))
        return self.second(y)


def until(found: Callable[[], object]) -> None:
    """Wait for something that another rank or thread does; how long that takes is a matter of the machine."""
    end = time.monotonic() + SOON
    while not found():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def when_all_others_have_come(victim: int) -> bool:
    """Meet all ranks but one, in the job's store; True on each of them, False on that one, which is not waited for."""
    store, rank = _get_default_store(), dist.get_rank()
    if rank == victim:
        return False
    store.set(f"without {victim}/{rank}", "")
    until(
        lambda: store.check([f"without {victim}/{other}" for other in range(dist.get_world_size()) if other != victim])
    )
    return True


def make_modules(num_stages: int, trips: list[Trip]) -> list[Fragile]:
    torch.manual_seed(1)
    return [Fragile(stage, trips).double() for stage in range(num_stages)]


def make_batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def expected_grads(num_stages: int, num_microbatches: int, *, rows: int = 2) -> list[Tensor]:
    """Of one step of a plain loop."""
    modules = make_modules(num_stages, [])
    x, y = make_batch(rows * num_microbatches)
    for a, b in zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True):
        for module in modules:
            a = module(a)
        (loss_fn(a, b) / num_microbatches).backward()
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def failing_loss(trips: list[Trip], last: Fragile) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        last.trip("loss", last.forwards - 1)
        return loss_fn(output, target)

    return loss


def describe(error: BaseException) -> tuple[Any, ...]:
    """What a test compares: the kind and, for PeerFailed, its facts."""
    if isinstance(error, PeerFailed):
        return ("PeerFailed", error.rank, error.stage, error.action, error.microbatch, error.cause)
    return (type(error).__name__, str(error))


def attempt(
    transport: Any, plan: Plan, modules: list[Fragile], trips: list[Trip], *, num_steps: int, **options: Any
) -> tuple[list[tuple[Any, ...] | None], list[Tensor], list[str]]:
    """Steps on one rank: what each raised, the gradients after the last one, and what failures left behind.

    `transport` is that of a thread, or None for the default process group.
    """
    rank, _ = place_in(transport)
    own = plan.placement.stages_of(rank)
    stages = [PipelineStage(modules[i], i, plan.num_stages, "cpu", group=transport) for i in own]
    schedule = Schedule.from_plan(plan, stages, loss_fn=failing_loss(trips, modules[-1]), **options)
    x, y = make_batch(2 * plan.num_microbatches)
    raised: list[tuple[Any, ...] | None] = []
    left: list[str] = []
    for step in range(num_steps):
        for index in own:
            modules[index].begin(step)
            modules[index].zero_grad()
        try:
            schedule.step(x, target=y)
        except BaseException as error:  # noqa: BLE001 - compared by the test
            raised.append(describe(error))
        else:
            raised.append(None)
        for program in schedule._programs.bound.values():
            left += left_in(program)
    grads = [p.grad for index in own for p in modules[index].parameters() if p.grad is not None]
    return raised, grads, left
