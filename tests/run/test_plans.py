"""Schedules from plans: values and files, compute-only and lowered, on the ranks and stages that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PlanError, RanksDisagree, RunError, StageError
from penstock.lower import Ahead, JustInTime, lower, lower_shares
from penstock.plan import Plan, dumps, load
from penstock.run import Schedule, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from penstock.schedules import Recipe, Sizes, get_schedule
from penstock.search import search
from penstock.simulate import Costs
from penstock.stage.pipeline_stage import PipelineStage
from tests.run.pipes import batch, close, grads_of, loop_grads, make_modules, stages_for


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "interleavedzerobubble"])
@pytest.mark.parametrize("lowered", [False, True], ids=["compute-only", "lowered"])
@pytest.mark.parametrize("kind", ["value", "file"])
def test_a_plan_runs_as_a_value_and_from_a_file(tmp_path: Path, name: str, lowered: bool, kind: str) -> None:
    plan = get_schedule(name)(2, 4)
    if lowered:
        plan = lower(plan)
    path = tmp_path / "plan.csv"
    path.write_text(dumps(plan))
    modules = make_modules(plan.num_stages)
    x, y = batch(8)

    def rank(transport: LocalTransport) -> Plan:
        source: Plan | Path = path if kind == "file" else plan
        schedule = Schedule.from_plan(source, stages_for(plan, transport, modules), loss_fn=nn.functional.mse_loss)
        schedule.step(x, target=y)
        schedule.eval(x)
        return schedule.lowered_plan()

    ran = LocalWorld(2, rendezvous=True).run(rank)
    assert close(grads_of(modules), loop_grads(modules, x, y, 4))
    assert ran[0] == ran[1]
    assert ran[0].is_lowered
    if lowered:
        assert ran[0].codes == load(path).codes


@pytest.mark.parametrize("receives", [Ahead(0), Ahead(1), JustInTime()])
def test_where_receives_are_posted_changes_nothing_but_memory(receives: object) -> None:
    plan = get_schedule("interleaved1f1b")(3, 5)
    modules = make_modules(plan.num_stages)
    x, y = batch(10)

    def rank(transport: LocalTransport) -> None:
        stages = stages_for(plan, transport, modules)
        schedule = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss, receives=receives)
        schedule.step(x, target=y)
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(x, target=y)

    LocalWorld(3).run(rank)
    assert close(grads_of(modules), loop_grads(modules, x, y, 5))


def test_a_plan_of_ones_own() -> None:
    """A custom placement: stages 0 and 3 with the first rank, and an order that nobody ships."""
    text = dumps(get_schedule("zbv")(2, 2))
    plan = load_text(text)
    modules = make_modules(4)
    x, y = batch(4)

    def rank(transport: LocalTransport) -> None:
        Schedule.from_plan(plan, stages_for(plan, transport, modules), loss_fn=nn.functional.mse_loss).step(x, target=y)

    LocalWorld(2).run(rank)
    assert close(grads_of(modules), loop_grads(modules, x, y, 2))


def load_text(text: str) -> Plan:
    from penstock.plan import loads

    return loads(text)


def test_a_stage_alone_needs_neither_group_nor_transport() -> None:
    (module,) = make_modules(1)
    x, y = batch(6)
    schedule = Schedule1F1B(PipelineStage(module, 0, 1, "cpu"), 3, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    assert output.shape == x.shape
    assert len(losses) == 3
    assert close(grads_of([module]), loop_grads([module], x, y, 3))


def test_stages_in_the_wrong_place_are_refused_on_every_rank() -> None:
    """ZBV wants stages 0 and 3 with rank 0; rank 0 holds 0 and 2 instead, as other schedules want it."""
    modules = make_modules(4)
    x, y = batch(4)

    def rank(transport: LocalTransport) -> str:
        own = [transport.rank, transport.rank + 2]
        stages = [PipelineStage(modules[i], i, 4, "cpu", group=transport) for i in own]
        schedule = ScheduleZBVZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
        with pytest.raises(PlanError) as caught:
            schedule.step(x, target=y)
        return str(caught.value)

    first, second = LocalWorld(2).run(rank)
    assert "rank 0 holds stages [0, 2], but zbv places [0, 3] there" in first
    assert "rank 1 holds stages [1, 3], but zbv places [1, 2] there" in second


def test_stages_in_the_wrong_place_on_one_rank_are_told_to_the_other() -> None:
    modules = make_modules(4)
    x, y = batch(4)
    plan = get_schedule("interleaved1f1b")(2, 2)

    def rank(transport: LocalTransport) -> str:
        own = plan.placement.stages_of(transport.rank) if transport.rank else (0, 1)
        stages = [PipelineStage(modules[i], i, 4, "cpu", group=transport) for i in own]
        schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss)
        with pytest.raises((PlanError, RanksDisagree)) as caught:
            schedule.step(x, target=y)
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = LocalWorld(2).run(rank)
    assert first.startswith("PlanError: rank 0 holds stages [0, 1]")
    assert second.startswith("RanksDisagree")
    assert "rank 0 holds stages [0, 1]" in second


@pytest.mark.parametrize(("per_rank", "placement"), [(1, "loop"), (2, "loop"), (2, "v"), (3, "v")])
def test_a_searched_plan_trains(per_rank: int, placement: Literal["loop", "v"]) -> None:
    num_stages = 2 * per_rank
    times = [1.0 + stage % 3 for stage in range(num_stages)]
    costs = Costs.per_stage(times, times, times)
    plan = search(2, 5, costs, memory_limit=2.0 * per_rank, placement=placement, tries=30).plan
    modules = make_modules(num_stages)
    x, y = batch(10)

    def rank(transport: LocalTransport) -> None:
        schedule = Schedule.from_plan(plan, stages_for(plan, transport, modules), loss_fn=nn.functional.mse_loss)
        schedule.step(x, target=y)

    LocalWorld(2, rendezvous=True).run(rank)
    assert close(grads_of(modules), loop_grads(modules, x, y, 5))


def test_a_plan_for_other_sizes_is_refused() -> None:
    stage = PipelineStage(make_modules(1)[0], 0, 1, "cpu")
    schedule = Schedule.from_plan(get_schedule("1f1b")(2, 2), stage)
    with pytest.raises(PlanError, match="the plan is for 2 stages on 2 ranks, but there are 1 stages on 1 ranks"):
        schedule.step(batch(2)[0])


def test_a_list_where_one_stage_belongs_and_the_other_way_round() -> None:
    stage = PipelineStage(make_modules(1)[0], 0, 1, "cpu")
    with pytest.raises(StageError, match="takes one stage, got 1"):
        Schedule1F1B([stage], 2)  # type: ignore[arg-type]
    with pytest.raises(StageError, match="takes a list of stages"):
        ScheduleInterleaved1F1B(stage, 2)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="n_microbatches=0"):
        Schedule1F1B(stage, 0)


def test_every_public_name_is_there() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


def test_ranks_that_disagree_can_agree_later() -> None:
    """The comparison is not forgotten after it failed once: the next step compares again."""
    plans = [get_schedule("1f1b")(2, 2), get_schedule("gpipe")(2, 2)]
    modules = make_modules(2)
    x, y = batch(4)

    def rank(transport: LocalTransport) -> None:
        stages = stages_for(plans[0], transport, modules)
        odd = Schedule.from_plan(plans[transport.rank], stages, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            with pytest.raises(RanksDisagree, match="gpipe"):
                odd.step(x, target=y)
        Schedule.from_plan(plans[0], stages, loss_fn=nn.functional.mse_loss).step(x, target=y)

    LocalWorld(2).run(rank)
    assert close(grads_of(modules), loop_grads(modules, x, y, 2))


def test_custom_functions_come_before_the_first_step() -> None:
    stage = PipelineStage(make_modules(1)[0], 0, 1, "cpu")
    schedule = Schedule1F1B(stage, 1, loss_fn=nn.functional.mse_loss)
    x, y = batch(2)
    schedule.step(x, target=y)
    with pytest.raises(RunError, match="Call it before"):
        schedule.register_custom_function(penstock.Op.F, lambda action, context: None)


def test_a_rank_binds_its_share_alone() -> None:
    """What binding costs does not grow with the number of ranks: no list is made but of ranks that are two steps away."""
    known, asked = get_schedule("zbv"), set[int]()

    def counted(sizes: Sizes, rank: int) -> list[int]:
        asked.add(rank)
        return known.rank_actions(sizes, rank)

    plan = Recipe("counted", "", counted, "v", 2, is_family=True)(256, 4)
    stages = stages_for(plan, LocalWorld(256).transports[100], [nn.Linear(2, 2)] * 512)
    schedule = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
    ran = schedule.lowered_plan().codes[100]
    assert ran == lower_shares(known(256, 4)).codes[100]
    schedule.lowered_plan(forward_only=True)
    assert asked <= {0, 1, 254, 255, *range(98, 103)}  # the first and the last are asked which ops there are
