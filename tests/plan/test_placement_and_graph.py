"""Which rank holds which stage, and which stage feeds which."""

from __future__ import annotations

import pytest

from penstock.errors import PlanError
from penstock.plan import Placement, StageGraph


@pytest.mark.parametrize(
    ("placement", "ranks", "kind"),
    [
        (Placement.loop(3), (0, 1, 2), "loop"),
        (Placement.loop(3, 2), (0, 1, 2, 0, 1, 2), "loop"),
        (Placement.v(3), (0, 1, 2, 2, 1, 0), "v"),
        (Placement.v(2, 3), (0, 1, 1, 0, 0, 1), "v"),
        (Placement.loop(1, 3), (0, 0, 0), "loop"),
        (Placement.of([1, 0]), (1, 0), "custom"),
        (Placement.of([0, 0, 1]), (0, 0, 1), "custom"),
    ],
)
def test_placements(placement: Placement, ranks: tuple[int, ...], kind: str) -> None:
    assert placement.ranks == ranks
    assert placement.kind == kind
    assert placement.num_stages == len(ranks)
    assert placement.num_ranks == len(set(ranks))
    for rank in range(placement.num_ranks):
        assert all(placement.rank_of(stage) == rank for stage in placement.stages_of(rank))
    assert sorted(s for rank in range(placement.num_ranks) for s in placement.stages_of(rank)) == [*range(len(ranks))]


@pytest.mark.parametrize("ranks", [[], [1], [0, 2], [0, -1]])
def test_no_rank_is_left_out(ranks: list[int]) -> None:
    with pytest.raises(PlanError, match="every rank from 0 to the highest"):
        Placement.of(ranks)


@pytest.mark.parametrize("make", [Placement.loop, Placement.v])
def test_sizes_are_positive(make: type[Placement]) -> None:
    for sizes in ((0, 1), (1, 0), (-2, 2)):
        with pytest.raises(PlanError, match="expected at least one of each"):
            make(*sizes)  # type: ignore[call-arg,arg-type]


def test_a_chain() -> None:
    graph = StageGraph.chain(3)
    assert [graph.producers(stage) for stage in range(3)] == [(), (0,), (1,)]
    assert [graph.consumers(stage) for stage in range(3)] == [(1,), (2,), ()]
    assert StageGraph.chain(1).edges == ()


def test_skip_connections() -> None:
    graph = StageGraph.chain(4, skips=[(1, 3), (0, 3), (0, 3)])
    assert graph.producers(3) == (0, 1, 2)
    assert graph.consumers(0) == (1, 3)
    assert graph == StageGraph.of(4, [(0, 3), (0, 1), (1, 2), (2, 3), (1, 3)])


@pytest.mark.parametrize("edge", [(1, 1), (2, 1), (0, 3), (-1, 1)])
def test_values_flow_to_later_stages_only(edge: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match=rf"edge {edge[0]} -> {edge[1]} in a graph of 3 stages; expected 0 <= producer"):
        StageGraph.chain(3, skips=[edge])


def test_a_graph_has_stages() -> None:
    with pytest.raises(PlanError, match="expected at least one"):
        StageGraph.chain(0)
