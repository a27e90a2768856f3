"""Every option of `balance` against trying all cuts, with a second, naive statement of what a cut costs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.balance import LayerCost, Profile, balance, placement_ranks
from penstock.errors import BalanceError
from penstock.simulate import Link

GROUPS = {"tied": 5, "other": 3}


def all_cuts(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, count), stages - 1):
        yield (0, *inner, count)


def naive_crossing(profile: Profile, cut: int) -> int:
    if profile.crossing_bytes is not None:
        return profile.crossing_bytes[cut - 1]
    return sum(
        layer.output_bytes
        for index, layer in enumerate(profile.layers)
        if index < cut <= (index + 1 if layer.last_use is None else layer.last_use)
    )


def naive_memory(profile: Profile, cuts: tuple[int, ...], ranks: tuple[int, ...], options: dict[str, Any]) -> list[int]:
    flights = options.get("microbatches_in_flight") or [1] * len(ranks)
    factor = 2 + Fraction(options.get("optimizer_bytes_per_parameter_byte", 2.0))
    memory = [0] * (max(ranks) + 1)
    used: list[set[str]] = [set() for _ in memory]
    for stage, rank in enumerate(ranks):
        flight = flights[stage]
        to_input, to_weight = (flight, 0) if isinstance(flight, int) else flight
        for layer in profile.layers[cuts[stage] : cuts[stage + 1]]:
            memory[rank] += math.ceil(layer.parameter_bytes * factor)
            memory[rank] += to_input * layer.activation_to_input + to_weight * layer.activation_to_weight
            used[rank] |= layer.shared
    for rank, names in enumerate(used):
        memory[rank] += sum(math.ceil(profile.shared_parameters[name] * factor) for name in names)
    return memory


def naive_score(
    profile: Profile, cuts: tuple[int, ...], ranks: tuple[int, ...], options: dict[str, Any]
) -> tuple[Fraction, int, Fraction]:
    usual, links = options.get("bandwidth"), {link[:2]: link.bandwidth for link in options.get("links", ())}
    costs, total_bytes = [], 0
    for stage in range(len(ranks)):
        cost = sum(
            (
                Fraction(layer.forward) + Fraction(layer.backward_input) + Fraction(layer.backward_weight)
                for layer in profile.layers[cuts[stage] : cuts[stage + 1]]
            ),
            Fraction(0),
        )
        for side, cut in ((stage - 1, cuts[stage]), (stage + 1, cuts[stage + 1])):
            if 0 <= side < len(ranks) and ranks[side] != ranks[stage]:
                bandwidth = links.get((ranks[stage], ranks[side]), usual)
                if bandwidth is not None:
                    cost += Fraction(naive_crossing(profile, cut) / bandwidth)
                if side > stage:
                    total_bytes += naive_crossing(profile, cut)
        costs.append(cost)
    if options.get("objective") == "rank":
        slowest = max(sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in set(ranks))
    else:
        slowest = max(costs)
    return Fraction(slowest), total_bytes, sum((c * c for c in costs), Fraction(0))


def agree(profile: Profile, ranks: tuple[int, ...], options: dict[str, Any], **how: Any) -> None:
    limit = options.get("memory_limit")
    limits = None if limit is None else [limit] * (max(ranks) + 1) if isinstance(limit, int) else limit
    scores, least = [], None
    for cuts in all_cuts(len(profile.layers), len(ranks)):
        if limits is not None:
            over = max(m - lim for m, lim in zip(naive_memory(profile, cuts, ranks, options), limits, strict=True))
            least = over if least is None else min(least, over)
            if over > 0:
                continue
        scores.append(naive_score(profile, cuts, ranks, options))
    if not scores:
        with pytest.raises(BalanceError) as caught:
            balance(profile, len(ranks), **how, **options)
        assert limits is not None
        assert least is not None
        text = str(caught.value)
        base = limits[0] if len(set(limits)) == 1 else 0
        if "alone needs" in text or "fit together" in text:
            return
        (said,) = re.findall(r"(?:least|possible is) (\d+) bytes", text)
        single = len(set(ranks)) == len(ranks)
        assert int(said) == base + least if single else base < int(said) <= base + least
        return
    result = balance(profile, len(ranks), **how, **options)
    cuts = (0, *result.boundaries, len(profile.layers))
    assert result.ranks == ranks
    assert [n for stage in result.stages for n in stage.layers] == [layer.name for layer in profile.layers]
    assert all(stage.layers for stage in result.stages)
    score = naive_score(profile, cuts, ranks, options)
    assert score == min(scores)
    assert result.slowest == pytest.approx(float(score[0]))
    memory = naive_memory(profile, cuts, ranks, options)
    assert list(result.rank_memory) == memory
    assert limits is None or all(m <= lim for m, lim in zip(memory, limits, strict=True))


times = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10, allow_subnormal=False), st.just(0.1))


@st.composite
def profiles(draw: st.DrawFn, most: int = 8, shared: bool = True) -> Profile:
    count = draw(st.integers(1, most))
    layers = []
    for index in range(count):
        small = [draw(st.integers(0, 6)) for _ in range(4)]
        layers.append(
            LayerCost(
                f"layer{index}",
                draw(times),
                draw(st.sampled_from([0.0, 1.0, 0.3])),
                draw(st.sampled_from([0.0, 2.0])),
                *small,
                shared=draw(st.frozensets(st.sampled_from(sorted(GROUPS)), max_size=2)) if shared else frozenset(),
                last_use=draw(st.one_of(st.none(), st.integers(index, count - 1))),
            )
        )
    given_crossing = st.lists(st.integers(0, 9), min_size=count - 1, max_size=count - 1).map(tuple)
    return Profile(tuple(layers), GROUPS, draw(st.one_of(st.none(), given_crossing)))


@st.composite
def questions(draw: st.DrawFn, *, several: bool) -> tuple[Profile, tuple[int, ...], dict[str, Any], dict[str, Any]]:
    profile = draw(profiles())
    num_stages = draw(st.integers(1, min(6, len(profile.layers))))
    if several:
        kind = draw(st.sampled_from(["loop", "v", "list"]))
        num_ranks = draw(st.integers(1, num_stages))
        if kind == "list":
            free = draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_stages, max_size=num_stages))
            ranks = tuple(sorted(set(free)).index(r) for r in free)
            how: dict[str, Any] = {"placement": list(ranks)}
        else:
            how = {"placement": kind, "num_ranks": num_ranks}
            ranks = placement_ranks(kind, num_stages, num_ranks=num_ranks)  # type: ignore[arg-type]
    else:
        ranks, how = tuple(range(num_stages)), {}
    options: dict[str, Any] = {"optimizer_bytes_per_parameter_byte": draw(st.sampled_from([0.0, 2.0, 0.5]))}
    if draw(st.booleans()):
        options["bandwidth"] = draw(st.sampled_from([0.5, 1.0, 3.0, 100.0]))
    if max(ranks) and draw(st.booleans()):
        rank = st.integers(0, max(ranks))
        pairs = draw(st.sets(st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1]), max_size=3))
        options["links"] = [Link(*pair, 1.0, draw(st.sampled_from([None, 0.25, 2.0]))) for pair in sorted(pairs)]
    if draw(st.booleans()):
        options["objective"] = draw(st.sampled_from(["stage", "rank"]))
    flight = st.one_of(st.integers(0, 4), st.tuples(st.integers(0, 3), st.integers(0, 3)))
    if draw(st.booleans()):
        options["microbatches_in_flight"] = draw(st.lists(flight, min_size=num_stages, max_size=num_stages))
    # A limit near what some cut needs, so that it often decides.
    kind = draw(st.sampled_from(["none", "one", "list"]))
    if kind != "none":
        every = all_cuts(len(profile.layers), num_stages)
        pool = sorted({max(naive_memory(profile, cuts, ranks, options)) for cuts in every})
        near = st.sampled_from(pool[: max(1, len(pool) // 2 + 1)]).flatmap(
            lambda m: st.integers(max(1, m - 3), max(1, m + 3))
        )
        options["memory_limit"] = draw(near) if kind == "one" else [draw(near) for _ in range(max(ranks) + 1)]
    return profile, ranks, options, how


@settings(max_examples=150, deadline=None)
@given(questions(several=False))
def test_one_stage_a_rank(question: tuple[Profile, tuple[int, ...], dict[str, Any], dict[str, Any]]) -> None:
    profile, ranks, options, how = question
    agree(profile, ranks, options, **how)


@settings(max_examples=300, deadline=None)
@given(questions(several=True))
def test_several_stages_a_rank(question: tuple[Profile, tuple[int, ...], dict[str, Any], dict[str, Any]]) -> None:
    profile, ranks, options, how = question
    agree(profile, ranks, options, **how)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=6, max_size=16),
    st.sampled_from([("loop", 2), ("v", 2), ("loop", 3), ("v", 3)]),
    st.sampled_from(["stage", "rank"]),
)
def test_longer_chains_under_a_tight_limit(costs: list[int], shape: tuple[str, int], objective: str) -> None:
    placement, num_ranks = shape
    layers = (LayerCost(f"l{i}", float(c), activation_to_input=31 - c, output_bytes=c % 5) for i, c in enumerate(costs))
    profile = Profile(tuple(layers))
    ranks = placement_ranks(placement, 2 * num_ranks, num_ranks=num_ranks)  # type: ignore[arg-type]
    tight = min(max(naive_memory(profile, c, ranks, {})) for c in all_cuts(len(costs), 2 * num_ranks))
    for limit in (tight, tight + 5):
        options = {"memory_limit": limit, "objective": objective}
        agree(profile, ranks, options, placement=placement, num_ranks=num_ranks)
