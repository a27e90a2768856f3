"""`num_stages=N` cuts by cost: measured where the model can be run, estimated where not, the same on every rank."""

from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock
from penstock.balance import LayerCost, Profile
from penstock.capture import Pipe, pipe_split, pipeline
from penstock.capture.cost_cuts import forget
from penstock.comm.local import LocalWorld
from penstock.errors import CaptureError
from tests.capture import toys
from tests.capture.chain import assert_same, assert_same_grads, forward_backward
from tests.gloo_pool import GlooPool


@torch.library.custom_op("penstock_tests::slow", mutates_args=())
def slow(x: Tensor, seconds: float) -> Tensor:
    """Takes long, which no shape shows."""
    time.sleep(seconds)
    return x * 2


slow.register_fake(lambda x, seconds: torch.empty_like(x))
slow.register_autograd(lambda ctx, grad: (grad * 2, None))


class Sleepy(nn.Module):
    """Six equal layers by their shapes; the first one is slow."""

    def __init__(self, seconds: float = 0.03) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(slow(x, self.seconds) if i == 0 else x)
        return x


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    forget()


def _held(pipe: Pipe) -> list[list[int]]:
    """The numbers of the layers that each stage holds."""
    stages = [pipe.get_stage_module(k) for k in range(pipe.num_stages)]
    return [sorted({int(name.split(".")[1]) for name in stage.state_dict()}) for stage in stages]


def test_what_is_measured_decides() -> None:
    x = torch.randn(3, 4)
    pipe = pipeline(Sleepy(), (x,), num_stages=2)
    assert _held(pipe) == [[0], [1, 2, 3, 4, 5]]
    info = pipe.info()
    assert info.cut_by == "costs measured on cpu, in seconds"
    assert info.cuts is not None
    assert info.cuts.stages[0].forward > 0.029
    assert "layers.1 .. layers.5" in str(info.cuts)
    assert f"cut by {info.cut_by}:\n{info.cuts}" in str(pipe)
    assert pickle.loads(pickle.dumps(info)).cuts == info.cuts
    assert copy.deepcopy(pipe).info() == info


@pytest.mark.parametrize("way", ["meta", "fake", "example"])
def test_without_values_the_work_is_estimated(way: str) -> None:
    x = torch.randn(3, 4)
    if way == "fake":
        with FakeTensorMode():
            model, x = Sleepy(), torch.randn(3, 4)
    else:
        with torch.device("meta" if way == "meta" else "cpu"):
            model = Sleepy()
        x = x.to("meta") if way == "example" else x
    pipe = pipeline(model, (x,), num_stages=2)
    assert _held(pipe) == [[0, 1, 2], [3, 4, 5]]
    assert pipe.info().cut_by == "costs estimated by the work in its graph (it has no values)"
    assert "layers.3 .. layers.5" in str(pipe.info().cuts)


class Halves(nn.Linear):
    """A layer that ends in a tuple, out of which its result is put together."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        first, second = super().forward(input).chunk(2, dim=-1)
        return torch.cat([second, first], dim=-1)


class Doubled(torch.autograd.Function):
    """In a graph the result of a function is a tuple of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Functional(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        return Doubled.apply(super().forward(input))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layer", [Halves, Functional])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tuple_is_not_cut_off_from_its_parts(layer: type[nn.Linear], device: str) -> None:
    """Taking a part out of a tuple was held for a piece of work: "stage 2 would be empty", whatever the model."""
    with torch.device(device):
        model = nn.Sequential(*(layer(4, 4) for _ in range(4)))
    pipe = pipeline(model, (torch.randn(3, 4, device=device),), num_stages=2)
    held = [{name.split(".")[0] for name in pipe.get_stage_module(k).state_dict()} for k in range(2)]
    assert set.union(*held) == set("0123")
    if device == "meta":
        assert held == [{"0", "1"}, {"2", "3"}]


class Written(nn.Module):
    """Layers that put their results together by writing to parts of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            made, result = layer(x), torch.zeros_like(x)
            result[:, :2] = made[:, 2:]
            result[:, 2:] = made[:, :2] * 2
            x = result
        return x


class Counting(Written):
    """The first two layers share a buffer that both write to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number < 2:
                self.seen += 1
        return x


class Mapped(Written):
    """A part of each layer is written for one row."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.vmap(lambda row: row.tanh() * row.sum())(layer(x))
        return x


class Bagged(Written):
    """The number of all tokens of a microbatch is the size of nothing that a stage is given."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 4, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        x = self.bag((x * 2).long().clamp(0, 7))
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("kind", [Written, Counting, Mapped, Bagged])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_cuts_by_cost_are_where_a_model_can_be_cut(kind: type[nn.Module], num_stages: int) -> None:
    """Every possible cut is tried at once, and one that cannot be made was everybody's error."""
    torch.manual_seed(0)
    model, x = kind(), torch.rand(4, 4)
    pipe = pipeline(copy.deepcopy(model), (x,), num_stages=num_stages if kind is not Counting else 2)
    got, expected = forward_backward(pipe, (x,), {}, Tensor.sum), model(x)
    expected.sum().backward()
    assert_same(got, expected)
    for number in range(pipe.num_stages):
        assert_same_grads(pipe.get_stage_module(number), model)


def test_a_mark_inside_a_mapped_function_is_refused() -> None:
    class Marked(Written):
        def forward(self, x: Tensor) -> Tensor:
            def row(one: Tensor) -> Tensor:
                one = one.tanh()
                pipe_split()
                return one * one.sum()

            return torch.vmap(row)(self.layers[0](x))

    with pytest.raises(CaptureError, match="inside a function that torch"):
        pipeline(Marked(), (torch.rand(4, 4),))


def test_an_example_that_cannot_be_run_is_enough_for_an_estimate() -> None:
    """Values did not matter before costs were measured; an embedding cannot look these up."""
    model = nn.Sequential(nn.Embedding(5, 4), *(nn.Linear(4, 4) for _ in range(3)))
    pipe = pipeline(model, (torch.full((2, 3), 99),), num_stages=2)
    assert pipe.num_stages == 2
    assert "it cannot be run with the example: index out of range" in pipe.info().cut_by


def test_measuring_leaves_everything_as_it_was() -> None:
    class Writes(toys.Normed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.dropout(x.mul_(2), 0.5, True))

    model, x = Writes(), torch.randn(6, 4)
    before, given = copy.deepcopy(model.state_dict()), x.clone()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    pipe = pipeline(model, (x,), num_stages=2)
    assert "measured" in pipe.info().cut_by
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, given)
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_second_capture_is_cut_like_the_first() -> None:
    """Two measurements never agree to the last digit; the answer to the first is kept."""
    model, x = Sleepy(0.0), torch.randn(3, 4)
    first = pipeline(model, (x,), num_stages=3)
    assert pipeline(copy.deepcopy(model), (x,), num_stages=3).info() == first.info()
    assert pipeline(Sleepy(0.001), (x,), num_stages=3).info().cuts != first.info().cuts, "another model"


def test_ranks_as_threads_get_the_same_cut() -> None:
    x = torch.randn(3, 4)
    one, other = LocalWorld(2).run(lambda _: pipeline(Sleepy(0.0), (x,), num_stages=2).info())
    assert one == other
    assert "measured" in one.cut_by


# -- processes


def cut_in_a_process(calls: int) -> list[Any]:
    """What this rank gets; it would not get the same costs twice, if it measured."""
    forget()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    found = []
    for call in range(calls if dist.get_rank() == 0 else 1):
        if call:
            forget()
        pipe = pipeline(model, (torch.randn(4, 16),), num_stages=2)
        found.append((pipe.info().cuts, pipe.info().cut_by))
    return found


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("calls", [1, 2])
def test_ranks_in_processes_get_the_same_cut(gloo_pool: GlooPool, calls: int) -> None:
    """Down to the last digit of the costs; and a rank that captures once more than the others waits for nobody."""
    one, other = gloo_pool.run(2, cut_in_a_process, calls)
    assert one[0] == other[0]
    assert one[0][1] == "costs measured on cpu, in seconds"
    assert len(one) == calls


def fail_in_a_process() -> str:
    with pytest.raises(CaptureError) as caught:
        pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),), num_stages=5)
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_ranks_in_processes_fail_alike(gloo_pool: GlooPool) -> None:
    texts = gloo_pool.run(2, fail_in_a_process)
    assert all("5 stages were asked for, and the model has only 1 places" in text for text in texts)


# -- costs that are given


def test_a_profile_says_the_costs(tmp_path: Path) -> None:
    model, x = Sleepy(), torch.randn(3, 4)
    measured = penstock.profile(model, (x,), repeats=3)
    measured.save(tmp_path / "costs.json")
    pipe = pipeline(model, (x,), num_stages=2, profile=tmp_path / "costs.json")
    assert _held(pipe) == [[0], [1, 2, 3, 4, 5]]
    assert pipe.info().cut_by == "costs measured on cpu, in seconds"

    by_name = Profile(tuple(LayerCost(f"layers.{i}", forward=5.0 if i == 5 else 1.0) for i in range(6)))
    pipe = pipeline(model, (x,), num_stages=2, profile=by_name)
    assert _held(pipe) == [[0, 1, 2, 3, 4], [5]]
    assert pipe.info().cut_by == "costs as given"
    assert torch.equal(pipe(x), model(x))

    with pytest.raises(CaptureError, match="num_stages= is missing"):
        pipeline(model, (x,), profile=measured)
    with pytest.raises(CaptureError, match=r"the one that was measured has .*: they differ"):
        pipeline(toys.Chain(), (x,), num_stages=2, profile=measured)


def test_a_captured_model_is_measured_stage_by_stage() -> None:
    model, x = toys.Chain(), torch.randn(6, 4)
    profile = penstock.profile(pipeline(model, (x,)), (x,), repeats=1)
    assert [layer.name for layer in profile.layers] == ["layers.0", "layers.1", "layers.2"]
    assert [layer.parameter_bytes for layer in profile.layers] == [80, 80, 80]
