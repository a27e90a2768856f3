"""Models of the soak, which fail where they are told to, and the plain loop that says what is right."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import penstock
from penstock.batch import microbatch_sizes
from tests.soak.script import Event, Script


class Boom(Exception):
    """A failure on purpose."""


class Bomb:
    """What is to happen in the step that runs; `act` does what is not an exception."""

    def __init__(self, act: Callable[[str], None]) -> None:
        self.event: Event | None = None
        self.act = act

    def strike(self, where: str, stage: int, microbatch: int) -> None:
        event = self.event
        if event is None or (event.stage, event.microbatch) != (stage, microbatch):
            return
        if event.kind == where:
            self.event = None
            raise Boom(f"in {where}")
        if where == "forward" and event.kind in ("pause", "kill", "stop"):
            self.event = None
            self.act(event.kind)


class Block(nn.Module):
    """One stage: layers of several kinds, with places where it may fail."""

    def __init__(self, script: Script, stage: int, bomb: Bomb | None) -> None:
        super().__init__()
        self.stage, self.bomb, self.forwards, self.grads = stage, bomb, 0, 0
        width = script.width
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(script.depth)
        )
        self.drop = nn.Dropout(0.3) if script.dropout else nn.Identity()
        if bomb is not None:
            last = self.layers[-1][-1]
            assert isinstance(last, nn.Linear)
            own = weakref.ref(self)  # a parameter that held its module could not be collected
            last.weight.register_post_accumulate_grad_hook(lambda _: own()._count())  # type: ignore[union-attr]

    def begin(self) -> None:
        self.forwards = self.grads = 0

    def _count(self) -> None:
        assert self.bomb is not None
        self.bomb.strike("hook", self.stage, self.grads)
        self.grads += 1

    def forward(self, x: Tensor) -> Tensor:
        microbatch, bomb = self.forwards, self.bomb
        self.forwards += 1
        if bomb is not None and self.training:
            bomb.strike("forward", self.stage, microbatch)
        for layer in self.layers:
            x = x + layer(x)
        value: Tensor = self.drop(x)
        if bomb is not None and value.requires_grad:
            value.register_hook(lambda _: bomb.strike("backward", self.stage, microbatch))
        return value


def make_stages(script: Script, bomb: Bomb | None) -> list[Block]:
    torch.manual_seed(script.seed)
    return [Block(script, stage, bomb).double() for stage in range(script.num_ranks * script.stages_per_rank)]


def batch(script: Script, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * script.seed + step)
    x, y = (torch.randn(script.rows[step], script.width, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def plain_loop(script: Script, stages: list[Block], step: int, *, done: int) -> float:
    """The same step in one process: gradients are left in `stages`, the loss comes back. `done`: good steps before it."""
    x, y = batch(script, step)
    total = 0.0
    for stage in stages:
        stage.zero_grad()
    sizes = microbatch_sizes(len(x), script.num_microbatches)
    for microbatch, (a, b) in enumerate(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True)):
        for stage in stages:
            keyed = penstock.microbatch_rng(seed=script.seed, stage=stage.stage, microbatch=microbatch, step=done)
            with keyed if script.dropout else nullcontext():
                a = stage(a)
        loss = nn.functional.mse_loss(a, b) * (sizes[microbatch] / len(x))
        loss.backward()
        total += float(loss.detach())
    return total
