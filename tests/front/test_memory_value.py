"""pipe.memory(): planned and measured, in bytes; and a step that holds more than it may says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.plan import Op
from tests.front.models import batch, loss_fn, make


def on_ranks(body: Any, **options: Any) -> list[Any]:
    tokens, labels = batch()
    settings = {"loss_fn": loss_fn, "schedule": "gpipe", "microbatches": 4, "example_target": labels, **options}

    def rank(transport: LocalTransport) -> Any:
        pipe = penstock.Pipeline(make(), (tokens,), group=transport, **settings)
        return body(pipe, tokens, labels)

    return LocalWorld(2, rendezvous=True).run(rank)


def measured(pipe: penstock.Pipeline, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
    pipe.step(tokens, target=labels)
    with pipe.watch_memory():
        pipe.step(tokens, target=labels)
    return pipe.memory(), sum(p.nbytes for p in pipe.parameters())


def test_memory_is_the_same_value_on_every_rank_and_adds_up() -> None:
    (memory, first), (other, second) = on_ranks(measured)
    assert memory == other
    assert [one.parameters for one in memory.ranks] == [first, second]
    for one in memory.ranks:
        assert one.state == 4 * one.parameters
        assert len(one.actions) == len(one.planned) == len(one.measured) == len(one.measured_buffers)
        assert max(one.measured) <= one.measured_peak
        assert max(one.planned_curve) <= one.planned_peak
        assert max(one.measured) == pytest.approx(max(one.planned_curve), rel=0.05)
        assert one.measured_peak == pytest.approx(one.planned_peak, rel=0.2)
        assert {"activations", "message buffers"} <= set(one.planned[0])
    assert "measured" in str(memory)


def test_without_a_measured_step_there_is_the_plan_alone() -> None:
    memory, _ = on_ranks(lambda pipe, tokens, labels: pipe.memory())
    assert all(one.measured == () and one.planned_peak > 0 for one in memory.ranks)
    assert "not measured" in str(memory)


def test_a_limit_is_kept_by_recomputing_and_the_losses_are_the_same() -> None:
    def train(pipe: penstock.Pipeline, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(pipe.step(tokens, target=labels).loss)
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.choice is not None
        return losses, pipe.memory(), pipe.plan, pipe.choice.smallest_limit

    free = on_ranks(train, memory_limit="1GiB")
    assert not free[0][2].has(Op.R)
    needs = max(one.state + one.planned_peak for one in free[0][1].ranks)
    limit = round(free[0][3] + 0.2 * (needs - free[0][3]))
    tight = on_ranks(train, memory_limit=limit)
    assert tight[0][2].has(Op.R)
    assert tight[0][0] == free[0][0]
    for one in tight[0][1].ranks:
        assert one.limit == limit
        assert one.state + one.measured_peak <= limit


def test_a_step_that_holds_more_than_the_limit_says_so() -> None:
    """A batch four times that of the example: nothing was planned for it."""

    def large(pipe: penstock.Pipeline, tokens: torch.Tensor, labels: torch.Tensor) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(tokens, target=labels)
            quiet = len([one for one in caught if one.category is penstock.errors.OverLimit])
            pipe.step(tokens.repeat(8, 1), target=labels.repeat(8, 1))
        assert quiet == 0
        return [str(one.message) for one in caught if one.category is penstock.errors.OverLimit]

    needs = max(one.state + one.planned_peak for one in on_ranks(lambda pipe, *_: pipe.memory())[0].ranks)
    found = [text for texts in on_ranks(large, memory_limit=round(1.2 * needs)) for text in texts]
    assert found
    assert all("memory_limit is" in text and "in action" in text for text in found)


def test_stages_made_by_hand_have_no_plan_of_bytes() -> None:
    stage = penstock.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")
    pipe = penstock.Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss, microbatches=2)
    x = torch.ones(4, 4)
    with pipe.watch_memory() as watch:
        pipe.step(x, target=x)
    only = pipe.memory().ranks[0]
    assert only.planned == ()
    assert only.measured_peak == watch.peak > 0
