"""Python's collector runs after the steps that were asked for, and at no other time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PlanError


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection while a test runs."""
    seen: list[int] = []

    def hear(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(hear)
    yield seen
    gc.callbacks.remove(hear)


def pipe(**options: Any) -> penstock.Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    given = {"loss_fn": nn.functional.mse_loss, "microbatches": 2, "profile": False}
    return penstock.Pipeline(model, (torch.ones(4, 4),), **given, **options)


def circles(count: int) -> None:
    for _ in range(count):
        one: list[Any] = []
        one.append(one)


def test_all_ranks_collect_at_the_same_step(collections: list[int]) -> None:
    assert gc.isenabled()
    made = pipe(collect_every=2)
    x = torch.ones(4, 4)
    found = []
    for _ in range(5):
        collections.clear()
        circles(5000)  # enough for several collections
        made.step(x, target=x)
        found.append(list(collections))
    assert found == [[], [1], [], [1], []]
    del made
    assert gc.isenabled()


def test_two_pipelines_give_the_collector_back_when_both_are_gone() -> None:
    first, second = pipe(collect_every=2), pipe(collect_every=3)
    del first
    assert not gc.isenabled()
    del second
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        made = pipe(collect_every=2)
        del made
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_number_of_steps_is_asked_for() -> None:
    with pytest.raises(PlanError, match="collect_every=0; expected a whole number from 1"):
        pipe(collect_every=0)
