"""A rank that runs out of memory: every rank hears of it, nothing is lost, and if it is asked for a leaner plan goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.front.replan import Undo
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
    with pytest.raises(penstock.OutOfMemory) as caught:
        on_ranks(budgets, train, kind=kind)
    errors = on_ranks.world.errors  # type: ignore[attr-defined]
    assert all(isinstance(error, penstock.OutOfMemory) for error in errors)
    assert {(error.rank, error.action) for error in errors} == {(tight, caught.value.action)}
    for error in errors:
        assert f"rank {tight} ran out of memory in action {tight}F" in str(error)
        assert "microbatches saved" in str(error)
        assert "recompute=True" in str(error)


@pytest.mark.parametrize("tight", [(2.5 * SAVED, ROOM), (ROOM, 2.5 * SAVED), (2.5 * SAVED, 2.5 * SAVED)])
def test_the_batch_is_done_again_under_a_leaner_plan_to_the_bit(tight: tuple[float, float]) -> None:
    expected = on_ranks((ROOM, ROOM), train, recompute=[r for r in range(2) if tight[r] != ROOM])
    with pytest.warns(penstock.HoldsLess, match="this batch is done again"):
        found = on_ranks(tight, train, on_oom="replan")
    for rank in range(2):
        assert found[rank]["losses"] == expected[rank]["losses"]
        assert all(map(torch.equal, found[rank]["state"], expected[rank]["state"]))
        repeated = {a.stage for a in found[rank]["plan"].actions(rank) if a.op is Op.R}
        assert repeated == ({rank} if tight[rank] != ROOM else set())


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("on_oom", ["raise", "replan"])
def test_gradients_buffers_and_random_state_are_as_before(on_oom: str, warm: bool) -> None:
    """On all ranks, of the first step and of a later one, whatever was there before; with "replan" if nothing helps."""

    def body(pipe: penstock.Pipeline, rank: int) -> None:
        x, y = data()
        module = pipe.stages[0].submod
        tight = isinstance(module, Tight) and rank == 1
        if warm:
            pipe.step(x, target=y)
        for number, parameter in enumerate(module.parameters()):
            parameter.grad = torch.full_like(parameter, 3.0) if number else None
        if tight:
            module.budget = 0.0
        pipe.meet("both are ready")
        before, random = [b.clone() for b in module.buffers()], torch.get_rng_state()
        with pytest.raises(penstock.OutOfMemory, match="rank 1 ran out of memory"):
            pipe.step(x, target=y)
        first, *others = (parameter.grad for parameter in module.parameters())
        assert first is None
        assert all(torch.equal(grad, torch.full_like(grad, 3.0)) for grad in others if grad is not None)
        assert all(map(torch.equal, before, module.buffers()))
        if rank == 1:  # ranks as threads share it, and put it back one after the other
            assert torch.equal(random, torch.get_rng_state())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", penstock.HoldsLess)
        on_ranks((ROOM, ROOM), body, on_oom=on_oom)


def test_buffers_are_put_back_after_a_part_has_changed_its_mode() -> None:
    """A batch norm that did not count in the steps before is put back too, though the whole trained all along."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    undo = Undo([module], torch.device("cpu"))
    for _ in range(2):
        undo.take()
        module(torch.randn(4, 2))
        undo.forget()
    module[1].train()
    before = [buffer.clone() for buffer in module.buffers()]
    undo.take()
    module(torch.randn(4, 2))
    undo.put_back()
    assert all(map(torch.equal, before, module.buffers()))


def test_the_next_step_works_without_a_new_plan() -> None:
    """Whatever the failed step held is let go: a smaller batch goes through."""

    def body(pipe: penstock.Pipeline, rank: int) -> float | None:
        x, y = data()
        with pytest.raises(penstock.OutOfMemory):
            pipe.step(x, target=y)
        pipe.zero_grad()
        few = ROWS * MICROBATCHES // 4
        return pipe.step(x[:few], target=y[:few]).loss

    first, second = on_ranks((8 * SAVED, ROOM), body)
    assert first == second
    assert first is not None


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(penstock.StageError, match='on_oom=\'retry\'; expected "raise" or "replan"'):
        penstock.Pipeline(nn.Linear(1, 1), (torch.ones(1, 1),), on_oom="retry")
