"""A chosen part of the parity tests over gloo processes: messages really leave the process here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.run import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.gloo_pool import GlooPool
from tests.parity.cases import CASES
from tests.parity.harness import Sizes, assert_nothing_left, assert_same, call, named_grads, run_loop, same_order

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def compare_here(name: str, case: str, stages_per_rank: int, num_microbatches: int) -> None:
    """This process's part of a comparison."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = Sizes(num_ranks, stages_per_rank, num_microbatches)
    plan = get_schedule(name)(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
    mine, reference = CASES[case](sizes), CASES[case](sizes)
    own = plan.placement.stages_of(rank)
    stages = [PipelineStage(mine.modules[i], i, plan.num_stages, "cpu") for i in own]
    schedule = Schedule.from_plan(plan, stages, loss_fn=mine.loss_fn, **mine.options)
    exact = same_order(plan)
    for number, (step, want) in enumerate(zip(mine.steps, run_loop(reference, sizes), strict=True)):
        if step.zero:
            for index in own:
                mine.modules[index].zero_grad()
        got = call(schedule, step)
        assert_nothing_left(schedule)
        grads: dict[str, Tensor | None] = {}
        for index in own:
            grads |= named_grads(index, mine.modules[index])
        where = f"step {number} of {case} with {name} on rank {rank}"
        assert_same(grads, {key: want.grads[key] for key in grads}, f"gradients of {where}", exact=exact)
        if plan.num_stages - 1 in own:
            assert_same(
                [got.losses, got.output], [want.losses, want.output], f"losses and outputs of {where}", exact=True
            )
        else:
            assert (got.losses, got.output) == ([], None)


def compare_many(wanted: list[tuple[str, str, int, int]]) -> None:
    for one in wanted:
        compare_here(*one)


TWO = [
    ("gpipe", "plain", 1, 3),
    ("1f1b", "changing_length", 1, 4),
    ("1f1b", "shapes_that_differ_between_microbatches", 1, 5),
    ("1f1b", "dict_outputs", 1, 2),
    ("loopedbfs", "evaluation_in_between", 3, 3),
    ("interleaved1f1b", "uneven_batch", 2, 5),
    ("interleavedzerobubble", "frozen_prefix", 2, 4),
    ("interleavedzerobubble", "evaluation_in_between", 3, 3),
    ("zbv", "tuple_outputs", 2, 5),
    ("zbv", "noncontiguous_outputs", 2, 8),
    ("dualpipev", "checkpointed", 2, 6),
    ("dualpipev", "dropout_by_microbatch", 2, 4),
    ("zb-h1", "accumulated_over_three_steps", 1, 4),
    ("v-half", "dataclass_outputs", 2, 3),
]
FOUR = [
    ("1f1b", "plain", 1, 8),
    ("gpipe", "frozen_middle", 1, 2),
    ("interleaved1f1b", "changing_length", 2, 3),
    ("interleavedzerobubble", "unused_outputs", 2, 6),
    ("zbv", "evaluation_in_between", 2, 5),
    ("dualpipev", "plain", 2, 10),
    ("v-min", "uneven_batch", 2, 5),
    ("zb-h2", "keyword_arguments_of_stages", 1, 7),
]


def test_two_processes(gloo_pool: GlooPool) -> None:
    gloo_pool.run(2, compare_many, TWO, timeout=100.0)


def test_four_processes(gloo_pool: GlooPool) -> None:
    gloo_pool.run(4, compare_many, FOUR, timeout=100.0)


def two_schedules_on_one_group() -> None:
    """Their steps in turn, and other messages of the user in between."""
    rank = dist.get_rank()
    sizes = Sizes(2, 1, 4)
    first, second = CASES["plain"](sizes), CASES["plain"](sizes)
    made = []
    for case, name in ((first, "1f1b"), (second, "gpipe")):
        stage = PipelineStage(case.modules[rank], rank, 2, "cpu")
        made.append(Schedule.from_plan(get_schedule(name)(2, 4), stage, loss_fn=case.loss_fn))
    for number in range(3):
        for schedule, case in zip(made, (first, second), strict=True):
            call(schedule, case.steps[number % 2])
            flag = torch.ones(1)
            dist.all_reduce(flag)
            assert flag.item() == 2.0
    pairs = zip(first.modules[rank].parameters(), second.modules[rank].parameters(), strict=True)
    assert all(p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


def test_two_schedules_take_turns_on_one_group(gloo_pool: GlooPool) -> None:
    gloo_pool.run(2, two_schedules_on_one_group)
