"""Offloaded stages whose blocks are checkpointed, under a split backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.backward.offload_targets import HostMemory
from penstock.comm import LocalTransport, LocalWorld
from tests.run.pipes import batch, close, grads_of, loop_grads, on_ranks

WIDTH = 4  # the rows of a microbatch, too: then no size tells two saved tensors apart


class Linear(nn.Module):
    """A checkpointed function that is given its weights as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.body, x, *self.parameters(), use_reentrant=False)
        return made

    def body(self, x: Tensor, weight: Tensor, bias: Tensor, last: Tensor) -> Tensor:
        return x + nn.functional.linear(torch.tanh(nn.functional.linear(x, weight, bias)), last)


class Addmm(Linear):
    def body(self, x: Tensor, weight: Tensor, bias: Tensor, last: Tensor) -> Tensor:
        return x + torch.tanh(torch.addmm(bias, x, weight)) @ last


class FrozenBias(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)


class FrozenBiasAddmm(FrozenBias, Addmm):
    pass


class UsedTwice(Linear):
    """A deferred weight that is also used by another operator."""

    def body(self, x: Tensor, weight: Tensor, bias: Tensor, last: Tensor) -> Tensor:
        return super().body(x, weight, bias, last) + weight.sum(0)


class SavedElsewhere(Linear):
    """Hooks of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbv"])
@pytest.mark.parametrize("kind", [Linear, Addmm, FrozenBias, FrozenBiasAddmm, UsedTwice, SavedElsewhere])
def test_weights_given_to_a_checkpoint(kind: type[Linear], schedule: str) -> None:
    """Saved-tensor hooks give a checkpoint that runs again new tensors for the weights among its arguments. They were no
    parameters, so their linear layers were not deferred as in the forward, and saved their tensors in another order: with
    square microbatches the gradients of earlier layers were wrong by up to 0.76, with others it raised CheckpointError."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [kind().double() for _ in range(4)]
    x, y = batch(4 * WIDTH)
    want = loop_grads(modules, x, y, 4)
    fired: list[int] = []
    for p in (p for m in modules for p in m.parameters() if p.requires_grad):
        p.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
    options: dict[str, Any] = {"offload": True, "offload_to": HostMemory(threshold=0)}
    if kind is SavedElsewhere:
        options = {}
    on_ranks(schedule, 2, 4, lambda pipe, rank: pipe.step(x, target=y), modules=modules, **options)
    assert close(grads_of(modules), want)
    assert len(fired) == 4 * len(want), "each accumulates once in a microbatch"


def test_under_autocast() -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Linear() for _ in range(4)]
    x, y = (t.float() for t in batch(4 * WIDTH))

    def trained(**options: Any) -> list[Tensor]:
        def run(pipe: penstock.Schedule, rank: int) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.step(x, target=y)

        own = copy.deepcopy(modules)
        on_ranks("zbv", 2, 4, run, modules=own, **options)
        return grads_of(own)

    assert all(map(torch.equal, trained(), trained(offload=True, offload_to=HostMemory(threshold=0))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return made


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("schedule", ["interleavedzerobubble", "zbv"])
@pytest.mark.parametrize("shape", [(WIDTH,), (3, WIDTH)])
def test_a_captured_model_with_checkpoints(schedule: str, shape: tuple[int, ...]) -> None:
    """Capture gives a checkpointed region its weights as arguments: `offload=True` trained another model, or failed."""
    torch.manual_seed(0)
    model = Checkpointed().double()
    x, y = (torch.randn(4 * WIDTH, *shape, dtype=torch.float64) for _ in range(2))
    want = loop_grads([model], x, y, 4)

    def run(transport: LocalTransport) -> dict[str, Tensor | None]:
        pipe = penstock.Pipeline(
            model, (x[:WIDTH],), loss_fn=nn.functional.mse_loss, schedule=schedule, microbatches=4, group=transport,
            profile=False, offload=True, offload_to=HostMemory(threshold=0),
        )  # fmt: skip
        pipe.step(x, target=y)
        return {name: p.grad for name, p in pipe.named_parameters()}

    first, last = LocalWorld(2).run(run)
    found = first | last
    assert close([grad for name, _ in model.named_parameters() if (grad := found[name]) is not None], want)
