"""What compiled stages hold is in the memory of the plan, in bytes; and a memory budget lets them hold less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.front.memory_view import RankMemory

WIDTH, ROWS, MICROBATCHES = 16, 8, 4
PIECE = ROWS // MICROBATCHES * WIDTH * 4  # bytes of one activation of a microbatch


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def last_rank(**options: Any) -> tuple[RankMemory, RankMemory]:
    """What is planned for the last rank, before a step and after one."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(4)))

    def rank(transport: LocalTransport) -> tuple[RankMemory, RankMemory]:
        pipe = penstock.Pipeline(
            model,
            (x,),
            loss_fn=nn.functional.mse_loss,
            schedule="zb-h1",
            microbatches=MICROBATCHES,
            profile=False,
            group=transport,
            **options,
        )
        before = pipe.memory()
        pipe.step(x, target=y)
        return before.ranks[1], pipe.memory().ranks[1]

    first, second = LocalWorld(2).run(rank)
    assert first == second  # all ranks know the same
    return second


def held(memory: RankMemory) -> dict[str, float]:
    """Activations after the first F, the first I and the last W."""
    actions = {"F": "1F0", "I": "1I0", "W": f"1W{MICROBATCHES - 1}"}
    return {kind: memory.planned[memory.actions.index(action)]["activations"] for kind, action in actions.items()}


def test_what_is_held_to_i_and_to_w_is_known_after_a_step() -> None:
    """Of two blocks: the input, and of each what GELU takes and tanh gives; then the factors of two products."""
    before, after = last_rank(compile={"backend": "aot_eager"})
    assert held(after) == {"F": 5 * PIECE, "I": 4 * PIECE, "W": 0.0}
    assert held(before) != held(after)


def test_a_budget_holds_less() -> None:
    """Input and output."""
    _, after = last_rank(compile={"backend": "aot_eager", "memory_budget": 0.0})
    assert held(after)["F"] == 2 * PIECE


def test_eager_stages_go_by_the_profile() -> None:
    before, after = last_rank()
    assert before == after
