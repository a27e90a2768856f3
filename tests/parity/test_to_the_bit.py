"""With recompute or offload every number of a training is the same to the bit: captured stages, and stages of many kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.backward.offload_targets import HostMemory
from penstock.comm import LocalTransport, LocalWorld
from penstock.lower import divide, recompute
from penstock.nest import tensors_in
from penstock.run import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.parity import captured

Ways = dict[str, dict[str, Any]]
SCHEDULES = ("1f1b", "zbv")  # the second splits its backwards and has two stages a rank
WIDTH = 8


@pytest.fixture
def ways(tmp_path: Path) -> Ways:
    return {
        "recompute": {"recompute": True},
        "host": {"offload": True, "offload_to": HostMemory(threshold=0)},
        "disk": {"offload": True, "offload_to": tmp_path},
    }


@pytest.mark.parametrize("way", ["recompute", "host"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", list(captured.CASES))
def test_captured_stages(name: str, schedule: str, way: str, ways: Ways) -> None:
    """Skips, several inputs, a tied weight, buffers, numbers between stages."""
    plan, batches = captured.plan_for(schedule, 3), captured.make_batches(name, (6, 6))

    def run(**options: Any) -> list[captured.Left]:
        torch.manual_seed(3)
        world = LocalWorld(plan.num_ranks, rendezvous=True)
        return world.run(lambda transport: captured.rank_of_threads(transport, plan, name, batches, **options))

    for plain, less in zip(run(), run(**ways[way]), strict=True):
        assert_same((plain.losses, plain.outputs), (less.losses, less.outputs))
        assert_same(plain.grads, less.grads)
        assert_same(plain.state, less.state)


def assert_same(expected: Any, found: Any) -> None:
    torch.testing.assert_close(list(tensors_in(found)), list(tensors_in(expected)), rtol=0, atol=0)


class Noisy(nn.Module):
    """Dropout by the global random state, a batch norm, and an argument of its own."""

    keywords = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.BatchNorm1d(3 * WIDTH),
            nn.Linear(24, WIDTH),
        )
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.dropout(torch.relu(self.norm(self.first(x))))
        return self.second(y) + (x if scale is None else x * scale)


class Checkpointed(Noisy):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return checkpoint(super().forward, x, scale, use_reentrant=False)  # type: ignore[no-any-return]


class Resting(Noisy):
    """Its dropout is off and its norm goes by its statistics, in the midst of a module that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()
        self.dropout.eval()


def awake(modules: list[nn.Module]) -> None:
    """The parts that rested train: what changes a buffer is not what it was in the first step."""
    for module in modules:
        module.train()


class Grows(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.extra: nn.Module | None = None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = super().forward(x, scale)
        return y if self.extra is None else self.extra(y)  # type: ignore[no-any-return]


def grow(modules: list[nn.Module]) -> None:
    """A batch norm comes in between two steps: it takes in each microbatch once, like the one that was there."""
    for module in modules:
        module.extra = nn.BatchNorm1d(WIDTH)


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


KINDS: dict[str, tuple[type[nn.Module], Callable[[], AbstractContextManager[Any]], dict[str, Any]]] = {
    "dropout and batch norm": (Noisy, nullcontext, {}),
    "modes of parts": (Resting, nullcontext, {}),
    "modes that change": (Resting, nullcontext, {"between": awake}),
    "layers that are added": (Grows, nullcontext, {"between": grow}),
    "autocast": (Noisy, bfloat16, {}),
    "keyword arguments": (Noisy, nullcontext, {"scale": True}),
    "tied": (Noisy, nullcontext, {"ties": True}),
    "checkpointed inside": (Checkpointed, nullcontext, {}),
    "compiled": (Noisy, nullcontext, {"compile": {"backend": "aot_eager"}}),
}


@pytest.fixture
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled_before")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind == "compiled" else []) for kind in KINDS]
)
def test_stages_of_many_kinds(kind: str, schedule: str, ways: Ways) -> None:
    expected = trained(kind, schedule)
    if kind == "compiled":
        del ways["disk"]  # a graph cannot tell where what it saved went, and each run compiles anew
    for options in ways.values():
        assert_same(expected, trained(kind, schedule, **options))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_in_pieces(schedule: str) -> None:
    """Of four pieces a rank: the same numbers as they are, and recomputed."""
    plan = divide(get_schedule(schedule)(2, 4), 2)
    assert_same(trained("dropout and batch norm", plan), trained("dropout and batch norm", recompute(plan)))


def trained(kind: str, schedule: Any, **options: Any) -> tuple[list[Any], list[Tensor]]:
    """What two accumulated steps leave on two ranks as threads, which take turns: losses; gradients and buffers."""
    make, around, given = KINDS[kind]
    plan = get_schedule(schedule)(2, 4) if isinstance(schedule, str) else schedule
    torch.manual_seed(0)
    modules = [make() for _ in range(plan.num_stages)]
    x, scale = torch.randn(16, WIDTH), torch.rand(16, 1) if "scale" in given else None
    if "ties" in given:
        modules[-1].first.weight = modules[0].first.weight  # type: ignore[union-attr,assignment]
        options["ties"] = [penstock.tie([(0, "first.weight"), (plan.num_stages - 1, "first.weight")])]
    own_options = {"compile": given["compile"]} if "compile" in given else {}
    torch.manual_seed(5)

    def rank(transport: LocalTransport) -> list[Any]:
        own = plan.placement.stages_of(transport.rank)
        stages = [
            PipelineStage(modules[i], i, plan.num_stages, "cpu", group=transport, **own_options)  # type: ignore[arg-type]
            for i in own
        ]
        running = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss, **options)
        found: list[Tensor] = []
        with around():
            for step in range(2):
                if step and "between" in given:
                    given["between"]([modules[i] for i in own])
                losses: list[Tensor] = []
                keywords = {} if scale is None else {"scale": scale}
                running.step(x, target=torch.zeros_like(x), losses=losses, **keywords)
                found += losses
        return found

    losses = LocalWorld(2).run(rank)[plan.placement.ranks[-1]]
    tensors = [t for m in modules for t in (*(p.grad for p in m.parameters()), *m.buffers())]
    return losses, [tensor.clone() for tensor in tensors if tensor is not None]
