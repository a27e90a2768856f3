"""Memory is that of the plan: what is in flight, and nothing else; nothing waits for the garbage collector."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from penstock import Schedule
from penstock.schedules import all_schedules
from tests.run.live import LiveBytes
from tests.run.pipes import on_ranks

WIDTH, ROWS = 32, 64
ACTIVATION = WIDTH * ROWS * 8
SLACK = 4096  # losses, headers
HEADERS = 64  # the numbers around a step may still be with the other rank


def make(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(num_stages)]


def data(num_microbatches: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(ROWS * num_microbatches, WIDTH, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def peaks(
    name: str, num_ranks: int, num_microbatches: int, *, train: bool = True, keep: bool = False, cold: bool = False
) -> list[int]:
    """Of a step, on each rank, beyond parameters, gradients and the user's batch."""
    recipe = next(recipe for recipe in all_schedules() if recipe.name == name)
    modules = make(num_ranks * (recipe.stages_per_rank or recipe.default_stages_per_rank))
    x, y = data(num_microbatches)

    def rank(schedule: Schedule, rank: int) -> int:
        own = [p for index in schedule.placement.stages_of(rank) for p in modules[index].parameters()]
        for parameter in own:
            parameter.grad = torch.zeros_like(parameter)
        if not cold:
            schedule.step(x, target=y)
            schedule.eval(x)
        with LiveBytes(x, y, own, [p.grad for p in own]) as live:
            if train:
                schedule.step(x, target=y, return_outputs=keep)
            else:
                schedule.eval(x, return_outputs=keep)
            return live.peak

    return on_ranks(name, num_ranks, num_microbatches, rank, modules=modules)


@pytest.mark.parametrize(
    ("name", "num_ranks", "many"),
    [
        ("1f1b", 3, 64),
        ("zb-h1", 2, 40),
        ("zbv", 2, 40),
        ("interleaved1f1b", 2, 40),
        ("v-half", 2, 40),
        ("v-min", 2, 40),
    ],
)
def test_the_peak_does_not_grow_with_the_number_of_microbatches(name: str, num_ranks: int, many: int) -> None:
    few, found = peaks(name, num_ranks, 16), peaks(name, num_ranks, many)
    for rank in range(num_ranks):
        assert found[rank] <= few[rank] + SLACK, (name, few, found)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_nor_does_that_of_a_first_step_whose_messages_describe_themselves(name: str) -> None:
    few, many = peaks(name, 2, 16, cold=True), peaks(name, 2, 40, cold=True)
    for rank in range(2):
        assert many[rank] <= few[rank] + 64 * 200, (name, few, many)  # descriptions, kept for the steps that follow


def test_the_peak_of_1f1b_is_that_of_its_microbatches_in_flight() -> None:
    """Rank r has num_ranks - r in flight, each with its input and an activation; and what may be on its way."""
    for rank, peak in enumerate(peaks("1f1b", 4, 16)):
        in_flight = 4 - rank
        assert peak <= (3 * in_flight + 8) * ACTIVATION, (rank, peak / ACTIVATION)


def test_gpipe_keeps_all_microbatches_and_1f1b_does_not() -> None:
    assert peaks("gpipe", 2, 16)[0] > 2 * peaks("1f1b", 2, 16)[0]


def test_evaluation_keeps_nothing_that_was_sent() -> None:
    for peak in peaks("1f1b", 3, 48, train=False):
        assert peak <= 10 * ACTIVATION


def test_outputs_are_kept_only_if_they_are_asked_for() -> None:
    without, kept = peaks("1f1b", 2, 32), peaks("1f1b", 2, 32, keep=True)
    assert kept[1] >= without[1] + 24 * ACTIVATION
    assert kept[0] == without[0]
    without, kept = peaks("1f1b", 2, 32, train=False), peaks("1f1b", 2, 32, train=False, keep=True)
    assert kept[1] >= without[1] + 24 * ACTIVATION


def test_receive_buffers_are_those_in_flight() -> None:
    """Buffers exist for microbatches that are computed on, or may be under way; never for all."""
    modules = make(4)
    x, y = data(32)
    most = [0] * 4

    def rank(schedule: Schedule, rank: int) -> None:
        def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            for program in schedule._programs.bound.values():
                for inbox in program.inboxes.values():
                    held = sum(leaves is not None for leaves in inbox.arrived)
                    most[rank] = max(most[rank], held)

        schedule.step(x, target=y)
        modules[rank].register_forward_pre_hook(look)
        schedule.step(x, target=y)

    on_ranks("1f1b", 4, 32, rank, modules=modules)
    assert most[0] == 0
    for rank in (1, 2, 3):
        assert most[rank] <= 4 - rank + 3


@pytest.mark.parametrize("name", [recipe.name for recipe in all_schedules() if recipe.name != "forward"])
def test_nothing_that_a_step_made_is_alive_after_it(name: str) -> None:
    """Every tensor that any operation made, forwards or backwards; only gradients and losses stay."""
    recipe = next(recipe for recipe in all_schedules() if recipe.name == name)
    modules = make(2 * (recipe.stages_per_rank or recipe.default_stages_per_rank))
    x, y = data(4)

    def rank(schedule: Schedule, rank: int) -> tuple[int, int]:
        schedule.step(x, target=y)
        own = [p for index in schedule.placement.stages_of(rank) for p in modules[index].parameters()]
        with LiveBytes(x, y, own) as live:
            schedule.step(x, target=y, return_outputs=False)
            live.forget(*(p.grad for p in own))
            trained = live.now()
            schedule.eval(x, return_outputs=False)
            return trained // HEADERS, live.now() // HEADERS

    gc.collect()
    gc.disable()
    try:
        found = on_ranks(name, 2, 4, rank, modules=modules)
    finally:
        gc.enable()
    assert found == [(0, 0)] * 2
