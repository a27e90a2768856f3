"""Another plan between two steps, on all ranks at once; the training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline, tie
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError, StageError
from penstock.lower import lower, recompute
from penstock.plan import Op, Plan, check
from penstock.run import Schedule
from penstock.run.planning import better_plan, weight_order
from penstock.schedules import get_schedule
from penstock.simulate import Costs, simulate
from tests.gloo_pool import GlooPool
from tests.run.pipes import batch, make_modules, stages_for

GPIPE = get_schedule("gpipe")(2, 4)
SPLIT = Costs.per_rank(num_stages=2, held_to_weight=0.0)  # weight work holds nothing: zb-h1 fits beside 1F1B


def test_a_better_plan_holds_no_more_and_adds_up_in_the_same_order() -> None:
    plan = get_schedule("1f1b")(4, 8)
    costs = Costs.per_rank(num_stages=4, held_to_weight=0.0)
    found = better_plan(plan, costs, gain=0.05)
    assert found is not None
    assert found.name != "1f1b"
    now, then = simulate(lower(plan), costs), simulate(lower(found), costs)
    assert then.makespan < 0.95 * now.makespan
    assert all(a <= b for a, b in zip(then.peak_memory, now.peak_memory, strict=True))
    assert weight_order(found) == weight_order(plan)
    assert better_plan(plan, costs, gain=0.5) is None, "not worth it"
    assert better_plan(lower(plan), costs, gain=0.05) is None, "messages are somebody's own choice"
    backwards = get_schedule("loopedbfs")(2, 4)
    others = better_plan(get_schedule("interleaved1f1b")(2, 4), Costs.unit(backwards), gain=0.0, others=[backwards])
    assert others is None or others.name != "loopedbfs", "it adds up in another order"


def trained(transport: Any, steps: int, replan_after: int | None) -> tuple[list[float], list[Any], str, bool]:
    torch.manual_seed(0)
    modules = make_modules(2)
    x, y = batch(8)
    schedule = Schedule.from_plan(
        get_schedule("1f1b")(2, 4),
        stages_for(GPIPE, transport, modules),
        loss_fn=nn.functional.mse_loss,
        ties=[tie([(0, "0.weight"), (1, "0.weight")])],  # once, under any number of plans
    )
    mine = modules[transport.rank]
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    losses: list[float] = []
    for step in range(steps):
        if step == replan_after:
            assert schedule.replan(SPLIT, gain=0.01) is True
            assert schedule.replan(SPLIT, gain=0.01) is False, "nothing better is left"
        found: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(x, target=y, losses=found)
        optimizer.step()
        losses += [loss.item() for loss in found]
    parameters = [p.detach().clone().tolist() for p in mine.parameters()]
    return losses, parameters, schedule.plan.name, schedule.lowered_plan().has(Op.I)


@pytest.mark.parametrize("after", [0, 2])
def test_the_same_numbers_come_out_of_the_training(after: int) -> None:
    plain = LocalWorld(2).run(trained, 5, None)
    other = LocalWorld(2).run(trained, 5, after)
    for (losses, parameters, before, _), (again, same, name, _) in zip(plain, other, strict=True):
        assert before == "1f1b"
        assert name != "1f1b"
        assert losses == pytest.approx(again, rel=1e-12)
        torch.testing.assert_close(torch.tensor(parameters[0]), torch.tensor(same[0]), rtol=1e-6, atol=1e-7)
    assert any(splits for *_, splits in other), "weight work comes later now"


def in_a_process() -> tuple[str, list[float]]:
    from penstock.run.meeting import transport_of

    transport = transport_of(None, torch.device("cpu"))
    losses, _, name, _ = trained(transport, 4, 2)
    return name, losses


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_processes_change_the_plan_together(gloo_pool: GlooPool) -> None:
    (first, _), (second, losses) = gloo_pool.run(2, in_a_process)
    assert first == second != "1f1b"
    plain = LocalWorld(2).run(trained, 4, None)[1][0]
    assert losses == pytest.approx(plain, rel=1e-6)


SLOW = 0.004  # seconds that a layer takes, in which it does nothing: time is the subject


class TakeTime(torch.autograd.Function):
    """The value itself, after a while; the backward takes twice as long."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * SLOW)
        return gradient


class Slow(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        return TakeTime.apply(super().forward(input))  # type: ignore[no-any-return]


def test_a_pipeline_changes_its_plan_by_itself() -> None:
    """Layers that take their time show what GPipe costs; it holds so much that a split backward may hold as much."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Slow(4, 4) for _ in range(2)))
    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def rank(transport: LocalTransport, share: float | None) -> tuple[list[float | None], Plan, str]:
        pipe = Pipeline(
            copy.deepcopy(model), (x,), loss_fn=nn.functional.mse_loss, schedule="gpipe", microbatches=4, profile=False,
            group=transport, replan=share,
        )  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(9):
            losses.append(pipe.step(x, target=y).loss)
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.choice is not None
        assert pipe.choice.plan == pipe.plan
        if share is not None:
            assert pipe.choice.costs.time(Op.F, 0) >= SLOW, "the costs of now are those that were measured"
            assert pipe.choice.costs.time(Op.B, 1) >= 2 * SLOW
        return losses, pipe.plan, pipe.explain(print_output=False)

    plain, changed = LocalWorld(2).run(rank, None), LocalWorld(2).run(rank, 0.01)
    assert plain[0][0] == pytest.approx(changed[0][0], rel=1e-6)
    assert changed[0][1] == changed[1][1] != plain[0][1]
    assert "measured steps spoke for it" in changed[0][2]
    check(lower(changed[0][1]))


def test_the_plan_may_change_between_measured_steps() -> None:
    x, y = torch.ones(8, 4), torch.zeros(8, 4)

    def rank(transport: LocalTransport) -> tuple[Costs | None, Plan]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
        pipe = Pipeline(
            model, (x,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, profile=False, group=transport,
            replan=0.9,
        )  # fmt: skip
        for step in range(7):
            if step == 6:  # two of the three measured steps are those of another plan
                pipe.run_plan(recompute(pipe.plan))
            pipe.step(x, target=y)
        assert pipe._replanner is not None
        return pipe._replanner.costs, pipe.plan

    for costs, plan in LocalWorld(2).run(rank):
        assert costs is not None
        assert plan.has(Op.R)


@pytest.mark.parametrize("replan", [5.0, -1, 0.0, float("nan"), "0.05", True])
def test_what_replan_is(replan: Any) -> None:
    with pytest.raises(StageError, match="expected a share of a step"):
        Pipeline(nn.Linear(2, 2), (torch.ones(2, 2),), replan=replan)


def test_every_rank_hears_that_no_plan_can_be_looked_for() -> None:
    def rank(transport: Any) -> list[str]:
        schedule = Schedule.from_plan(
            GPIPE, stages_for(GPIPE, transport, make_modules(2)), loss_fn=nn.functional.mse_loss
        )
        said = []
        for costs, gain in ((SPLIT, -1.0), (SPLIT, float("nan")), (Costs.per_rank(num_stages=3), 0.1)):
            with pytest.raises(PenstockError) as caught:
                schedule.replan(costs, gain=gain)
            said.append(str(caught.value))
        schedule.replan(SPLIT)
        return said

    for said in LocalWorld(2).run(rank):
        assert "expected a share of a step from 0 up" in said[0]
        assert "replan(gain=nan)" in said[1]
        assert "costs for 3 stages, a plan for 2" in said[2]
