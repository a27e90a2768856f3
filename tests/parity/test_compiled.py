"""Compiled stages: what a plain loop of eager modules computes, whatever a stage does and whatever the schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import penstock
from penstock.backward.compile_stage import compile_in_place
from penstock.schedules import get_schedule
from tests.parity.cases import CASES
from tests.parity.harness import Case, MakeCase, Sizes, compare
from tests.parity.test_holding_less import WAYS
from tests.parity.test_parity import TRAINING, all_sizes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the compiler takes its time on a busy machine
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
        "uneven_batch",
        "shapes_that_differ_between_microbatches",
        "modules_of_many_kinds",
        "noncontiguous_outputs",
        "tuple_outputs",
        "accumulated_over_three_steps",
    ],
)
# torch.compile makes an object of the class whose objects torch deprecates, where it meets a custom function.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning")
def test_what_stages_do(name: str) -> None:
    """Every schedule runs in test_hooks.py; here is one whose backward comes in two parts, with all that stages may do."""
    compare(get_schedule("zbv"), Sizes(2, 2, 3), compiled(CASES[name]))


def grid() -> Iterator[tuple[str, Sizes]]:
    """Each schedule with a size of its own, of at most four stages: all numbers of ranks, stages and microbatches come up."""
    for place, recipe in enumerate(TRAINING):
        few = [sizes for sizes in all_sizes(recipe) if sizes.num_stages <= 4]
        yield recipe.name, few[(7 * place + 3) % len(few)]


@pytest.mark.parametrize(
    ("name", "sizes"), [pytest.param(*one, id=f"{one[0]}-{'x'.join(map(str, one[1]))}") for one in grid()]
)
def test_every_schedule(name: str, sizes: Sizes) -> None:
    compare(get_schedule(name), sizes, compiled(CASES["plain"]))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved1f1b"])
def test_sizes_that_change(name: str) -> None:
    """From step to step, on the rank that meets them: compiled again, and marked dynamic, while the others go on."""
    compare(
        get_schedule(name), Sizes(2, get_schedule(name).stages_per_rank or 2, 3), compiled(CASES["changing_length"])
    )


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
    with pytest.warns(penstock.errors.NotCompiled, match=r"runs eagerly, .*side effect"):
        compare(get_schedule("zb-h1"), Sizes(2, 1, 3), compiled(CASES["checkpointed"]))


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_inductor(name: str) -> None:
    """Its sums may be in another order than those of the loop, so this is closeness. What equal stages share is in its cache."""
    from torch._dynamo.utils import counters
    from torch._inductor.cpu_vec_isa import x86_isa_checker

    from penstock.backward.compile_ahead import _probes
    from penstock.run import Schedule
    from tests.run.pipes import batch, grads_of, loop_grads, make_modules, on_ranks

    modules = make_modules(4 if name == "zbv" else 2)
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    for module in modules:
        compile_in_place(module, True)

    def steps(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    hits = counters["inductor"]["fxgraph_cache_hit"]
    on_ranks(name, 2, 3, steps, modules=modules)
    if name == "zbv":  # the two stages of 1F1B differ: the first gives no gradient
        assert counters["inductor"]["fxgraph_cache_hit"] > hits
    for one, other in zip(grads_of(modules), want, strict=True):
        torch.testing.assert_close(one, other)
    assert _probes or not x86_isa_checker(), "nobody has asked ahead for what inductor asks one after the other"


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_ties_across_stages(name: str) -> None:
    """The first and the last stage, on different ranks or on one, hold the same weight: one gradient, that of both uses."""
    from penstock.run import Schedule
    from tests.run.pipes import batch, loop_grads, make_modules, on_ranks

    modules = make_modules(4 if name == "zbv" else 2)
    first, last = modules[0].get_parameter("0.weight"), modules[-1].get_parameter("0.weight")
    last.data.copy_(first.data)
    whole = copy.deepcopy(modules)
    whole[-1].get_submodule("0").weight = whole[0].get_parameter("0.weight")  # type: ignore[assignment]
    x, y = batch(6)
    want = loop_grads(whole, x, y, 3)
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})

    def steps(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    tied = [(0, "0.weight"), (len(modules) - 1, "0.weight")]
    on_ranks(name, 2, 3, steps, modules=modules, ties=[penstock.tie(tied)])
    assert first.grad is not None
    assert last.grad is not None
    assert torch.equal(first.grad, last.grad)
    got = [p.grad for module in modules for p in module.parameters() if p is not last]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
