"""An episode over threads: any schedule, any model of the parity tests, random failures, orders of messages at random."""

from __future__ import annotations

import random

from tests.faults.test_random_faults import TRAINING, run
from tests.parity.cases import CASES
from tests.parity.harness import Sizes, assert_same, run_loop

_COUNTED = ("modules_of_many_kinds", "chunk_specs")  # batch norm counts a step that failed, and the test does it again


def threads_episode(number: int) -> None:
    dice = random.Random(number)
    recipe = dice.choice(TRAINING)
    sizes = Sizes(dice.choice((1, 2, 3, 4)), recipe.stages_per_rank or dice.choice((1, 2)), dice.choice((1, 2, 3, 5)))
    name = dice.choice([name for name in CASES if name not in _COUNTED])
    what = f"episode {number} over threads: {recipe.name}, {sizes}, {name}"
    plan = recipe(sizes.num_ranks, sizes.num_microbatches, stages_per_rank=sizes.stages_per_rank)
    results = run(dice, plan, CASES[name](sizes))
    assert all(failed == results[0][0] for failed, _ in results), f"{what}: some ranks failed and some did not"
    want = run_loop(CASES[name](sizes), sizes)[-1].grads
    got = dict(sorted(item for _, grads in results for item in grads.items()))
    assert_same(got, want, what, exact=False)
