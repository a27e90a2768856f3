"""Captured models of four stages, each with something that a schedule must get right, and the loop that they must equal.

    run_threads("zbv", CASES["skips"])      # raises if anything differs

Every rank works on a copy of the pipe, as processes do: what several ranks hold is equal because it is kept equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import MultiUseParameterConfig, Pipe, pipe_split, pipeline
from penstock.comm.transport import Transport
from penstock.plan import Plan
from penstock.run.schedule import Schedule
from penstock.schedules import get_schedule

WIDTH = 4
WORDS = 9


def _linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Skips(nn.Module):
    """A value of stage 0 is used by all later stages, one of stage 1 by stage 3; `late` is read by stage 3 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)

    def forward(self, x: Tensor, late: Tensor) -> dict[str, Tensor]:
        first = self.layers[0](x)
        pipe_split()
        second = self.layers[1](first.relu()) + first
        pipe_split()
        third = self.layers[2](second) * first
        pipe_split()
        out = self.layers[3](third) + first.tanh() - second
        return {"out": out, "loss": (out - late).square().mean()}


class Far(nn.Module):
    """A value of stage 0 goes past two stages to the last one, and stage 2 reads only an argument and stage 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.layers[0](x).tanh()
        pipe_split()
        second = self.layers[1](first)
        pipe_split()
        third = self.layers[2](y) + first.sum()
        pipe_split()
        return (self.layers[3](third) * first + second).square().mean()


class Tied(nn.Module):
    """Embedding and head share their weight, stages 1 and 2 a whole module that is called in both."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        pipe_split()
        x = self.twice(x).tanh()
        pipe_split()
        x = self.norm(self.twice(x)) + x
        pipe_split()
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Buffers(nn.Module):
    """A buffer that two stages read, one that a stage writes and reads, batch norm in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.layers[0](x)) * self.scale
        pipe_split()
        self.seen += 1
        x = self.layers[1](x)
        pipe_split()
        x = self.norms[1](self.layers[2](x))
        pipe_split()
        return (self.layers[3](x) * self.scale).square().mean()


class Numbers(nn.Module):
    """A size that no tensor of the later stages shows crosses as a number; the output holds one, and a string."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)

    def forward(self, x: Tensor, rows: Tensor) -> dict[str, Any]:
        count = rows.shape[1]
        total = self.layers[0](x).sum() * count + rows.sum()
        pipe_split()
        total = total + self.layers[1].weight.sum() * count
        pipe_split()
        total = (total * self.layers[2].bias).sum()
        pipe_split()
        return {"count": count, "note": "done", "loss": (total * self.layers[3].bias.sum() / count).tanh()}


class Mixed(nn.Module):
    """Values that need no gradient, views, in-place writes to what another stage made, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _linears(4)
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        keep = (x > 0).any(-1, keepdim=True)
        y = self.layers[0](x)
        pipe_split()
        y.mul_(2)
        z = self.layers[1](y).transpose(0, 1)
        pipe_split()
        w = self.layers[2](z.transpose(0, 1)).masked_fill(~keep, 0.5)
        pipe_split()
        return (self.layers[3](w) * mask + z.t()).square().mean()


@dataclass(frozen=True)
class Case:
    """A model, and what a batch of some rows looks like."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)  # of the capture
    loss: Callable[[Any], Tensor] = lambda output: output["loss"] if isinstance(output, dict) else output


def _rows(*names: str) -> Callable[[int], dict[str, Any]]:
    return lambda rows: {name: torch.randn(rows, WIDTH, dtype=torch.float64) for name in names}


def _ids(rows: int) -> dict[str, Any]:
    return {name: torch.randint(0, WORDS, (rows, 3)) for name in ("ids", "labels")}


_AUTO = torch.export.Dim.AUTO
_SPEC = {"output_loss_value_spec": True}
_TRANSMIT = {"multi_use_param_spec": MultiUseParameterConfig.TRANSMIT}
_WIDE = {"dynamic_shapes": {"x": {0: _AUTO}, "rows": {0: _AUTO, 1: _AUTO}}}

CASES = {
    "skips": Case(Skips, _rows("x", "late")),
    "far": Case(Far, _rows("x", "y"), _SPEC),
    "tied": Case(Tied, _ids),
    "transmitted": Case(Tied, _ids, _TRANSMIT),
    "buffers": Case(Buffers, _rows("x"), _SPEC),
    "numbers": Case(Numbers, _rows("x", "rows"), _WIDE),
    "mixed": Case(Mixed, _rows("x", "mask"), _SPEC),
}


@cache
def captured(name: str) -> tuple[nn.Module, Pipe]:
    """The model and its pipe: captured once, copied by whoever runs it."""
    case = CASES[name]
    torch.manual_seed(11)
    model = case.make().double()
    batch = case.batch(2)
    return copy.deepcopy(model), pipeline(model, (), batch, **case.options)


def plan_for(name: str, num_microbatches: int) -> Plan:
    """A schedule for four stages: over four ranks, or over two with two each."""
    recipe = get_schedule(name)
    per_rank = recipe.stages_per_rank or 2
    return recipe(4 // per_rank, num_microbatches, stages_per_rank=per_rank)


@dataclass
class Left:
    """What the steps left on one rank."""

    losses: list[list[Tensor]]
    outputs: list[Any]
    state: dict[str, Tensor]
    grads: dict[str, Tensor | None]


def run_rank(plan: Plan, pipe: Pipe, batches: list[dict[str, Any]], *, group: Any, rank: int, **options: Any) -> Left:
    """Training steps, whose gradients add up, and an evaluation of the last batch."""
    modules = {k: pipe.get_stage_module(k) for k in plan.placement.stages_of(rank)}
    schedule = Schedule.from_plan(plan, [pipe.build_stage(k, "cpu", group=group) for k in modules], **options)
    left = Left([], [], {}, {})
    for batch in batches:
        left.losses.append([])
        left.outputs.append(schedule.step(**batch, losses=left.losses[-1]))
    left.losses.append([])
    left.outputs.append(schedule.eval(**batches[-1], losses=left.losses[-1]))
    for k, module in modules.items():
        left.grads |= {f"{k}.{n}": p.grad for n, p in module.named_parameters()}
        left.state |= {f"{k}.{n}": v for n, v in module.state_dict().items()}
    return left


def run_loop(name: str, batches: list[dict[str, Any]], num_microbatches: int) -> tuple[nn.Module, list[list[Tensor]]]:
    """The same in one process, with the model itself."""
    case = CASES[name]
    model = copy.deepcopy(captured(name)[0])
    losses = [_loop(case, model, batch, num_microbatches, train=True) for batch in batches]
    with torch.no_grad():
        losses.append(_loop(case, model, batches[-1], num_microbatches, train=False))
    return model, losses


def _loop(case: Case, model: nn.Module, batch: dict[str, Any], count: int, *, train: bool) -> list[Tensor]:
    pieces = {name: value.tensor_split(count) for name, value in batch.items()}
    found = []
    for m in range(count):
        part = {name: pieces[name][m] for name in batch}
        loss = case.loss(model(**part))
        found.append(loss.detach())
        if train:
            rows = [piece.shape[0] for piece in next(iter(pieces.values()))]
            (loss * (rows[m] / sum(rows))).backward()
    return found


def assert_equal(plan: Plan, ranks: list[Left], model: nn.Module, losses: list[list[Tensor]]) -> None:
    last = plan.placement.rank_of(plan.num_stages - 1)
    for got, want in zip(ranks[last].losses, losses, strict=True):
        torch.testing.assert_close(torch.stack(got), torch.stack(want), rtol=1e-12, atol=1e-14)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict()
    found = set()
    for left in ranks:
        for key, grad in left.grads.items():
            name = key.partition(".")[2]
            found.add(name)
            want_grad = parameters[name].grad
            if want_grad is None:
                assert grad is None, f"{key} has a gradient"
            else:
                assert grad is not None, f"{key} has no gradient"
                torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-13, msg=lambda m, k=key: f"{k}: {m}")
        for key, value in left.state.items():
            want = state[key.partition(".")[2]]
            torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-14, msg=lambda m, k=key: f"{k}: {m}")
    assert found | set(dict(model.named_buffers())) >= set(dict(model.named_parameters()))


def make_batches(name: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    torch.manual_seed(5)
    return [CASES[name].batch(rows) for rows in sizes]


def rank_of_threads(transport: Transport, plan: Plan, name: str, batches: list[dict[str, Any]], **options: Any) -> Left:
    return run_rank(plan, copy.deepcopy(captured(name)[1]), batches, group=transport, rank=transport.rank, **options)
