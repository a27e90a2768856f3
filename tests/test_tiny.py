"""Everything once, in ten seconds: plan, check, lower, simulate, show, save and load; a step over threads, measured."""

from __future__ import annotations

import pytest

import penstock
from penstock.lower import lower
from penstock.plan import dumps, loads
from penstock.simulate import simulate

NAMES = [recipe.name for recipe in penstock.all_schedules()]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_made_proved_timed_drawn_saved_and_read(name: str) -> None:
    from penstock.show import to_html, to_svg, to_table

    plan = penstock.get_schedule(name)(3, 4)
    lowered = lower(plan)
    penstock.check(plan)
    penstock.check(lowered)
    timeline = simulate(lowered)
    assert 0.0 <= timeline.bubble_makespan < 1.0
    assert loads(dumps(lowered)).codes == lowered.codes
    for draw in (to_table, to_svg, to_html):
        assert len(draw(timeline)) > 100


@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_a_plain_loop(name: str) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    plan = penstock.get_schedule(name)(2, 3)
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(plan.num_stages)]
    x, y = torch.randn(7, 4).double(), torch.randn(7, 4).double()
    loss_fn = nn.functional.mse_loss

    def rank(transport: penstock.comm.LocalTransport) -> penstock.Timeline:
        stages = [
            penstock.PipelineStage(modules[i], i, plan.num_stages, "cpu", group=transport)
            for i in plan.placement.stages_of(transport.rank)
        ]
        schedule = penstock.Schedule.from_plan(plan, stages, loss_fn=loss_fn)
        schedule.eval(x)
        with schedule.record() as recording:
            schedule.step(x, target=y)
        return recording.timeline

    timelines = penstock.LocalWorld(2).run(rank)
    assert timelines[0].makespan > 0
    got = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    model = nn.Sequential(*modules)
    model.zero_grad()
    loss_fn(model(x), y).backward()
    want = [p.grad for p in model.parameters()]
    if name == "forward":
        assert got == []
    else:
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, want, strict=True))


def test_a_model_is_captured_and_trained() -> None:
    """`pipeline`, two stages of an untouched model, one step."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(4, 4)
    pipe = penstock.pipeline(model, (x,), split_spec={"1": penstock.SplitPoint.BEGINNING})
    assert pipe.num_stages == 2

    def rank(transport: penstock.comm.LocalTransport) -> object:
        stage = pipe.build_stage(transport.rank, torch.device("cpu"), transport)
        return penstock.Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss).step(
            torch.cat([x, x]), target=torch.zeros(8, 2)
        )

    _, output = penstock.LocalWorld(2).run(rank)
    assert isinstance(output, torch.Tensor)
    assert torch.allclose(output, model(torch.cat([x, x])), atol=1e-6)
