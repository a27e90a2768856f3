"""``pipeline``: the stages together are the model; the model stays as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from penstock.balance import LayerCost, Profile
from penstock.capture import (
    MultiUseParameterConfig,
    PipeSequential,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    pipe_split,
    pipeline,
)
from penstock.capture.pipe import StageRoutes
from penstock.errors import CaptureError
from tests.capture import toys
from tests.capture.chain import assert_same, assert_same_grads, forward_backward


def _total(output: Any) -> torch.Tensor:
    value = output.value if isinstance(output, toys.Answer) else output
    return value.square().sum()


CASES: list[tuple[Callable[[], nn.Module], tuple[Any, ...], int]] = [
    (toys.Chain, (torch.randn(6, 4),), 3),
    (toys.Skips, (torch.randn(6, 4),), 4),
    (toys.Arguments, (torch.randn(6, 4), torch.randn(6, 4)), 2),
    (toys.Tied, (torch.randint(0, 11, (6, 3)),), 3),
    (toys.Structured, ({"x": torch.randn(6, 4)}, (torch.randn(6, 4), 3)), 2),
    (toys.Normed, (torch.randn(6, 4),), 2),
    (toys.Regions, (torch.randn(6, 4),), 3),
    (toys.InPlace, (torch.randn(6, 4),), 3),
    (toys.Constants, (torch.randn(6, 4),), 2),
]


@pytest.mark.parametrize(("make", "args", "count"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_stages_are_the_model(make: Callable[[], nn.Module], args: tuple[Any, ...], count: int) -> None:
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    before = torch.get_rng_state()
    pipe = pipeline(model, args)
    assert torch.equal(torch.get_rng_state(), before)
    assert pipe.num_stages == count

    torch.manual_seed(1)
    expected = reference(*args)
    torch.manual_seed(1)
    assert_same(forward_backward(pipe, args, {}, _total), expected)
    _total(expected).backward()
    assert_same_grads(model, reference)
    for (name, one), (_, other) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(one, other), name

    model.eval(), reference.eval(), pipe.eval()
    assert_same(pipe(*args), reference(*args))


@pytest.mark.parametrize(
    ("make", "shape", "cut"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), (2, 3, 8, 8), "2"),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4),
            (3, 5, 8),
            "layers.2",
        ),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8, 2, batch_first=True)), (3, 5, 8), "1"),
    ],
    ids=["in place after the cut", "encoder", "lstm"],
)
def test_modules_of_torch(make: Callable[[], nn.Module], shape: tuple[int, ...], cut: str) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (x,), split_spec={cut: SplitPoint.BEGINNING})
    for mode in (True, False):
        pipe.train(mode), reference.train(mode)
        torch.manual_seed(1)
        expected = reference(x)
        torch.manual_seed(1)
        assert_same(forward_backward(pipe, (x,), {}, lambda out: _total(out[0])), expected)
        _total(expected[0]).backward()
        assert_same_grads(model, reference)


def test_the_model_is_left_alone() -> None:
    model = toys.Chain()
    model.layers[1].eval()
    model.layers[0].weight.requires_grad_(False)
    forward, attributes = model.forward, dict(vars(model.layers[0]))
    parameters = dict(model.named_parameters())
    for _ in range(2):
        pipe = pipeline(model, (torch.randn(2, 4),), split_spec={})
    assert model.forward == forward
    assert vars(model.layers[0]) == attributes
    assert model.training
    assert not model.layers[1].training
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert pipe.get_stage_module(1).get_parameter("layers.1.weight") is model.layers[1].weight
    assert all(value.grad is None for value in model.parameters())


def test_arguments_bind_by_name_and_by_position() -> None:
    model = toys.Arguments()
    x, y, late = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    pipe = pipeline(model, (x, y), {"late": late, "scale": 2.0})
    expected = model(x, y, late=late, scale=2.0)
    assert torch.equal(pipe(x, y, late=late, scale=2.0), expected)
    assert torch.equal(pipe(y=y, scale=2.0, late=late, x=x), expected)
    assert torch.equal(pipe(x, late=late, y=y, scale=2.0), expected)
    other = pipeline(model, (), {"y": y, "x": x, "late": late, "scale": 2.0})
    assert torch.equal(other(x, y, late=late, scale=2.0), expected)
    assert [w.name for w in other.get_stage_module(0).inputs] == ["x", "y"]
    assert [w.name for w in pipe.info().stage_inputs[1] if w.source is None] == ["late"]


def test_arguments_that_cannot_fit_are_refused() -> None:
    x = torch.randn(3, 4)
    pipe = pipeline(toys.Arguments(), (x, x), {"scale": 2.0})
    with pytest.raises(CaptureError, match=r"scale was 2\.0 when the model was captured, and is 3.0 now"):
        pipe(x, x, scale=3.0)
    with pytest.raises(CaptureError, match="argument 'y' is missing"):
        pipe(x, scale=2.0)
    with pytest.raises(CaptureError, match="'late' was not given when the model was captured"):
        pipe(x, x, scale=2.0, late=x)
    with pytest.raises(CaptureError, match="multiple values for argument"):
        pipe(x, x, x=x, scale=2.0)
    with pytest.raises(CaptureError, match="; the model takes"):
        pipe(x, x, other=x, scale=2.0)
    with pytest.raises(CaptureError, match="do not fit forward"):
        pipeline(toys.Arguments(), (x,))


def test_a_rank_gives_only_what_its_stages_read() -> None:
    x = torch.randn(3, 4)
    y, late = x + 1, x + 2
    pipe = pipeline(toys.Arguments(), (x, x), {"late": x})
    first, second = StageRoutes.of(pipe.info(), 0), StageRoutes.of(pipe.info(), 1)
    assert [value for value in second.bind([()], [{"late": late}], 1)[0] if value is not None] == [late]
    assert list(first.bind([(x, y)], [{}], 1)[0]) == [x, y]
    with pytest.raises(CaptureError, match=r"stage 1 reads late, and this rank's call does not give it"):
        second.bind([(x, y)], [{}], 1)


def test_a_value_crosses_each_pair_of_stages_once() -> None:
    pipe = pipeline(toys.Skips(), (torch.randn(3, 4),))
    assert pipe.info().edges == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    first = pipe.info().stage_outputs[0]
    assert [w.stages for w in first] == [(1, 2, 3)]


def test_split_points_by_name() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Plain(), torch.randn(2, 4)
    begin = pipeline(model, (x,), split_spec={"layers.1": SplitPoint.BEGINNING, "layers.3": SplitPoint.BEGINNING})
    end = pipeline(model, (x,), split_spec={"layers.0": SplitPoint.END, "layers.2": SplitPoint.END})
    for pipe in (begin, end):
        held = [sorted({n.split(".")[1] for n in pipe.get_stage_module(k).state_dict()}) for k in range(3)]
        assert held == [["0"], ["1", "2"], ["3"]]
    annotate_split_points(model, {"layers.2": SplitPoint.BEGINNING})
    assert pipeline(model, (x,)).num_stages == 2
    assert pipeline(copy.deepcopy(model), (x,)).num_stages == 1

    with pytest.raises(CaptureError, match=r"stage 1 would be empty: .* between the end of layers\.0 and"):
        pipeline(Plain(), (x,), split_spec={"layers.0": SplitPoint.END, "layers.1": SplitPoint.BEGINNING})
    with pytest.raises(CaptureError, match=r"nothing is computed before the beginning of layers\.0"):
        pipeline(Plain(), (x,), split_spec={"layers.0": SplitPoint.BEGINNING})
    with pytest.raises(CaptureError, match=r"nothing is computed after the end of layers\.3"):
        pipeline(Plain(), (x,), split_spec={"layers.3": SplitPoint.END})
    with pytest.raises(CaptureError, match=r"no submodule 'layer.1'; .* 'layers.0'"):
        pipeline(Plain(), (x,), split_spec={"layer.1": SplitPoint.END})
    with pytest.raises(CaptureError, match=r"never calls it .* layers.0, layers.1"):
        pipeline(Plain(), (x,), split_spec={"layers": SplitPoint.END})


def test_number_of_stages_and_policy() -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), torch.randn(2, 4)
    even = Profile(tuple(LayerCost(str(i), forward=1.0) for i in range(6)))
    pipe = pipeline(model, (x,), num_stages=3, profile=even)
    assert [len(pipe.get_stage_module(k).state_dict()) for k in range(3)] == [4, 4, 4]
    assert torch.equal(pipe(x), model(x))
    with pytest.raises(CaptureError, match="9 stages were asked for, and the model has only 5 places"):
        pipeline(model, (x,), num_stages=9)

    def before_the_fourth(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
        linears = [n for n in traced.graph.nodes if "linear" in str(n.target)]
        with traced.graph.inserting_before(linears[3]):
            traced.graph.call_function(pipe_split)
        return traced

    pipe = pipeline(model, (x,), split_policy=before_the_fourth)
    assert [len(pipe.get_stage_module(k).state_dict()) for k in range(2)] == [6, 6]
    assert torch.equal(pipe(x), model(x))
    named = pipeline(model, (x,), split_policy=lambda traced: ["linear_2"])
    assert [len(named.get_stage_module(k).state_dict()) for k in range(2)] == [4, 8]
    chosen = pipeline(model, (x,), num_stages=2, choose_cuts=lambda flat, count: [count])
    assert [len(chosen.get_stage_module(k).state_dict()) for k in range(2)] == [4, 8]


class Scores(NamedTuple):
    """A named tuple inside other containers."""

    best: torch.Tensor
    rest: list[Any]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: (x, {"y": y}, [None, 3]),
        lambda x, y: Scores(x, [y, "text"]),
        lambda x, y: OrderedDict(a=x, b=Scores(y, [])),
        lambda x, y: BaseModelOutput(last_hidden_state=x, hidden_states=(y, x)),
        lambda x, y: toys.Answer(x, {"deep": Scores(y, [x])}, nothing=toys.Answer(y, {})),
        lambda x, y: None,
    ],
    ids=["tuple", "namedtuple", "ordered dict", "model output", "dataclass", "nothing"],
)
def test_what_comes_out_is_what_the_model_returns(wrap: Callable[..., Any]) -> None:
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            first = self.a(x)
            pipe_split()
            return wrap(self.b(first), first)

    model, x = Wraps(), torch.randn(2, 4)
    assert_same(pipeline(model, (x,))(x), model(x))


def test_sequential() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 4)
    marked = PipeSequential.from_sequential(model)
    assert torch.equal(marked(x), model(x))
    pipe = pipeline(marked, (x,))
    assert pipe.num_stages == 3
    assert torch.equal(pipe(x), model(x))


@pytest.mark.parametrize("way", MultiUseParameterConfig)
def test_tied_weights_stay_one(way: MultiUseParameterConfig) -> None:
    torch.manual_seed(0)
    model, ids = toys.Tied(), torch.randint(0, 11, (5, 3))
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (ids,), multi_use_param_spec=way)
    loss = nn.CrossEntropyLoss()
    ones, others = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, reference))
    for _ in range(10):
        for optimizer in (ones, others):
            optimizer.zero_grad()
        forward_backward(pipe, (ids,), {}, lambda out: loss(out.flatten(0, 1), ids.flatten()))
        loss(reference(ids).flatten(0, 1), ids.flatten()).backward()
        assert_same_grads(model, reference)
        ones.step(), others.step()
    assert torch.equal(model.embed.weight, reference.embed.weight)
    first, last = pipe.get_stage_module(0), pipe.get_stage_module(2)
    if way is MultiUseParameterConfig.REPLICATE:
        (shared,) = pipe.info().shared.values()
        assert shared.holders == ((0, "embed.weight"), (2, "head.weight"))
        assert last.get_parameter("head.weight") is first.get_parameter("embed.weight")
        alone = copy.deepcopy(last)
        assert alone.get_parameter("head.weight") is not last.get_parameter("head.weight")
    else:
        assert not pipe.info().shared
        assert "head.weight" not in dict(last.named_parameters())
        assert [w.name for w in last.inputs] == ["embed.weight", "linear"]


def test_every_parameter_lands_in_a_stage() -> None:
    model = toys.Tied()
    pipe = pipeline(model, (torch.randint(0, 11, (5, 3)),))
    held = [name for k in range(3) for name in pipe.get_stage_module(k).state_dict()]
    assert sorted(held) == sorted(model.state_dict())


def test_a_loss_inside_the_model() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    pipe = pipeline(TrivialLossWrapper(toys.Chain(dropout=0), nn.MSELoss()), (x, y))
    assert pipe.info().loss_index == 0
    assert pipe.info().stage_inputs[2][0].name == "targets"
    assert pipe.info().loss_of(pipe(x, y)).shape == ()
    plain = pipeline(toys.Chain(), (x,)).info()
    assert not plain.has_loss
    with pytest.raises(CaptureError, match="output_loss_value_spec"):
        plain.loss_of(x)
    with pytest.raises(CaptureError, match="marks 0 of the model's outputs"):
        pipeline(toys.Structured(), ({"x": x}, (x, 3)), output_loss_value_spec={"loss": True})
    with pytest.raises(CaptureError, match="output_loss_value_spec is a Tensor; expected"):
        pipeline(toys.Chain(), (x,), output_loss_value_spec=x)
    named = pipeline(toys.Structured(), ({"x": x}, (x, 3)), output_loss_value_spec={"value": True}).info()
    assert named.output_paths[named.loss_index or 0] == "value"


def test_failures_name_the_line_and_the_ways_out() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return self.layer(x)
            return x

    with pytest.raises(CaptureError) as caught:
        pipeline(Branches(), (torch.randn(2, 4),))
    text = str(caught.value)
    assert "test_pipeline.py" in text
    assert "if x.sum() > 0:" in text
    assert "torch.where" in text
    assert "split_modules" in text


def test_a_buffer_written_by_two_stages_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.twice = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            x = self.a(x)
            pipe_split()
            if self.twice:
                self.count.add_(1)
            return self.b(x) * self.count

    model, x = Counter(), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"buffer count is written by stages \[0, 1\]"):
        pipeline(model, (x,))
    model.twice = False
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (x,))
    for _ in range(3):  # one writer: later stages get its value as a wire
        assert torch.equal(pipe(x), reference(x))
    assert model.count == 3


class MoreInTraining(nn.Module):
    """Cuts off some columns by itself, in training also before its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x[:, :4] * 1.0
        return self.last(self.first(x)[:, 1:])


@pytest.mark.parametrize("training", [True, False])
def test_a_cut_is_found_in_another_mode_that_has_more_or_fewer_of_its_operators(training: bool) -> None:
    def before_the_last_slice(flat: Any, _: int) -> list[int]:
        return [max(place for place, node in enumerate(flat.nodes) if "slice" in str(node.target))]

    model = MoreInTraining().train(training)
    x = torch.randn(3, 4)
    pipe = pipeline(model, (x,), num_stages=2, choose_cuts=before_the_last_slice)
    stages = [pipe.get_stage_module(k) for k in range(2)]
    for mode in (training, not training):
        for stage in stages:
            stage.train(mode)
        torch.testing.assert_close(stages[1](*stages[0](x)), model.train(mode)(x))


class NoiseInTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize("training", [True, False])
def test_a_cut_after_a_module_that_works_in_one_mode_only_stays_where_it_is(training: bool) -> None:
    """It moved behind the next layer, of which the first stage then lacked the weights."""
    model = nn.Sequential(nn.Linear(4, 4), NoiseInTraining(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(3, 4)

    def before_the_second_layer(flat: Any, _: int) -> list[int]:
        return [place for place, node in enumerate(flat.nodes) if "linear" in str(node.target)][1:2]

    pipe = pipeline(model.train(training), (x,), num_stages=2, choose_cuts=before_the_second_layer)
    stages = [pipe.get_stage_module(k).train(not training) for k in range(2)]
    torch.manual_seed(0)
    hidden = stages[0](x)
    found = stages[1](*hidden) if isinstance(hidden, tuple) else stages[1](hidden)
    torch.manual_seed(0)
    torch.testing.assert_close(found, model.train(not training)(x))
