"""Recompute and offload on the simulated accelerator: the same to the bit, no host waits, and nothing is used too early."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tests.accelerator import pipes
from tests.accelerator.pool import SimPool
from tests.accelerator.test_device import comes

MICROBATCHES = 4


def train_ways(device: torch.device) -> dict[str, pipes.Trained]:
    """One rank: GPipe holds all microbatches, so all are moved. Buffers change, so a rerun has to put them back."""
    from penstock.backward.offload_targets import HostMemory
    from penstock.run import Schedule
    from penstock.schedules import get_schedule
    from penstock.stage.pipeline_stage import PipelineStage

    ways: dict[str, dict[str, Any]] = {
        "as it is": {},
        "recompute": {"recompute": True},
        "offload": {"offload": True, "offload_to": HostMemory(threshold=0)},
    }
    found = {}
    for name, options in ways.items():
        module = nn.Sequential(pipes.block(0), nn.BatchNorm1d(pipes.WIDTH).double()).to(device)
        stage = PipelineStage(module, 0, 1, device)
        plan = get_schedule("gpipe")(1, MICROBATCHES)
        schedule = Schedule.from_plan(plan, [stage], loss_fn=nn.functional.mse_loss, **options)
        found[name] = pipes.run(device, schedule, {0: module}, 1, MICROBATCHES, 3)
        found[name].grads |= {key: buffer.cpu() for key, buffer in module.named_buffers()}
    return found


def test_recompute_and_offload_make_no_host_wait_and_use_nothing_too_early(sim: SimPool) -> None:
    (ways,) = sim.run(1, "lazy", train_ways)
    expected = ways["as it is"]
    for name in ("recompute", "offload"):
        found = ways[name]
        assert found.waits == [], name
        assert found.violations == [], name
        assert found.losses == expected.losses, name
        assert all(torch.equal(found.grads[key], grad) for key, grad in expected.grads.items()), name


def drawn_again(device: torch.device) -> tuple[bool, bool]:
    """A stage without parameters draws from its device: run again, and a first time."""
    from penstock.backward.module_state import ModuleState

    module, x = nn.Dropout(0.5), torch.ones(64, device=device)
    state = ModuleState(module, device=device)
    state.begin_step(None)
    before, first = state.snapshot(), module(x)
    with state.replayed(before):
        again = module(x)
    later = module(x)
    return torch.equal(first.cpu(), again.cpu()), torch.equal(first.cpu(), later.cpu())


def test_a_stage_without_parameters_gets_the_random_numbers_of_its_device_again(sim: SimPool) -> None:
    ((again, later),) = sim.run(1, "lazy", drawn_again)
    assert again
    assert not later


def copy_speed(device: torch.device) -> tuple[float, bool]:
    from penstock.backward.offload_targets import HostMemory
    from penstock.front.machine import copy_bandwidth

    elsewhere = HostMemory()
    speed = copy_bandwidth(device, elsewhere)
    here = torch.arange(40_000, device=device)
    back = elsewhere.put(here.view(torch.uint8)).back().view(torch.int64)
    return speed, torch.equal(back.cpu(), torch.arange(40_000))


def test_copies_are_timed_by_events_of_the_device(sim: SimPool) -> None:
    ((speed, same),) = sim.run(1, "lazy", copy_speed)
    assert 0 < speed < float("inf")
    assert same


def too_early(device: torch.device) -> list[str]:
    """A place that does not make the computing wait for its copies: the detector sees what is read before it is there."""
    from penstock.backward.offload_targets import HostMemory, OffloadedBytes

    class Careless(HostMemory):
        def put(self, flat: torch.Tensor) -> OffloadedBytes:
            away: Any = super().put(flat)
            away.back = lambda: away.start().flat
            return away  # type: ignore[no-any-return]

    sim = pipes.simulation(device)
    flat = torch.ones(1 << 16, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    sim.reset()
    used = Careless(threshold=0).put(flat).back() + 1
    torch.accelerator.synchronize()
    assert used.numel() == flat.numel()
    return list(sim.violations())


def test_the_detector_sees_a_use_before_the_copy_is_done(sim: SimPool) -> None:
    (violations,) = sim.run(1, "lazy", too_early)
    assert violations


def beside(device: torch.device) -> dict[str, Any]:
    """Whether a load, and what is computed after it, come while the other of the two streams is held."""
    from penstock.backward.offload import saving
    from penstock.backward.offload_targets import HostMemory

    sim, elsewhere = pipes.simulation(device), HostMemory(threshold=0)
    weight = torch.randn(64, 64, device=device, requires_grad=True)
    x = torch.randn(64, 64, device=device)
    computed, loaded = torch.Event(device), torch.Event(device)
    found: dict[str, Any] = {}
    for busy in ("computing", "copying"):
        with saving(nn.Module(), [x, weight], threshold=0) as saved:
            output = (x @ weight).tanh().exp().sum()
        expected = torch.autograd.grad(output, weight, retain_graph=True)[0].cpu()
        saved.offload(elsewhere)
        torch.accelerator.synchronize()
        sim.reset()
        coming = elsewhere.streams[device][1]
        with ExitStack() as end:
            with torch.accelerator.current_stream(device) if busy == "computing" else coming:
                end.callback(sim.hold().open)
            saved.load()
            coming.record_event(loaded)
            after = x + 1
            computed.record()
            (grad,) = torch.autograd.grad(output, weight)
            waits = list(sim.waits())
            free, other = (loaded, computed) if busy == "computing" else (computed, loaded)
            alone = comes(free) and not other.query()
        torch.accelerator.synchronize()
        same = torch.equal(grad.cpu(), expected) and after.shape == x.shape
        found[busy] = alone, waits, list(sim.violations()), same
    return found


def test_a_load_runs_beside_what_is_computed_before_and_after_it(sim: SimPool) -> None:
    """One of the two streams is kept busy: the other does not wait for it, and nothing uses what is not there yet."""
    (found,) = sim.run(1, "lazy", beside)
    for alone, waits, violations, same in found.values():
        assert alone
        assert waits == []
        assert violations == []
        assert same
