"""A rank that runs out of memory: every rank raises OutOfMemory with a plan that holds less, and the next step works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.plan import Op
from penstock.stage.held import Held

WIDTH, ROWS, MICROBATCHES = 16, 32, 8
SAVED = 2 * WIDTH * ROWS * 4  # bytes that one forward saves at least

ERRORS: dict[str, Callable[[], BaseException]] = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "python": MemoryError,
    "host": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
}


class Tight(nn.Module):
    """Raises if more of what it made is alive than its budget: only what is really let go counts."""

    def __init__(self, budget: float, kind: str = "device") -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.budget, self.kind, self.held = budget, kind, Held()

    def forward(self, x: Tensor) -> Tensor:
        with self.held:
            wide = torch.cat([self.norm(self.layer(x))] * 2, 1).tanh()
            if self.held.now > self.budget:
                error = ERRORS[self.kind]()
                raise error
            return nn.functional.dropout(wide[:, :WIDTH] * wide[:, WIDTH:], 0.25, self.training)


def data() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, ROWS * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()
    return x, y


def on_ranks(budgets: tuple[float, float], body: Callable[[penstock.Pipeline, int], Any], **options: Any) -> list[Any]:
    torch.manual_seed(0)
    kind = options.pop("kind", "device")
    modules = [Tight(budget, kind) for budget in budgets]
    settings = {"loss_fn": nn.functional.mse_loss, "schedule": "gpipe", "microbatches": MICROBATCHES, **options}

    def rank(transport: LocalTransport) -> Any:
        stage = penstock.PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        return body(penstock.Pipeline(stages=[stage], **settings), transport.rank)

    world = LocalWorld(2)
    on_ranks.world = world  # type: ignore[attr-defined]
    return world.run(rank)


def train(pipe: penstock.Pipeline, rank: int) -> dict[str, Any]:
    x, y = data()
    torch.manual_seed(5)
    losses = [pipe.step(x, target=y).loss for _ in range(3)]
    module = pipe.stages[0].submod
    state = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return {"losses": losses, "state": [*state, *(b.clone() for b in module.buffers())], "plan": pipe.plan}


ROOM = float("inf")


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("tight", [0, 1])
def test_every_rank_raises_with_where_and_what_to_set(kind: str, tight: int) -> None:
    budgets = (4 * SAVED, ROOM) if tight == 0 else (ROOM, 4 * SAVED)
    with pytest.raises(penstock.errors.OutOfMemory) as caught:
        on_ranks(budgets, train, kind=kind)
    errors = on_ranks.world.errors  # type: ignore[attr-defined]
    assert all(isinstance(error, penstock.errors.OutOfMemory) for error in errors)
    assert {(error.rank, error.action) for error in errors} == {(tight, caught.value.action)}
    for error in errors:
        assert f"rank {tight} ran out of memory in action {tight}F" in str(error)
        assert "microbatches saved" in str(error)
        assert "recompute=True" in str(error)


def train_with_remedy(pipe: penstock.Pipeline, rank: int) -> dict[str, Any]:
    """Run the remedy as often as a rank runs out of memory; then train from the state that was there before."""
    x, y = data()
    module = pipe.stages[0].submod
    buffers = [buffer.clone() for buffer in module.buffers()]
    has_run = False
    while not has_run:
        try:
            pipe.step(x, target=y)
            has_run = True
        except penstock.errors.OutOfMemory as error:
            if error.remedy is None:
                raise
            pipe.run_plan(error.remedy)
    for buffer, value in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(value)
    pipe.zero_grad()
    return train(pipe, rank)


@pytest.mark.parametrize("tight", [(2.5 * SAVED, ROOM), (ROOM, 2.5 * SAVED), (2.5 * SAVED, 2.5 * SAVED)])
def test_the_remedy_recomputes_the_rank_that_ran_out_of_memory(tight: tuple[float, float]) -> None:
    """The steps under it are those of a pipeline that was built with recompute, to the bit."""
    keyed = {"rng": "per-microbatch"}  # ranks as threads share the random state
    recomputed = [rank for rank in range(2) if tight[rank] != ROOM]
    expected = on_ranks((ROOM, ROOM), train_with_remedy, recompute=recomputed, **keyed)
    found = on_ranks(tight, train_with_remedy, **keyed)
    for rank in range(2):
        assert found[rank]["losses"] == expected[rank]["losses"]
        assert all(map(torch.equal, found[rank]["state"], expected[rank]["state"]))
        repeated = {action.stage for action in found[rank]["plan"].actions(rank) if action.op is Op.R}
        assert repeated == {rank} & set(recomputed)


def test_the_remedy_is_one_plan_on_all_ranks_until_nothing_is_left() -> None:
    """First the stages of the rank, then all stages, then None."""

    def body(pipe: penstock.Pipeline, rank: int) -> list[Any]:
        x, y = data()
        found = []
        while True:
            with pytest.raises(
                penstock.errors.OutOfMemory, match=r"rank 1 .*pipe\.run_plan\(error\.remedy\)"
            ) as caught:
                pipe.step(x, target=y)
            found.append(caught.value.remedy)
            if caught.value.remedy is None:
                return found
            pipe.run_plan(caught.value.remedy)

    first, second = on_ranks((ROOM, 0.0), body)
    assert first == second
    recomputed = [{a.stage for r in range(2) for a in plan.actions(r) if a.op is Op.R} for plan in first[:-1]]
    assert recomputed == [{1}, {0, 1}]


def test_the_remedy_for_a_batch_of_few_rows_has_all_microbatches() -> None:
    """A short batch runs fewer microbatches of the plan; the plan to go on with has all of them."""

    def body(pipe: penstock.Pipeline, rank: int) -> Any:
        x, y = data()
        pipe.stages[0].submod.norm.eval()  # one row is no batch for its statistics
        with pytest.raises(penstock.errors.OutOfMemory) as caught:
            pipe.step(x[:3], target=y[:3])
        assert caught.value.remedy is not None
        return caught.value.remedy.num_microbatches

    assert on_ranks((0.0, ROOM), body, few_rows=True) == [MICROBATCHES, MICROBATCHES]


def test_the_next_step_works_without_a_new_plan() -> None:
    """Whatever the failed step held is let go: a smaller batch goes through."""

    def body(pipe: penstock.Pipeline, rank: int) -> float | None:
        x, y = data()
        with pytest.raises(penstock.errors.OutOfMemory):
            pipe.step(x, target=y)
        pipe.zero_grad()
        few = ROWS * MICROBATCHES // 4
        return pipe.step(x[:few], target=y[:few]).loss

    first, second = on_ranks((8 * SAVED, ROOM), body)
    assert first == second
    assert first is not None
