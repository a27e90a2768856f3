"""A stage that sometimes does not look at its input: then no gradient flows back, and nobody waits for one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.comm import LocalWorld, Transport
from penstock.compat.schedules import PipelineScheduleSingle, get_schedule_class
from penstock.compat.stage import PipelineStage

RANKS, MICROBATCHES, ROWS, WIDTH = 2, 8, 2, 4


class Conditional(nn.Module):
    """Hands its flag on, and cuts the graph where the flag is down."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x if bool(flag.any()) else x.detach()), flag


class Watched(PipelineStage):
    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, **options: Any) -> Any:
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, **options)


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], target, reduction="sum")


LOOPS = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"]
VS = ["ZBVZeroBubble", "DualPipeV"]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", [*LOOPS, *VS])
def test_no_gradient_in_some_microbatches(name: str, first: bool, by_hand: bool) -> None:
    kind: Any = get_schedule_class(name)
    count = RANKS if issubclass(kind, PipelineScheduleSingle) else 2 * RANKS
    torch.manual_seed(0)
    layers = [Conditional() for _ in range(count)]
    plain = copy.deepcopy(layers)
    x, y = torch.randn(2, MICROBATCHES * ROWS, WIDTH, dtype=torch.float64).unbind()
    flags = torch.tensor([first] + [not first] * (MICROBATCHES - 1)).repeat_interleave(ROWS).unsqueeze(1)
    for part, flag, target in zip(x.split(ROWS), flags.split(ROWS), y.split(ROWS), strict=True):
        value = part, flag
        for layer in plain:
            value = layer(*value)
        loss(value, target).backward()

    def rank(transport: Transport) -> None:
        here = transport.rank
        second = [] if count == RANKS else [count - 1 - here] if name in VS else [here + RANKS]
        make = Watched if by_hand else PipelineStage
        stages = [make(layers[i], i, count, "cpu", group=transport) for i in (here, *second)]
        kind(stages if second else stages[0], MICROBATCHES, loss_fn=loss, scale_grads=False).step(x, flags, target=y)

    LocalWorld(RANKS).run(rank)
    for mine, theirs in zip(layers, plain, strict=True):
        for parameter, expected in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
