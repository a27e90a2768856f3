"""Rows into microbatches of even cost: every row once, within the limit, near the best, the same every time."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.balance import attention, group_rows
from penstock.errors import SplitError
from penstock.schedules import get_schedule
from penstock.simulate import Costs, simulate


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(1, 12), st.booleans())
def test_every_row_once_and_near_the_best(lengths: list[int], count: int, squares: bool) -> None:
    count = min(count, len(lengths))
    cost = attention(64.0) if squares else float
    found = group_rows(lengths, count, cost=cost)
    assert sorted(row for rows in found.rows for row in rows) == list(range(len(lengths)))
    assert len(found.rows) == count
    assert all(found.rows)
    assert found.costs == pytest.approx([sum(cost(lengths[row]) for row in rows) for rows in found.rows])
    mean, largest = sum(map(cost, lengths)) / count, max(map(cost, lengths))
    assert max(found.costs) <= (mean + largest * (1 - 1 / count)) * (1 + 1e-9)
    assert group_rows(lengths, count, cost=cost) == found


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.integers(2, 3))
def test_small_cases_against_all_ways(lengths: list[int], count: int) -> None:
    count = min(count, len(lengths))
    best = min(
        max(
            sum(length for length, place in zip(lengths, places, strict=True) if place == group)
            for group in range(count)
        )
        for places in product(range(count), repeat=len(lengths))
    )
    assert max(group_rows(lengths, count).costs) <= best * 7 / 6 + 1e-9


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 8), st.floats(1.0, 2.0))
def test_a_limit_is_kept_or_refused(lengths: list[int], count: int, slack: float) -> None:
    count = min(count, len(lengths))
    longest = max(*lengths, slack * sum(lengths) / count)
    try:
        found = group_rows(lengths, count, cost=lambda length: 1.0 + length**2, longest=longest)
    except SplitError:
        assert longest < sum(lengths) / count + max(lengths), "with so much room every row finds a place"
        return
    assert max(sum(lengths[row] for row in rows) for rows in found.rows) <= longest * (1 + 1e-6)


def can_be_kept(lengths: list[int], count: int, longest: float) -> bool:
    """By trying all ways."""
    return any(
        max(sum(n for n, at in zip(lengths, places, strict=True) if at == group) for group in range(count)) <= longest
        for places in product(range(count), repeat=len(lengths))
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 3), st.integers(1, 20))
def test_small_cases_are_refused_only_if_there_is_no_way(lengths: list[int], count: int, longest: int) -> None:
    count = min(count, len(lengths))
    if not can_be_kept(lengths, count, longest):
        with pytest.raises(SplitError, match="finds no room"):
            group_rows(lengths, count, longest=longest)
        return
    found = group_rows(lengths, count, longest=longest)
    assert sorted(row for rows in found.rows for row in rows) == list(range(len(lengths)))
    assert all(found.rows)
    assert max(sum(lengths[row] for row in rows) for rows in found.rows) <= longest


def test_what_the_greedy_way_misses() -> None:
    assert group_rows([3, 3, 2, 2, 2], 2, longest=6).rows == ((0, 1), (2, 3, 4))
    many = group_rows([3, 3, 2, 2, 2] * 40, 80, longest=6)  # twice as many ways for each row: not all can be tried
    assert {sum([3, 3, 2, 2, 2][row % 5] for row in rows) for rows in many.rows} == {6}


def test_long_documents_among_short_ones() -> None:
    """As in the order of the batch the costliest of 16 microbatches is far above the mean, grouped it is the mean."""
    rng = random.Random(0)
    lengths = [min(131_072, int(rng.lognormvariate(8.0, 1.4))) for _ in range(512)]
    price = attention(4096.0)
    in_order = [sum(map(price, lengths[begin : begin + 32])) for begin in range(0, 512, 32)]
    assert max(in_order) * 16 / sum(in_order) > 1.44
    found = group_rows(lengths, 16, cost=price)
    assert found.imbalance < 1.05
    plan = get_schedule("1f1b")(4, 16)
    mean = sum(in_order) / 16
    even, uneven = (
        simulate(plan, replace(Costs.unit(plan), microbatches=sizes)).makespan
        for sizes in (found.sizes, tuple(cost / mean for cost in in_order))
    )
    assert even < 0.9 * uneven


@pytest.mark.parametrize(
    ("lengths", "count", "longest", "words"),
    [
        ([1, 2], 3, None, "2 rows for 3 microbatches"),
        ([], 1, None, "0 rows for 1 microbatches"),
        ([1], 0, None, "1 rows for 0 microbatches"),
        ([1, -1], 1, None, "expected lengths from 0 up"),
        ([5, 5, 5], 2, 9.0, "row 2 of length 5 finds no room: 15 in 2 microbatches of at most 9"),
    ],
)
def test_what_cannot_be_grouped(lengths: list[int], count: int, longest: float | None, words: str) -> None:
    with pytest.raises(SplitError, match=words):
        group_rows(lengths, count, longest=longest)
