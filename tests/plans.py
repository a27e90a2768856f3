"""Plans of every kind, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.lower import Ahead, Early, JustInTime, ReceivePolicy
from penstock.plan import Plan, StageGraph
from penstock.schedules import Recipe, all_schedules

RECIPES = {recipe.name: recipe for recipe in all_schedules()}
POLICIES: tuple[ReceivePolicy, ...] = (Early(), Ahead(1), Ahead(3), JustInTime())


@st.composite
def graphs(draw: st.DrawFn, num_stages: int) -> StageGraph:
    """A chain, sometimes with skip connections."""
    if num_stages < 3:
        return StageGraph.chain(num_stages)
    pair = st.tuples(st.integers(0, num_stages - 1), st.integers(0, num_stages - 1)).filter(lambda p: p[0] < p[1])
    return StageGraph.chain(num_stages, draw(st.lists(pair, max_size=4)))


@st.composite
def sized(draw: st.DrawFn, max_ranks: int = 6, max_microbatches: int = 10) -> tuple[Recipe, int, int, int, StageGraph]:
    """A schedule, ranks, microbatches, stages a rank and a graph."""
    recipe = draw(st.sampled_from(list(RECIPES.values())))
    stages_per_rank = recipe.stages_per_rank or draw(st.integers(1, 3))
    num_ranks, num_microbatches = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_microbatches))
    return recipe, num_ranks, num_microbatches, stages_per_rank, draw(graphs(num_ranks * stages_per_rank))


@st.composite
def plans(draw: st.DrawFn, max_ranks: int = 6, max_microbatches: int = 10) -> Plan:
    """A plan of compute actions."""
    recipe, ranks, microbatches, stages_per_rank, graph = draw(sized(max_ranks, max_microbatches))
    return recipe(ranks, microbatches, stages_per_rank=stages_per_rank, graph=graph)
