"""Every schedule on the simulated accelerator, under NCCL's rules in both modes.

It trains, its gradients are those of a plain loop, the host waits nowhere in a warm step, nothing races, and there are at
most two communicators for each neighbour besides what the user's own group has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as theirs

from penstock.lower import InTurn
from penstock.run import Schedule1F1B
from penstock.schedules import all_schedules, get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.accelerator import pipes
from tests.accelerator.pool import Mode, SimPool
from tests.accelerator.test_device import held, loaded
from tests.plan.test_torch_files import torch_actions, torch_runtime

Grid = dict[tuple[str, int], pipes.Trained]


def combinations() -> list[tuple[str, int]]:
    """Schedule and stages a rank; a schedule that allows one number only has that."""
    return [
        (recipe.name, per_rank)
        for recipe in all_schedules()
        if recipe.name != "forward"
        for per_rank in ([recipe.stages_per_rank] if recipe.stages_per_rank else [1, 2, 3])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_trains(accelerator: SimPool, ranks: int, mode: Mode) -> None:
    """The mode is that of the user's group."""
    microbatches, chosen = ranks + 1, combinations()
    told: list[Grid] = accelerator.run(ranks, mode, train_all, microbatches, chosen, timeout=500)
    for name, per_rank in chosen:
        where = f"{name} with {per_rank} stages a rank"
        everyone = [grid[name, per_rank] for grid in told]
        expected = pipes.expected(ranks * per_rank, microbatches)
        grads = {key: grad for trained in everyone for key, grad in trained.grads.items()}
        assert grads.keys() == expected.keys(), where
        for key, grad in expected.items():
            torch.testing.assert_close(grads[key], grad, msg=f"{where}: {key}")
        assert [trained.waits for trained in everyone] == [[]] * ranks, where
        assert [trained.violations for trained in everyone] == [[]] * ranks, where
        assert all(trained.unfinished for trained in everyone) or accelerator.device != "sim", where
    for grid in told:
        made = next(reversed(grid.values())).communicators
        assert len(made) <= 2 * (ranks - 1) + (mode == "eager"), made


def train_all(device: torch.device, microbatches: int, chosen: list[tuple[str, int]]) -> Grid:
    return {(name, per_rank): pipes.train(device, name, per_rank, microbatches, steps=2) for name, per_rank in chosen}


@pytest.mark.parametrize(("mode", "own"), [("lazy", 0), ("eager", 1)])
def test_a_chain_has_two_communicators_for_each_neighbour(sim: SimPool, mode: Mode, own: int) -> None:
    """`own`: with a bound device, torch makes one for the user's group."""
    told = sim.run(3, mode, pipes.train, "1f1b", 1, 4)
    assert [trained.neighbours for trained in told] == [1, 2, 1]
    assert [len(trained.communicators) for trained in told] == [2 + own, 4 + own, 2 + own]


IN_TURN = [("1f1b", 1), ("interleaved1f1b", 2), ("interleavedzerobubble", 2), ("zbv", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("queues", "mode"), [("pair", "lazy"), ("one", "eager")])
def test_messages_in_turn_need_fewer_communicators(sim: SimPool, queues: str, mode: Mode) -> None:
    """One for each neighbour, or one for all; with receives ahead these schedules would deadlock there."""
    ranks, microbatches = 3, 4
    told: list[Grid] = sim.run(ranks, mode, train_in_turn, microbatches, queues)
    for name, per_rank in IN_TURN:
        where = f"{name} by {queues}"
        everyone = [grid[name, per_rank] for grid in told]
        grads = {key: grad for trained in everyone for key, grad in trained.grads.items()}
        for key, grad in pipes.expected(ranks * per_rank, microbatches).items():
            torch.testing.assert_close(grads[key], grad, msg=f"{where}: {key}")
        assert [trained.waits for trained in everyone] == [[]] * ranks, where
        assert [trained.violations for trained in everyone] == [[]] * ranks, where
    for grid in told:
        made = next(reversed(grid.values())).communicators
        assert len(made) <= {"pair": ranks - 1, "one": 1}[queues] + (mode == "eager"), made


def train_in_turn(device: torch.device, microbatches: int, queues: Literal["pair", "one"]) -> Grid:
    return {
        (name, per_rank): pipes.train(device, name, per_rank, microbatches, steps=2, receives=InTurn(queues))
        for name, per_rank in IN_TURN
    }


@pytest.mark.parametrize(("name", "mode"), [("interleaved1f1b", "eager"), ("zbv", "lazy")])
def test_a_plan_that_torch_has_lowered_runs(sim: SimPool, tmp_path: Path, name: str, mode: Mode) -> None:
    """torch's runtime batches the messages of such a file; with a communicator for each direction there is no need to."""
    ranks, microbatches = 3, 6
    plan = get_schedule(name)(ranks, microbatches)
    rows = theirs._add_send_recv(torch_actions(plan), plan.placement.rank_of, plan.num_stages)
    torch_runtime(rows)._dump_csv(str(tmp_path / "torch.csv"), "compute_comms")
    told = sim.run(ranks, mode, pipes.train, str(tmp_path / "torch.csv"), 2, microbatches)
    grads = {key: grad for trained in told for key, grad in trained.grads.items()}
    for key, grad in pipes.expected(2 * ranks, microbatches).items():
        torch.testing.assert_close(grads[key], grad, msg=key)
    assert [trained.waits + trained.violations for trained in told] == [[]] * ranks


def test_a_host_runs_several_steps_ahead_of_its_device(sim: SimPool) -> None:
    """Warm steps return though the device has not begun with them; the losses are there when they are read."""
    for unfinished, waits, losses, later in sim.run(2, "lazy", run_ahead):
        assert unfinished
        assert waits == []
        assert losses == later


def run_ahead(device: torch.device) -> tuple[bool, list[str], list[float], list[float]]:
    """Three steps while the device is held; then the losses of these, and of as many steps that each wait."""
    rank, sim = dist.get_rank(), loaded()
    stage = PipelineStage(pipes.block(rank).to(device), rank, 2, device)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x, y = (part.to(device) for part in pipes.batch(4))
    held_ones: list[Tensor] = []
    later: list[Tensor] = []
    schedule.step(x, target=y)
    torch.accelerator.synchronize()
    sim.reset()
    with held():
        for _ in range(3):
            schedule.step(x, target=y, losses=held_ones)
        unfinished, waits = not torch.accelerator.current_stream().query(), sim.waits()
    for _ in range(3):
        schedule.step(x, target=y, losses=later)
        torch.accelerator.synchronize()
    return unfinished, waits, [loss.item() for loss in held_ones], [loss.item() for loss in later]
