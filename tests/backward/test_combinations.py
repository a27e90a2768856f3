"""Every backward with every decorator, for stages of all kinds, against a plain loop in float64.

Compared are losses, gradients (also absent ones), buffers, and how often hooks after accumulation are called, in a first and in
a later step. The first stage of each pipeline has an input without a gradient, the second one with.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.backward.offload_targets import HostMemory
from penstock.run import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.backward.models import MODELS, WIDTH

MICROBATCHES, STEPS, STAGES = 4, 3, 2
BACKWARDS = {"full": "interleaved1f1b", "split": "interleavedzerobubble"}
ALL, EVEN, ODD = (dict.fromkeys(range(STAGES), chosen) for chosen in ([0, 1, 2, 3], [0, 2], [1, 3]))
DECORATORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": ALL},
    "offload": {"offload": ALL, "offload_to": HostMemory(threshold=0)},
    "both": {"recompute": EVEN, "offload": ODD, "offload_to": HostMemory(threshold=0)},
}


class Training:
    """What a training leaves: losses, gradients, buffers, calls of hooks."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.modules = [MODELS[name]().double() for _ in range(STAGES)]
        self.x = torch.randn(3 * MICROBATCHES, WIDTH, dtype=torch.float64)
        self.losses: list[Tensor] = []
        self.calls: Counter[str] = Counter()
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.calls.update([name]))  # type: ignore[misc]
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [*nn.ModuleList(self.modules).named_parameters()]

    def loop(self) -> Training:
        for _ in range(STEPS):
            for rows in self.x.tensor_split(MICROBATCHES):
                value = rows.clone()
                for module in self.modules:
                    value = module(value)
                loss = value.square().mean()
                (loss / MICROBATCHES).backward()
                self.losses.append(loss.detach())
        return self

    def pipeline(self, schedule: str, options: dict[str, Any]) -> Training:
        plan = get_schedule(schedule)(1, MICROBATCHES, stages_per_rank=STAGES)
        stages = [PipelineStage(module, index, STAGES, "cpu") for index, module in enumerate(self.modules)]
        runner = Schedule.from_plan(plan, stages, loss_fn=lambda value, _: value.square().mean(), **options)
        for _ in range(STEPS):
            losses: list[Tensor] = []
            runner.step(self.x.clone(), target=self.x, losses=losses)
            self.losses += losses
        return self

    def compare(self, other: Training) -> None:
        assert len(self.losses) == len(other.losses)
        for found, expected in zip(self.losses, other.losses, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        for (name, found), (_, expected) in zip(self.named_parameters(), other.named_parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None), name
            if found.grad is not None:
                torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)  # type: ignore[misc]
        buffers = (nn.ModuleList(one.modules).state_dict() for one in (self, other))
        for (name, found), expected in zip(*(table.items() for table in buffers), strict=True):
            torch.testing.assert_close(found, expected[1], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)  # type: ignore[misc]
        assert self.calls == other.calls


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("name", MODELS)
def test_as_in_a_plain_loop(name: str, backward: str, decorator: str) -> None:
    found = Training(name).pipeline(BACKWARDS[backward], DECORATORS[decorator])
    found.compare(Training(name).loop())
