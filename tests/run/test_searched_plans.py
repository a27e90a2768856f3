"""A searched plan runs like any other, also where it splits some backwards of a stage and leaves others whole."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from penstock.comm import LocalTransport, LocalWorld
from penstock.plan import Op
from penstock.plan.actions import OP, stage_of
from penstock.run import Schedule
from penstock.search import search
from penstock.simulate import Costs
from tests.run.pipes import batch, close, grads_of, loop_grads, make_modules, stages_for


def test_whole_and_split_backwards_of_one_stage_add_up() -> None:
    even = Costs.per_rank(num_stages=4, stages_per_rank=2, latency=0.02)
    plan = search(2, 6, replace(even, backward=(0.77,) * 4), memory_limit=3.0, tries=100).plan
    ops = {(code & OP, stage_of(code)) for codes in plan.codes for code in codes}
    assert any((Op.B, stage) in ops and (Op.I, stage) in ops for stage in range(4))
    modules, (x, y) = make_modules(4), batch(12)

    def rank(transport: LocalTransport) -> None:
        schedule = Schedule.from_plan(plan, stages_for(plan, transport, modules), loss_fn=nn.functional.mse_loss)
        schedule.step(x, target=y)

    LocalWorld(2).run(rank)
    assert close(grads_of(modules), loop_grads(modules, x, y, 6))
