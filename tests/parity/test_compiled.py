"""Compiled stages: what a plain loop of eager modules computes, whatever a stage does and whatever the schedule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import penstock
from penstock.schedules import get_schedule
from tests.parity.cases import CASES
from tests.parity.harness import Case, MakeCase, Sizes, compare
from tests.parity.test_holding_less import WAYS

pytestmark = [
    pytest.mark.slow,
    # torch.compile looks at `.grad` of what comes from the graph before
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(make: MakeCase, backend: str = "aot_eager") -> MakeCase:
    """The same with stages that `compile=` compiles; the loop runs them as they are."""

    def made(sizes: Sizes) -> Case:
        case = make(sizes)
        options = case.stage_options
        case.stage_options = lambda index, module: {**options(index, module), "compile": {"backend": backend}}
        case.watched = False
        return case

    return made


@pytest.mark.parametrize(
    "name",
    [
        "frozen_middle",
        "adapters_on_a_frozen_model",
        "view_outputs",
        "dict_outputs",
        "unused_outputs",
        "changing_length",
        "evaluation_in_between",
        "weight_used_twice",
        "keyword_arguments_of_stages",
        "in_place_on_the_input",
        "dropout_by_microbatch",
        "dropout_by_microbatch_checkpointed",
        "integer_inputs",
    ],
)
def test_what_stages_do(name: str) -> None:
    """Every schedule runs in test_hooks.py; here is one whose backward comes in two parts, with all that stages may do."""
    compare(get_schedule("zbv"), Sizes(2, 2, 3), compiled(CASES[name]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["frozen_middle", "dropout_by_microbatch"])
def test_holding_less(name: str, way: str) -> None:
    """A forward that is run again, or whose saved tensors are moved away, is compiled like any other."""

    def made(sizes: Sizes) -> Case:
        case = compiled(CASES[name])(sizes)
        case.options |= WAYS[way]()
        return case

    compare(get_schedule("zbv"), Sizes(2, 2, 3), made)


def test_a_stage_that_cannot_be_traced_says_why_and_runs_eagerly() -> None:
    """Its checkpointed region counts its runs, which torch.compile refuses to trace."""
    with pytest.warns(penstock.NotCompiled, match=r"runs eagerly, .*side effect"):
        compare(get_schedule("zb-h1"), Sizes(2, 1, 3), compiled(CASES["checkpointed"]))


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_inductor(name: str) -> None:
    """Its sums may be in another order than those of the loop, so this is closeness."""
    from penstock.run import Schedule
    from tests.run.pipes import batch, grads_of, loop_grads, make_modules, on_ranks

    modules = make_modules(4 if name == "zbv" else 2)
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    for module in modules:
        module.compile()

    def steps(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    on_ranks(name, 2, 3, steps, modules=modules)
    for one, other in zip(grads_of(modules), want, strict=True):
        torch.testing.assert_close(one, other)
