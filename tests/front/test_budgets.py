"""Under a limit of memory compiled stages may be given a budget: chosen by bytes and time, beside R and O, and told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.balance import Profile
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import OverLimit
from penstock.front import Choice, choose
from penstock.front.choice import Built
from penstock.front.choice_text import explanation
from penstock.front.choose import BUDGET
from penstock.plan import Op
from tests.front import test_live_memory as live
from tests.front.test_within import HELD, wishes
from tests.front.test_within import profile as bare_profile


def profile(longer: float) -> Profile:
    """Stages that keep half as much with half a budget, and a quarter with a quarter; what that takes, in forwards."""
    bare = bare_profile()
    rows = {
        f"{start}:{stop}": [
            [0.5, (stop - start) * HELD // 2, longer / 8],
            [0.25, (stop - start) * HELD * 3 // 4, longer],
        ]
        for start in range(8)
        for stop in range(start + 1, 9)
    }
    return replace(bare, metadata={**bare.metadata, "budgets": rows})


def limit(share: float) -> int:
    free = choose(bare_profile(), wishes(1 << 40))
    assert free.smallest_limit is not None
    return round(free.smallest_limit + share * (max(free.memory) - free.smallest_limit))


def test_a_budget_is_taken_where_it_costs_less() -> None:
    found = choose(profile(0.05), wishes(limit(0.6), budgets=True))
    without = choose(profile(0.05), wishes(limit(0.6)))
    assert {one.way for one in found.spared} == {BUDGET}
    assert not found.plan.has(Op.R)
    assert max(found.memory) <= limit(0.6)
    assert found.timeline.makespan < without.timeline.makespan
    assert Choice.loads(found.dumps()) == found
    assert all(one.size > 0 and one.budget is not None and 0.5 <= one.budget < 1 for one in found.spared)
    assert "memory_budget=0." in explanation(Built([], found.plan, None, found))


def test_budgets_are_no_smaller_than_they_must_be() -> None:
    for share in (0.6, 0.8):
        found = choose(profile(0.05), wishes(limit(share), budgets=True))
        for stage, budget in found.budgets:
            others = [(s, b) for s, b in found.budgets if s != stage]
            more = replace(found, budgets=(*others, (stage, round(budget + 0.01, 2))), spared=())
            assert max(more.memory) > limit(share)


def test_what_budgets_cannot_do_is_recomputed() -> None:
    """No smaller budget was measured."""
    found = choose(profile(0.05), wishes(limit(0.1), budgets=True))
    assert found.plan.has(Op.R)
    assert max(found.memory) <= limit(0.1)


def test_a_dear_budget_is_not_taken() -> None:
    found = choose(profile(20.0), wishes(limit(0.6), budgets=True))
    assert found.plan.has(Op.R)
    assert found.budgets == ()


def test_the_smallest_limit_is_that_without_budgets() -> None:
    assert choose(profile(0.05), wishes(1 << 40, budgets=True)).smallest_limit == limit(0.0)


# -- of a model


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pipeline(transport: LocalTransport, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        live.model(),
        (live.data()[0],),
        loss_fn=nn.functional.mse_loss,
        schedule="gpipe",
        microbatches=live.MICROBATCHES,
        optimizer_bytes=0.0,
        group=transport,
        **{"profile": live.profile(), **options},
    )


def trained(**options: Any) -> list[Any]:
    """Of each rank: the choice, the losses of two steps, what is planned by what the graphs really keep."""
    x, y = live.data()

    def rank(transport: LocalTransport) -> Any:
        pipe = pipeline(transport, **options)
        losses = [pipe.step(x, target=y).loss for _ in range(2)]
        return pipe.choice, losses, pipe.memory().ranks[transport.rank]

    return LocalWorld(live.RANKS).run(rank)


def test_a_pipeline_is_compiled_with_the_budgets_that_were_chosen() -> None:
    """First what budgets bring is measured; then, at times that no machine can change, they are the best choice."""
    eager = trained()
    room = round(0.75 * max(eager[0][0].memory))
    options: dict[str, Any] = {"memory_limit": room, "compile": {"backend": "aot_eager"}}
    first = trained(**options)[0][0]
    rows = first.profile.metadata["budgets"]
    assert {first.key(one.stage) for one in first.spared} <= rows.keys()
    for stage, row in rows.items():
        assert [budget for budget, _, _ in row] == [0.5, 0.0], stage
        assert 0 < row[0][1] < row[1][1]
    cheap = {stage: [[budget, saved, 0.1] for budget, saved, _ in row] for stage, row in rows.items()}
    found = trained(**options, profile=replace(first.profile, metadata={**first.profile.metadata, "budgets": cheap}))
    choice = found[0][0]
    assert choice.budgets
    assert not choice.plan.has(Op.R)
    for (_, losses, memory), (_, expected, _) in zip(found, eager, strict=True):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
        assert memory.planned_peak + memory.state <= room  # by what the graphs keep


def test_a_compiled_step_that_holds_more_than_the_limit_says_so() -> None:
    """The profile says that layers keep next to nothing; their graphs know better."""
    x, y = live.data()
    lean = [replace(layer, activation_to_input=16, activation_to_weight=16) for layer in live.profile().layers]
    profile = replace(live.profile(), layers=tuple(lean))

    def rank(transport: LocalTransport) -> None:
        pipe = pipeline(transport, profile=profile, compile={"backend": "aot_eager"}, memory_limit="900kB")
        assert not pipe.choice.spared  # type: ignore[union-attr]
        pipe.step(x, target=y)

    with pytest.warns(OverLimit, match=r"rank \d held .* as the graphs of its compiled stages say; memory_limit is"):
        LocalWorld(live.RANKS).run(rank)
