"""What a good guest on a device does: random state put back, weights cast once, steps that could be captured as a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.accelerator import pipes
from tests.accelerator.pool import Mode, SimPool


def test_random_state_is_put_back_on_every_device(sim: SimPool) -> None:
    assert sim.run(1, "lazy", keyed) == [True]


def keyed(device: torch.device) -> bool:
    from penstock.run import microbatch_rng

    module: Any = torch.get_device_module(device)
    torch.manual_seed(11)

    def states() -> list[list[int]]:
        return [
            torch.get_rng_state().tolist(),
            *(module.get_rng_state(n).tolist() for n in range(module.device_count())),
        ]

    before, drawn = states(), []
    for microbatch in (0, 1, 0):
        with microbatch_rng(seed=1, stage=2, microbatch=microbatch, step=3):
            drawn.append((torch.rand(4), torch.rand(4, device=device).cpu()))
    assert states() == before
    for here, there in zip(drawn[0], drawn[2], strict=True):
        assert torch.equal(here, there)
    assert not torch.equal(drawn[0][1], drawn[1][1])
    return True


def test_autocast_casts_a_weight_once_for_all_microbatches_in_flight(sim: SimPool) -> None:
    assert sim.run(1, "lazy", casts) == [True]


def casts(device: torch.device) -> bool:
    """Memory of a microbatch in flight: what its rows take, and no copy of the weight."""
    from penstock.stage.backward import run_deferred
    from penstock.stage.deferred import Deferral
    from penstock.stage.intercept import intercepted

    sim = pipes.simulation(device)
    layer = nn.Linear(128, 128).to(device)
    copy = layer.weight.numel() * 2  # bytes, in bfloat16
    deferral, held, sizes = Deferral(layer), [], []
    with torch.autocast(device.type, dtype=torch.bfloat16), intercepted():
        for _ in range(4):
            x = torch.randn(2, 128, device=device, requires_grad=True)
            before = sim.memory()[0]
            held.append(run_deferred(deferral, layer, (x,), {}))
            sizes.append(sim.memory()[0] - before)
    assert held[0][0].dtype is torch.bfloat16
    assert sizes[0] >= copy
    assert max(sizes[1:]) < copy, sizes
    with torch.no_grad():
        layer.weight.mul_(2)  # a changed weight is cast again
    with torch.autocast(device.type, dtype=torch.bfloat16), intercepted():
        x = torch.ones(2, 128, device=device, requires_grad=True)
        output: Tensor = run_deferred(deferral, layer, (x,), {})[0]
    expected = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    torch.testing.assert_close(output.detach().cpu(), expected.detach().cpu())
    return True


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_warm_steps_are_alike_and_could_be_captured(sim: SimPool, mode: Mode) -> None:
    """What capturing a step as a graph needs: no wait of the host, the same kernels in the same order, and the same memory."""
    for steps in sim.run(2, mode, alike):
        assert all(waits == 0 for waits, *_ in steps), steps
        assert len({tuple(rest) for _, *rest in steps}) == 1, steps


def alike(device: torch.device) -> list[tuple[int, ...]]:
    """Of some warm steps: waits, kernels, their names and order on all streams, allocations, and the bytes of all of them."""
    from penstock.run import Schedule
    from penstock.schedules import get_schedule
    from penstock.stage.pipeline_stage import PipelineStage

    sim, rank = pipes.simulation(device), dist.get_rank()
    plan = get_schedule("interleaved1f1b")(2, 4, stages_per_rank=2)
    stages = [PipelineStage(pipes.block(i).to(device), i, 4, device) for i in plan.placement.stages_of(rank)]
    schedule = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
    x, y = (part.to(device) for part in pipes.batch(4))
    found: list[tuple[int, ...]] = []
    for _ in range(5):
        torch.accelerator.synchronize()
        sim.reset()
        schedule.step(*((x,) if rank == 0 else ()), target=y if rank == 1 else None, return_outputs=False)
        _, allocations, asked = sim.memory()
        found.append((len(sim.waits()), sim.kernels(), sim.order(), allocations, asked))
    return found[2:]
