"""Links between ranks: every pair of neighbours is measured, in a number of rounds that does not grow with the ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from penstock.balance import LayerCost, Profile
from penstock.comm import LocalTransport, LocalWorld
from penstock.front import Choice, choose
from penstock.front.candidates import Machine, Wishes
from penstock.front.machine import LARGE, measure_links, rounds, unlike
from penstock.front.mesh import PipelineMesh
from penstock.simulate import Link


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 9, 100, 101])
def test_three_rounds_have_every_pair_of_neighbours(num_ranks: int) -> None:
    found = rounds(num_ranks)
    assert len(found) <= 3
    for pairs in found:
        taken = [rank for pair in pairs for rank in pair]
        assert len(taken) == len(set(taken)), "a rank is in one pair at a time"
    neighbours = {frozenset((rank, (rank + 1) % num_ranks)) for rank in range(num_ranks)}
    assert {frozenset(pair) for pairs in found for pair in pairs} == neighbours


class Slow:
    """A message that takes its time."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, *args: Any) -> None:
        time.sleep(0.02)  # time is the subject
        self.work.wait(*args)


def test_a_slow_link_is_found_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalTransport.isend

    def isend(self: LocalTransport, tensor: torch.Tensor, peer: int) -> Any:
        work = plain(self, tensor, peer)
        return Slow(work) if {self.rank, peer} == {1, 2} else work

    monkeypatch.setattr(LocalTransport, "isend", isend)
    found = LocalWorld(4).run(lambda transport: measure_links(PipelineMesh.of(transport, None, torch.device("cpu"))))
    assert all(links == found[0] for links in found)
    assert {link[:2] for link in found[0]} == {(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 1), (3, 2), (0, 3)}
    far = unlike(found[0], 1e-4)
    assert {(1, 2), (2, 1)} <= {link[:2] for link in far}
    assert min(link.latency for link in far if set(link[:2]) == {1, 2}) > 0.015


def test_a_link_that_is_narrow_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalTransport.isend

    def isend(self: LocalTransport, tensor: torch.Tensor, peer: int) -> Any:
        work = plain(self, tensor, peer)
        return Slow(work) if tensor.numel() > 1 and self.rank == 1 else work

    monkeypatch.setattr(LocalTransport, "isend", isend)
    there, back = LocalWorld(2).run(
        lambda transport: measure_links(PipelineMesh.of(transport, None, torch.device("cpu")))
    )[0]
    assert (there[:2], back[:2]) == ((0, 1), (1, 0))
    assert there.latency == back.latency
    assert back.bandwidth is not None
    assert back.bandwidth < 4 * LARGE / 0.02
    assert there.bandwidth is None or there.bandwidth > 1.5 * back.bandwidth


def test_one_rank_has_no_links() -> None:
    ends = PipelineMesh.of(LocalWorld(1).transports[0], None, torch.device("cpu"))
    assert measure_links(ends) == []
    assert unlike([Link(0, 1, 1e-5)], 1e-5) == ()


def test_the_choice_knows_slow_links() -> None:
    """A link that is as slow as several forwards makes another schedule the fastest, or the same one slower."""
    layers = tuple(LayerCost(f"layers.{i}", 1e-3, 1e-3, 1e-3, output_bytes=1000) for i in range(8))
    profile = Profile(layers, metadata={"unit": "s"})
    far = Machine(latency=1e-5, links=(Link(0, 1, 8e-3), Link(1, 0, 8e-3)))
    near = choose(profile, Wishes(4, 8, machine=Machine(latency=1e-5)))
    slow = choose(profile, Wishes(4, 8, machine=far))
    named = {tried.schedule: tried.makespan for tried in near.tried}
    assert all((tried.makespan or 0) > (named[tried.schedule] or 0) for tried in slow.tried if tried.schedule == "1f1b")
    assert slow.costs.links == far.links
    assert slow.plan.num_stages <= near.plan.num_stages, "fewer messages over the slow link"
    assert Choice.loads(slow.dumps()).machine == far


def test_the_choice_knows_slow_ranks() -> None:
    layers = tuple(LayerCost(f"layers.{i}", 1e-3, 1e-3, 1e-3, output_bytes=1000) for i in range(12))
    profile = Profile(layers, metadata={"unit": "s"})
    slow = choose(profile, Wishes(2, 8, "1f1b", machine=Machine(ranks=(1.0, 2.0))))
    assert slow.boundaries == (8,)
    assert slow.costs.ranks == (1.0, 2.0)
    assert Choice.loads(slow.dumps()) == slow


def test_the_choice_cuts_where_little_crosses_a_narrow_link() -> None:
    sizes = [1000, 1000, 1000, 1_000_000, 1000, 1000, 1000, 1000]
    layers = tuple(LayerCost(f"layers.{i}", 1e-3, 1e-3, 1e-3, output_bytes=size) for i, size in enumerate(sizes))
    profile = Profile(layers, metadata={"unit": "s"})
    even = choose(profile, Wishes(2, 8, "1f1b", machine=Machine(bandwidth=1e9)))
    assert even.boundaries == (4,)
    narrow = Machine(bandwidth=1e9, links=(Link(0, 1, 0.0, 5e7), Link(1, 0, 0.0, 5e7)))
    slow = choose(profile, Wishes(2, 8, "1f1b", machine=narrow))
    assert slow.boundaries in ((3,), (5,))
    there = Choice(slow.plan, even.boundaries, profile, machine=narrow)
    assert slow.timeline.makespan < there.timeline.makespan
    limited = choose(profile, Wishes(2, 8, "1f1b", machine=narrow, memory_limit=1 << 40))
    assert limited.boundaries == slow.boundaries


def test_the_choice_knows_microbatches_of_unequal_size() -> None:
    layers = tuple(LayerCost(f"layers.{i}", 1e-3, 1e-3, 1e-3, output_bytes=1000) for i in range(8))
    profile = Profile(layers, metadata={"unit": "s"})
    sizes = (2.5, 0.5, 0.5, 0.5)
    uneven, even = (choose(profile, Wishes(2, 4, microbatches=given)) for given in (sizes, None))
    assert uneven.costs.microbatches == sizes
    named = {tried.schedule: tried.makespan for tried in even.tried}
    longer = {tried.schedule for tried in uneven.tried if (tried.makespan or 0) > (named[tried.schedule] or 0)}
    assert {"1f1b", "gpipe"} <= longer, "a large microbatch fills and drains the pipeline longer"
    assert Choice.loads(uneven.dumps()) == uneven
