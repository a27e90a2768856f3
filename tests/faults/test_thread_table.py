"""The column "ranks as threads" of the table in docs/guides/when-something-goes-wrong.md, row by row.

Exceptions and interrupts are in test_step_faults.py. Rows that cannot occur, because all ranks are one process, are said there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from penstock.comm import LocalWorld, Transport
from penstock.errors import PeerFailed, PenstockError, RunError, StepTimeout
from penstock.run import Schedule1F1B
from penstock.stage import PipelineStage

X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def schedule_of(transport: Transport, module: nn.Module, count: int = 4) -> Schedule1F1B:
    stage = PipelineStage(module, transport.rank, 2, "cpu", group=transport)
    return Schedule1F1B(stage, count, loss_fn=nn.functional.mse_loss)


def said(act: Callable[[], Any]) -> str:
    try:
        act()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_disagree_are_told_and_the_next_step_works() -> None:
    def train(transport: Transport) -> list[str]:
        module = nn.Linear(4, 4)
        schedules = [schedule_of(transport, module, count) for count in (4 + transport.rank, 4)]
        return [said(partial(schedule.step, X, target=Y)) for schedule in schedules]

    for first, second in LocalWorld(2).run(train):
        assert first.startswith("RanksDisagree: the ranks are about to run different things"), first
        assert second == ""


def test_a_rank_that_leaves_is_named_at_once_and_again() -> None:
    first = []

    def train(transport: Transport) -> None:
        schedule = schedule_of(transport, nn.Linear(4, 4))
        for _ in range(3 if transport.rank == 0 else 1):
            text = said(lambda: schedule.step(X, target=Y))
            first.append(text) if transport.rank == 0 else None

    with pytest.raises(RunError, match="messages without their other half"):
        LocalWorld(2).run(train)
    assert first[0] == ""
    for text in first[1:]:
        assert text.startswith("PeerFailed: rank 1 failed: it has left"), first


def test_when_all_wait_and_nothing_is_on_its_way_all_say_where_everybody_is() -> None:
    def wait(transport: Transport) -> None:
        schedule_of(transport, nn.Linear(4, 4)).step(X, target=Y)
        transport.irecv(torch.empty(1), 1 - transport.rank).wait()

    world = LocalWorld(2)
    with pytest.raises(StepTimeout, match=r"(?s)every rank waits.*rank  step  action"):
        world.run(wait)
    assert all(isinstance(error, StepTimeout) for error in world.errors)


def test_a_rank_that_computes_for_long_is_left_alone() -> None:
    def train(transport: Transport) -> str:
        module = nn.Linear(4, 4)
        if transport.rank == 1:
            module.register_forward_pre_hook(lambda *_: time.sleep(0.1))
        return said(lambda: schedule_of(transport, module).step(X, target=Y))

    assert LocalWorld(2).run(train) == ["", ""]


def test_a_hook_that_steps_again_is_refused_and_the_next_step_works() -> None:
    """As a second thread would be: one rank does one thing after another."""

    def train(transport: Transport) -> list[str]:
        module, inner = nn.Linear(4, 4), list[str]()
        schedule = schedule_of(transport, module)
        if transport.rank == 0:
            handle = module.register_forward_pre_hook(
                lambda *_: (handle.remove(), inner.append(said(lambda: schedule.step(X, target=Y))))[:0] or None
            )
        return [said(lambda: schedule.step(X, target=Y)), said(lambda: schedule.step(X, target=Y)), *inner]

    first, second = LocalWorld(2).run(train)
    assert first[:2] == second == ["", ""]
    assert first[2].startswith("RunError: rank 0: step() or eval() while another thread"), first


def test_what_a_rank_raises_outside_of_steps_is_told_to_who_waits_for_it() -> None:
    def train(transport: Transport) -> str:
        schedule = schedule_of(transport, nn.Linear(4, 4))
        schedule.step(X, target=Y)
        if transport.rank == 1:
            raise ArithmeticError("on purpose")
        return said(lambda: schedule.step(X, target=Y))

    world = LocalWorld(2)
    with pytest.raises(ArithmeticError, match="on purpose"):
        world.run(train)
    assert not isinstance(world.errors[0], PeerFailed), "it is told in the step, and caught there"
