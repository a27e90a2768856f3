"""`num_stages=N`: exactly N stages, none empty, no parameter lost, whatever the model; and the stages under schedules."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.capture import Pipe, SplitPoint, pipeline, split_modules
from penstock.comm.local import LocalTransport, LocalWorld
from penstock.errors import CaptureError, RanksDisagree
from penstock.run.schedule import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.capture import toys
from tests.models.models import MODELS


class Lopsided(nn.Module):
    """One heavy layer among light ones, a skip over all of them, tied ends and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.light = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.heavy = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for layer in self.light[:3]:
            x = torch.tanh(layer(x))
        x = self.heavy(x)
        for layer in self.light[3:]:
            x = torch.tanh(layer(x))
        return self.head(x + first)


def _assert_complete(pipe: Pipe, model: nn.Module, count: int) -> None:
    assert pipe.num_stages == count
    info = pipe.info()
    holders: dict[int, list[int]] = {}
    for k in range(count):
        stage = pipe.get_stage_module(k)
        assert any(node.op == "call_function" for node in stage.graph.nodes), f"stage {k} computes nothing"
        for parameter in stage.parameters():
            holders.setdefault(id(parameter), []).append(k)
    assert set(holders) == {id(parameter) for parameter in model.parameters()}
    shared = {tuple(k for k, _ in one.holders) for one in info.shared.values() if one.is_parameter}
    assert {tuple(stages) for stages in holders.values() if len(stages) > 1} == shared
    assert set(pipe.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_as_many_stages_as_asked_for(count: int) -> None:
    torch.manual_seed(0)
    model, ids = Lopsided(), torch.randint(0, 13, (2, 3))
    pipe = pipeline(model, (ids,), num_stages=count)
    _assert_complete(pipe, model, count)
    assert torch.equal(pipe(ids), model(ids))
    pipe.eval()
    assert torch.equal(pipe(ids), model.eval()(ids))


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_real_models(name: str) -> None:
    entry = next(entry for entry in MODELS if entry.name == name)
    torch.manual_seed(0)
    model, example = entry.make().eval(), entry.example()
    pipe = pipeline(model, (), example, num_stages=5, dynamic_shapes={})
    _assert_complete(pipe, model, 5)
    with torch.no_grad():
        assert torch.equal(pipe(**example).logits, model(**example).logits)


def test_more_than_there_are_places() -> None:
    with pytest.raises(CaptureError, match=r"50 stages were asked for, and the model has only \d+ places"):
        pipeline(Lopsided(), (torch.randint(0, 13, (2, 3)),), num_stages=50)


def test_ranks_that_cut_at_other_places_are_told() -> None:
    """Before anything is sent: each would otherwise train a model of its own."""
    x = torch.randn(4, 4)

    def rank(transport: LocalTransport) -> None:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        pipe = pipeline(model, (x[:2],), split_spec={str(1 + transport.rank): SplitPoint.BEGINNING})
        stage = pipe.build_stage(transport.rank, "cpu", group=transport)
        with pytest.raises(RanksDisagree, match="0>1 linear_1"):
            Schedule.from_plan(get_schedule("1f1b")(2, 2), stage, loss_fn=nn.functional.mse_loss).step(x, target=x)

    LocalWorld(2).run(rank)


# -- modules called in order, for models that cannot be traced


class Untraceable(nn.Module):
    """Branches on its data, inside a submodule; embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(Branch() for _ in range(4))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) if x.sum() > 0 else self.layer(x) * 2


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved1f1b", "zbv", "dualpipev", "zb-h1"])
def test_module_lists_under_schedules(schedule: str) -> None:
    """Each rank splits its own copy; what is tied stays tied although nobody says so again."""
    torch.manual_seed(0)
    model = Untraceable().double()
    with pytest.raises(CaptureError, match="split_modules"):
        pipeline(model, (torch.zeros(2, 3, dtype=torch.long),), num_stages=4)
    names = ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    recipe = get_schedule(schedule)
    per_rank = recipe.stages_per_rank or 2
    plan = recipe(4 // per_rank, 3, stages_per_rank=per_rank)
    ids, labels = torch.randint(0, 11, (2, 6, 3))

    def rank(transport: LocalTransport) -> dict[str, Tensor]:
        modules = split_modules(copy.deepcopy(model), names, 4, example=(ids,))
        own = plan.placement.stages_of(transport.rank)
        stages = [PipelineStage(modules[k], k, 4, "cpu", group=transport) for k in own]
        run = Schedule.from_plan(plan, stages, loss_fn=_entropy)
        for _ in range(2):
            run.step(ids, target=labels)
        return {n: p.grad for k in own for n, p in modules[k].named_parameters() if p.grad is not None}

    found = LocalWorld(plan.num_ranks).run(rank)
    for one, other in zip(ids.chunk(3), labels.chunk(3), strict=True):
        (2 * _entropy(model(one), other) / 3).backward()
    wanted: dict[str, Any] = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    assert {name for grads in found for name in grads} == set(wanted)
    for grads in found:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


# -- what a failure says


class Unrolled(nn.Module):
    """As many rounds as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max().item())):
            x = self.layer(x)
        return x


class Numpy(nn.Module):
    """Leaves torch in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = toys.Chain()

    def forward(self, x: Tensor) -> Tensor:
        y = self.chain(x)
        return y * torch.from_numpy(y.detach().numpy().copy())


class Far(nn.Module):
    """What cannot be traced stands deep inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4), inner]), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "line", "change"),
    [
        (
            Branch,
            "return torch.tanh(self.layer(x)) if x.sum() > 0 else self.layer(x) * 2",
            "torch.where(condition, a, b)",
        ),
        (Unrolled, "for _ in range(int(x.abs().max().item())):", "no .item(), int() or float() of a tensor"),
        (Numpy, "return y * torch.from_numpy(y.detach().numpy().copy())", "stay in torch: no .numpy()"),
    ],
)
def test_a_failure_shows_the_line_and_both_ways_out(make: type[nn.Module], line: str, change: str) -> None:
    with pytest.raises(CaptureError) as caught:
        pipeline(Far(make()), (torch.randn(2, 4),), num_stages=2)
    text = str(caught.value)
    assert "torch.export cannot trace Far" in text
    assert f"in layers.1 ({make.__name__})" in text
    assert "test_cuts.py" in text
    assert line in text
    assert "1. change that line: " in text
    assert change in text
    assert "2. build the stages from the model's modules, without a trace: penstock.split_modules(" in text
    assert '["embed", "layers.0", "layers.1", "head"]' in text
    assert caught.value.__cause__ is not None  # torch's own words, for who wants them


def test_what_can_be_said_before_tracing_is_said() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"0\.weight has no shape yet: .* run the model once"):
        pipeline(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), (x,), num_stages=2)
    held = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    held.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"Sequential cannot be deep-copied .*split_modules"):
        pipeline(held, (x,), num_stages=2)
