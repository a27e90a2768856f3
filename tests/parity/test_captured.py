"""Captured models under every schedule: what they compute, what they send, and what they say when they cannot."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.capture import LossWrapper, TrivialLossWrapper, pipeline
from penstock.comm.local import LocalTransport, LocalWorld
from penstock.errors import PenstockError, ShapeError
from penstock.run.channel import Channel
from penstock.run.schedule import Schedule
from penstock.schedules import all_schedules
from tests.capture import toys
from tests.parity import captured as cases

SCHEDULES = [recipe.name for recipe in all_schedules() if recipe.name != "forward"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", list(cases.CASES))
def test_every_schedule(name: str, schedule: str) -> None:
    """A cold step, a warm one, one with another batch size that does not divide evenly, an evaluation."""
    plan = cases.plan_for(schedule, 3)
    batches = cases.make_batches(name, (6, 6, 10))
    ranks = LocalWorld(plan.num_ranks, rendezvous=True).run(cases.rank_of_threads, plan, name, batches)
    cases.assert_equal(plan, ranks, *cases.run_loop(name, batches, 3))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["skips", "far"])
def test_a_value_crosses_a_pair_of_ranks_once(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many stages of a rank read it; and its gradient comes back once, summed."""
    plan = cases.plan_for(schedule, 3)
    sent: Counter[tuple[int, int]] = Counter()
    post = Channel.post

    def counted(channel: Channel, tensor: Tensor) -> None:
        sent[ranks.index(threading.get_ident()), channel.peer] += 1
        post(channel, tensor)

    monkeypatch.setattr(Channel, "post", counted)
    ranks: list[int] = [0] * plan.num_ranks

    def rank(transport: LocalTransport) -> None:
        ranks[transport.rank] = threading.get_ident()
        pipe = copy.deepcopy(cases.captured(name)[1])
        stages = [pipe.build_stage(k, "cpu", group=transport) for k in plan.placement.stages_of(transport.rank)]
        step = Schedule.from_plan(plan, stages).step
        step(**batch)  # its messages describe themselves, and are not posted this way
        step(**batch)

    (batch,) = cases.make_batches(name, (6,))
    LocalWorld(plan.num_ranks).run(rank)
    rank_of = plan.placement.rank_of
    wires = [wire for outputs in cases.captured(name)[1].info().stage_outputs[:-1] for wire in outputs]
    crossings = {(w.name, rank_of(w.source or 0), rank_of(k)) for w in wires for k in w.stages}
    expected: Counter[tuple[int, int]] = Counter()
    for _, here, there in crossings:
        if here != there:
            expected[here, there] += 3
            expected[there, here] += 3
    assert sent == expected


def test_sequences_of_other_lengths() -> None:
    """A capture with open dimensions runs with others, from step to step; a fixed one says which dimension is fixed."""
    torch.manual_seed(0)
    model = cases.Tied().double()
    auto = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    example = {name: torch.randint(0, cases.WORDS, (2, 3)) for name in ("ids", "labels")}
    pipe = pipeline(copy.deepcopy(model), (), example, dynamic_shapes={"ids": auto, "labels": auto})
    batches = [
        {name: torch.randint(0, cases.WORDS, shape) for name in ("ids", "labels")}
        for shape in ((6, 3), (6, 5), (4, 5), (6, 3), (2, 9))
    ]
    plan = cases.plan_for("zbv", 2)

    def rank(transport: LocalTransport) -> list[list[Tensor]]:
        stages = [pipe.build_stage(k, "cpu", group=transport) for k in plan.placement.stages_of(transport.rank)]
        schedule = Schedule.from_plan(plan, stages)
        found: list[list[Tensor]] = [[] for _ in batches]
        for losses, batch in zip(found, batches, strict=True):
            schedule.step(**batch, losses=losses)
        return found

    got = LocalWorld(2).run(rank)[plan.placement.rank_of(3)]
    for losses, batch in zip(got, batches, strict=True):
        parts = zip(*(value.chunk(2) for value in batch.values()), strict=True)
        want = [model(*part)["loss"] for part in parts]
        torch.testing.assert_close(torch.stack(losses), torch.stack(want))

    fixed = pipeline(model, (), example)  # the batch alone is open
    with pytest.raises(ShapeError, match="dimension 1 of ids is 5; the model was captured with 3 there"):
        fixed(**batches[1])


def test_each_rank_may_give_only_what_its_stages_read() -> None:
    """And one that lacks an input says which one; all ranks raise, and the next step works."""
    plan = cases.plan_for("1f1b", 2)
    (batch,) = cases.make_batches("skips", (4,))
    own: list[dict[str, Any]] = [{"x": batch["x"]}, {}, {}, {"late": batch["late"]}]
    pipe = cases.captured("skips")[1]

    def rank(transport: LocalTransport) -> tuple[str, list[Tensor]]:
        schedule = Schedule.from_plan(plan, copy.deepcopy(pipe).build_stage(transport.rank, "cpu", group=transport))
        with pytest.raises(PenstockError) as caught:
            schedule.step(**own[transport.rank] if transport.rank < 3 else {"x": batch["x"]})
        losses: list[Tensor] = []
        schedule.step(**own[transport.rank], losses=losses)
        return str(caught.value), losses

    found = LocalWorld(4).run(rank)
    for text, _ in found:
        assert "stage 3 reads late, and this rank's call does not give it" in text
    assert all("rank 3" in text for text, _ in found[:3])
    want = cases.run_loop("skips", [batch], 2)[1][0]
    torch.testing.assert_close(torch.stack(found[3][1]), torch.stack(want))


class Both(LossWrapper):
    """A loss and the output, the loss second."""

    loss_spec = (False, True)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = self.module(x)
        return output, self.loss_fn(output, target)


@pytest.mark.parametrize("wrapper", [Both, TrivialLossWrapper])
def test_the_models_own_loss_and_a_loss_function_are_the_same(wrapper: type[LossWrapper]) -> None:
    torch.manual_seed(0)
    model = toys.Chain(4, dropout=0.0).double()
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    whole = pipeline(wrapper(model, nn.functional.mse_loss), (x[:2], y[:2]))
    bare = pipeline(model, (x[:2],))
    assert whole.info().has_loss
    assert not bare.info().has_loss
    plan = cases.plan_for("interleaved1f1b", 3)

    def rank(transport: LocalTransport) -> list[Tensor]:
        found = []
        for pipe in (whole, bare):
            stages = [pipe.build_stage(k, "cpu", group=transport) for k in plan.placement.stages_of(transport.rank)]
            losses: list[Tensor] = []
            if pipe is whole:
                Schedule.from_plan(plan, stages).step(x, y, losses=losses)
            else:
                Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss).step(x, target=y, losses=losses)
            found += losses
            found += [p.grad.clone() for stage in stages for p in stage.submod.parameters() if p.grad is not None]
            for stage in stages:
                stage.submod.zero_grad()
        return found

    for found in LocalWorld(2).run(rank):
        half = len(found) // 2
        assert half > 3
        torch.testing.assert_close(found[:half], found[half:], rtol=0, atol=0)


def test_modes_under_a_schedule() -> None:
    """Dropout: off in eval(), on again in train(); there each microbatch has its own numbers, whoever draws them."""
    torch.manual_seed(0)
    model = toys.Chain(4).double().train()
    x = torch.randn(6, 4, dtype=torch.float64)
    pipe = pipeline(copy.deepcopy(model), (x[:2],))

    def rank(transport: LocalTransport, name: str) -> tuple[Tensor, ...]:
        plan = cases.plan_for(name, 3)
        mine = copy.deepcopy(pipe)
        stages = [mine.build_stage(k, "cpu", group=transport) for k in plan.placement.stages_of(transport.rank)]
        schedule = Schedule.from_plan(plan, stages, loss_fn=lambda y, _: y.sum(), rng="per-microbatch", seed=3)
        first = schedule.step(x, target=x)
        for stage in stages:
            stage.submod.eval()
        quiet = schedule.eval(x)
        for stage in stages:
            stage.submod.train()
        return first, quiet, schedule.step(x, target=x)

    results = []
    for name in ("1f1b", "zbv"):
        plan = cases.plan_for(name, 3)
        results.append(LocalWorld(plan.num_ranks).run(rank, name)[plan.placement.rank_of(3)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    first, quiet, again = results[0]
    assert torch.equal(quiet, torch.cat([model.eval()(rows) for rows in x.chunk(3)]))
    assert (first == 0).any()
    assert not torch.equal(first, again)


@pytest.mark.parametrize(("way", "name"), [("module", "1f1b"), ("stage", "zb-h1")])
def test_a_compiled_stage(way: str, name: str) -> None:
    """`module.compile()` before the stage is built, or torch.compile around it."""
    torch.manual_seed(0)
    model = cases.Skips().double()
    (batch,) = cases.make_batches("skips", (6,))
    pipe = pipeline(copy.deepcopy(model), (), {name: value[:2] for name, value in batch.items()})
    plan = cases.plan_for(name, 3)

    def rank(transport: LocalTransport) -> list[Tensor]:
        if way == "module":
            pipe.get_stage_module(transport.rank).compile(backend="aot_eager")
        stage = pipe.build_stage(transport.rank, "cpu", group=transport)
        if way == "stage":
            stage.submod = torch.compile(stage.submod, backend="aot_eager")
        schedule = Schedule.from_plan(plan, stage)
        losses: list[Tensor] = []
        schedule.step(**batch)
        schedule.step(**batch, losses=losses)
        return losses

    losses = LocalWorld(4).run(rank)[3]
    torch.testing.assert_close(torch.stack(losses), torch.stack(_losses(model, batch)))
    grads = dict(model.named_parameters())
    for k in range(4):
        for name, parameter in pipe.get_stage_module(k).named_parameters():
            torch.testing.assert_close(parameter.grad, 2 * grads[name].grad)


def _losses(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """A plain loop over three microbatches; gradients stay in the model."""
    found = []
    for x, late in zip(batch["x"].chunk(3), batch["late"].chunk(3), strict=True):
        loss = model(x, late)["loss"]
        (loss / 3).backward()
        found.append(loss.detach())
    return found
