"""Random schedules, sizes, models and failures: steps fail on all ranks or on none, and a good step is always right."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.comm import LocalTransport, LocalWorld
from penstock.plan import Plan
from penstock.run import Schedule
from penstock.schedules import all_schedules
from penstock.stage.pipeline_stage import PipelineStage
from tests.parity.cases import CASES
from tests.parity.harness import Case, Sizes, Step, assert_nothing_left, assert_same, call, named_grads, run_loop

TRAINING = [recipe for recipe in all_schedules() if recipe.name != "forward"]


class Boom(Exception):
    """A failure on purpose."""


class Saboteur:
    """Lets one stage fail in its n-th forward, or in the backward of it."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.armed: dict[int, tuple[str, int]] = {}  # by stage: the pass, and how many forwards are left
        for index, module in enumerate(modules):
            module.register_forward_hook(lambda module, args, output, index=index: self.strike(index, output))

    def strike(self, index: int, output: Any) -> None:
        where, left = self.armed.get(index, ("", -1))
        if left < 0:
            return
        self.armed[index] = where, left - 1
        if left == 0 and where == "forward":
            raise Boom("in a forward")
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if left == 0 and tensors:
            tensors[0].register_hook(self.fail)

    @staticmethod
    def fail(grad: Tensor) -> None:
        raise Boom("in a backward")


def steps_with_failures(dice: random.Random, case: Case, plan: Plan) -> list[tuple[Step, int, str, int]]:
    """Each step of the case, and before some of them the same step with a failure: stage, pass, microbatch."""
    found = []
    for step in case.steps:
        if dice.random() < 0.6:
            where = dice.choice(["forward", "forward", "backward"])
            found.append((step, dice.randrange(plan.num_stages), where, dice.randrange(plan.num_microbatches)))
        found.append((step, -1, "", 0))
    return found


def run(dice: random.Random, plan: Plan, case: Case) -> list[Any]:
    script, saboteur = steps_with_failures(dice, case, plan), Saboteur(case.modules)

    def rank(transport: LocalTransport) -> tuple[list[bool], dict[str, Tensor | None]]:
        own = plan.placement.stages_of(transport.rank)
        stages = [PipelineStage(case.modules[i], i, plan.num_stages, "cpu", group=transport) for i in own]
        parameters = [p for index in own for p in case.modules[index].parameters()]
        schedule = Schedule.from_plan(plan, stages, loss_fn=case.loss_fn, **case.options)
        failed = []
        for step, stage, where, microbatch in script:
            before = [None if p.grad is None else p.grad.clone() for p in parameters]
            if step.zero:
                for index in own:
                    case.modules[index].zero_grad()
            if stage in own:
                saboteur.armed[stage] = where, microbatch
            try:
                call(schedule, step)
                failed.append(False)
            except (Boom, RuntimeError):
                assert stage >= 0, "a step without a failure"
                failed.append(True)
                for parameter, grad in zip(parameters, before, strict=True):
                    parameter.grad = grad
            for index in own:
                saboteur.armed.pop(index, None)
            assert_nothing_left(schedule)
        grads: dict[str, Tensor | None] = {}
        for index in own:
            grads |= named_grads(index, case.modules[index])
        return failed, grads

    return LocalWorld(plan.num_ranks, rendezvous=dice.random() < 0.6, seed=dice.randrange(1000)).run(rank)


@pytest.mark.parametrize("seed", range(40))
def test_any_failure_anywhere(seed: int) -> None:
    dice = random.Random(seed)
    recipe = dice.choice(TRAINING)
    sizes = Sizes(
        dice.choice((1, 2, 3, 4)), recipe.stages_per_rank or dice.choice((1, 2, 3)), dice.choice((1, 2, 3, 5))
    )
    # an accumulated step that fails and is done again draws the same numbers, but batch norm has counted it
    name = dice.choice([name for name in CASES if name not in ("modules_of_many_kinds", "chunk_specs")])
    plan = recipe(sizes.num_ranks, sizes.num_microbatches, stages_per_rank=sizes.stages_per_rank)
    results = run(dice, plan, CASES[name](sizes))
    assert all(failed == results[0][0] for failed, _ in results)
    want = run_loop(CASES[name](sizes), sizes)[-1].grads
    got = dict(sorted(item for _, grads in results for item in grads.items()))
    assert_same(got, want, f"{recipe.name}, {sizes}, {name}", exact=False)
