"""A stage is a module like others: run alone, saved, copied, moved, compiled, in either mode, with other sizes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from penstock.capture import Pipe, StageModule, pipe_split, pipeline
from penstock.capture.flat import checkpointed
from penstock.errors import CaptureError, ShapeError
from tests.capture import toys
from tests.capture.chain import assert_same


def _saved_and_loaded(value: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _pipe(model: nn.Module, x: torch.Tensor) -> Pipe:
    return pipeline(model, (x,))


def test_runs_alone_and_prints() -> None:
    model, x = toys.Chain(dropout=0), torch.randn(2, 4)
    pipe = _pipe(model, x)
    first, last = pipe.get_stage_module(0), pipe.get_stage_module(2)
    (hidden,) = first(x)
    assert torch.equal(hidden, torch.tanh(model.layers[0](x)))
    assert isinstance(last(hidden), torch.Tensor)
    assert torch.equal(first(x=x)[0], hidden)
    text = pipe.print_readable(print_output=False)
    assert "stage 1 of 3" in text
    assert "layers_1_weight" in text
    assert "Pipe of 3 stages\n  stage 0: 20 parameters" in str(pipe)
    assert "mark" not in str(first.graph)
    with pytest.raises(CaptureError, match=r"takes 1 inputs \(x\), 2 were given"):
        first(x, x)
    with pytest.raises(CaptureError, match="missing the input x"):
        first()
    with pytest.raises(CaptureError, match="there is no stage 3: this model has stages 0 to 2"):
        pipe.get_stage_module(3)


@pytest.mark.parametrize("model", [toys.Regions(), toys.Constants(), toys.Normed()], ids=lambda m: type(m).__name__)
def test_saved_loaded_and_copied_in_both_modes(model: nn.Module) -> None:
    x = torch.randn(6, 4)
    pipe = _pipe(model, x)
    for made in (_saved_and_loaded(pipe), copy.deepcopy(pipe)):
        assert isinstance(made, Pipe)
        reference = copy.deepcopy(model)
        for mode in (True, False):
            made.train(mode), reference.train(mode)
            torch.manual_seed(3)
            expected = reference(x)
            torch.manual_seed(3)
            assert_same(made(x), expected)
        assert made.state_dict().keys() == model.state_dict().keys()
        assert all(a is not b for a, b in zip(made.parameters(), model.parameters(), strict=True))
    stage = _saved_and_loaded(pipe.get_stage_module(1))
    assert isinstance(stage, StageModule)
    assert stage.inputs == pipe.get_stage_module(1).inputs


def test_moves_with_its_constants_and_devices() -> None:
    model, x = toys.Constants(), torch.randn(6, 4)
    pipe = _pipe(model, x).to(torch.float64)
    assert pipe(x.double()).dtype == torch.float64
    stage = pipe.get_stage_module(1).to("meta")
    assert stage(torch.empty(6, 4, dtype=torch.float64, device="meta")).device.type == "meta"
    assert "device(type='meta')" in stage.print_readable()


def test_compiles() -> None:
    model, x = toys.Skips(), torch.randn(6, 4)
    pipe = _pipe(model, x)
    compiled = torch.compile(pipe.get_stage_module(0), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), pipe.get_stage_module(0)(x))


class Branching(nn.Module):
    """Other numbers for few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x * 2 if x.shape[0] > 3 else x * 3
        pipe_split()
        return self.second(x)


def test_compiled_sizes_of_one_and_branches_on_sizes_are_right_or_refused() -> None:
    torch._dynamo.reset()
    model = Branching()
    pipe = _pipe(model, torch.randn(6, 4))
    stages = [torch.compile(pipe.get_stage_module(k), backend="aot_eager") for k in range(2)]
    for rows in (6, 8, 2, 1, 5, 3):
        x = torch.randn(rows, 4)
        (hidden,) = stages[0](x)
        torch.testing.assert_close(stages[1](hidden.detach().requires_grad_()), model(x))
    torch._dynamo.reset()
    strict = torch.compile(pipe.get_stage_module(0), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(strict(torch.ones(7, 4)), pipe.get_stage_module(0)(torch.ones(7, 4)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_unusual_key"):
        strict(torch.ones(2, 4))
    torch._dynamo.reset()


def test_compiles_with_regions() -> None:
    torch._dynamo.reset()
    model, x = toys.Regions().eval(), torch.randn(6, 4)
    pipe = _pipe(model, x)
    stages = [torch.compile(pipe.get_stage_module(k), backend="aot_eager") for k in range(3)]
    values: tuple[torch.Tensor, ...] = (x,)
    for stage in stages[:-1]:
        values = tuple(value.detach().requires_grad_() for value in stage(*values))
    torch.testing.assert_close(stages[2](*values), model(x))


def test_submodules_may_be_called_like_our_attributes() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.graph, self.run = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.graph(self.inputs(x))
            pipe_split()
            return self.run(x)

    model, x = Names(), torch.randn(2, 4)
    pipe = _pipe(model, x)
    for made in (pipe, copy.deepcopy(pipe), _saved_and_loaded(pipe)):
        assert torch.equal(made(x), model(x))
        assert made.state_dict().keys() == model.state_dict().keys()


def test_modes_do_what_they_do_on_the_model() -> None:
    model, x = toys.Chain(), torch.randn(64, 4)
    model.layers[1].eval()  # a mixed start
    pipe = _pipe(model, x)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    assert torch.equal(pipe(x), expected)
    pipe.eval()
    assert not pipe.get_stage_module(0).training
    assert torch.equal(pipe(x), pipe(x))
    pipe.get_stage_module(0).train()
    assert not torch.equal(pipe(x), pipe(x))


def test_a_mode_with_other_wires_is_refused() -> None:
    class Differs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            z = y.sin()
            pipe_split()
            return self.b(y) + z if self.training else self.b(y)

    pipe = _pipe(Differs(), torch.randn(2, 4))
    with pytest.raises(CaptureError, match=r"in eval mode stage 0 takes|in eval mode stage 1 takes"):
        pipe.eval()


def test_batch_norm_counts_each_microbatch() -> None:
    model, batch = toys.Normed(), torch.randn(12, 4)
    reference = copy.deepcopy(model)
    pipe = _pipe(model, batch[:4])
    for part in batch.split(4):
        assert torch.equal(pipe(part), reference(part))
    assert model.n.num_batches_tracked == 3
    assert torch.equal(model.m.running_var, reference.m.running_var)


def test_a_checkpoint_is_kept() -> None:
    model, x = toys.Regions(), torch.randn(6, 4)
    pipe = _pipe(model, x)
    nodes = [n for n in pipe.get_stage_module(2).graph.nodes if n.target is checkpointed]
    assert len(nodes) == 1


def test_other_sizes() -> None:
    model, x = toys.Constants(), torch.randn(6, 4)
    pipe = _pipe(model, x)
    loaded = _saved_and_loaded(pipe)
    for size in (1, 2, 9):
        other = torch.randn(size, 4)
        assert torch.equal(pipe(other), model(other))
    with pytest.raises(ShapeError, match=r"dimension 0 of x is 1, .* Run it once with that size before saving it"):
        loaded(x[:1])
    assert torch.equal(_saved_and_loaded(pipe)(x[:1]), model(x[:1]))
    with pytest.raises(ShapeError, match=r"dimension 1 of x is 5; the model was captured with 4 there"):
        pipe(torch.randn(6, 5))
    with pytest.raises(ShapeError, match=r"x has 3 dimensions \(6, 1, 4\); the model was captured with 2"):
        pipe(x[:, None])
    with pytest.raises(ShapeError, match=r"dimension 0 of x is 2; .* captured with 1 there.*an example of at least 2"):
        pipeline(model, (x[:1],))(x[:2])
    with pytest.raises(ShapeError, match="dimension 0 of x is 2"):
        pipeline(model, (x,), dynamic_shapes={})(x[:2])


class Branch(nn.Module):
    """Does with its rows what their number says."""

    def __init__(self, branch: Callable[[torch.Tensor, int], torch.Tensor], *, reduced: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.branch, self.reduced = branch, reduced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        x = self.a(x)
        x = x.mean(0) if self.reduced else x
        pipe_split()
        return self.b(self.branch(x, rows))


@pytest.mark.parametrize(
    "branch",
    [
        lambda x, rows: x * 2 if rows == 1 else x,
        lambda x, rows: x * 2 if rows > 3 else x * 3,
        lambda x, rows: x * 2 if rows % 2 == 0 else x.sin(),
        lambda x, rows: x + x[: rows // 2].sum(0) if rows // 2 > 1 else x,
        lambda x, rows: x * 2 if rows > 5 else x * 3 if rows > 2 else x * 4,
    ],
    ids=["one", "more than", "even", "half", "two branches"],
)
def test_sizes_that_a_branch_depends_on(branch: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Each is traced with the branch that it takes: what was right for six rows is not taken for three."""
    model, x = Branch(branch), torch.randn(9, 4)
    pipe = _pipe(model, x[:6])
    for mode in (True, False):
        pipe.train(mode), model.train(mode)
        for size in (6, 4, 3, 1, 9, 2, 5, 6):
            assert torch.equal(pipe(x[:size]), model(x[:size])), size
    assert torch.equal(_saved_and_loaded(pipe)(x[:3]), model(x[:3]))
    with pytest.raises(ShapeError, match=r"no such graph: it was saved without"):
        _saved_and_loaded(_pipe(Branch(lambda x, rows: x if rows > 3 else x * 2), x[:6]))(x[:3])


def test_a_mode_that_fixes_a_size() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            pipe_split()
            return self.b(x * 2 if not self.training and x.shape[0] == 6 else x)

    model, x = Strict(), torch.randn(9, 4)
    pipe = _pipe(model, x[:6])
    for mode in (True, False):
        pipe.train(mode), model.train(mode)
        for size in (6, 4, 9):
            assert torch.equal(pipe(x[:size]), model(x[:size])), (mode, size)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_stage_that_does_other_work_for_a_size_that_it_does_not_see(rows: int) -> None:
    pipe = _pipe(Branch(lambda x, rows: x * 2 if rows > 3 else x * 3, reduced=True), torch.randn(6, 4))
    pipe(torch.randn(5, 4))
    with pytest.raises(CaptureError, match=rf"with dimension 0 of x being {rows} stage 1 does other work"):
        pipe(torch.randn(rows, 4))


def test_dynamic_shapes() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            x = self.a(batch["x"])
            steps = x.shape[1]
            x = x.transpose(0, 1)
            pipe_split()
            return self.b(x.transpose(0, 1).view(-1, steps * 4).view(-1, steps, 4)) / steps

    auto = torch.export.Dim.AUTO
    model, x = Sequence(), torch.randn(2, 3, 4)
    pipe = pipeline(model, ({"x": x},), dynamic_shapes={"batch": {"x": {0: auto, 1: auto}}})
    other = torch.randn(5, 7, 4)
    assert torch.equal(pipe({"x": other}), model({"x": other}))
    wire = pipe.info().stage_inputs[1][0]
    assert not wire.contiguous
    stage = pipe.get_stage_module(1)
    (hidden,) = pipe.get_stage_module(0)(other)
    assert torch.equal(stage(hidden.contiguous()), model({"x": other}))  # as a transport delivers it
    with pytest.raises(CaptureError, match=r"dynamic_shapes names 'y'; the arguments are batch\.x"):
        pipeline(model, ({"x": x},), dynamic_shapes={"y": {0: auto}})
    with pytest.raises(CaptureError, match=r"names dimension 7"):
        pipeline(model, ({"x": x},), dynamic_shapes={"batch": {"x": {7: auto}}})


class Number(nn.Module):
    """The second stage sees the number of rows in no tensor."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0]
        x = self.dropout(self.a(x)).mean(0)
        pipe_split()
        x = self.dropout(self.b(x))
        match self.way:
            case "other constant":
                return x * size * (3 if size == 1 else 2)
            case "other size":
                return x * (size + 2 if size == 1 else size * 2)
            case "other operator":
                return x * size if size != 1 else x / size
        return x * (2 * size)


def test_a_number_that_no_tensor_shows_crosses_as_a_number() -> None:
    model = Number()
    pipe = _pipe(model, torch.randn(6, 4))
    assert {w.kind for w in pipe.info().stage_inputs[1]} == {"tensor", "number"}
    for rows in (9, 1):  # export takes a size of 1 for a constant: nothing is left to cross
        for mode in (True, False):
            x = torch.randn(rows, 4)
            pipe.train(mode), model.train(mode)
            torch.manual_seed(0)
            expected = model(x)
            torch.manual_seed(0)
            assert_same(pipe(x), expected)
    x = torch.randn(1, 4, requires_grad=True)
    pipe(x).sum().backward()
    (model(other := x.detach().requires_grad_()).sum()).backward()
    assert torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("way", ["other constant", "other size", "other operator"])
def test_a_number_that_is_1_and_changes_what_is_done_is_refused(way: str) -> None:
    pipe = _pipe(Number(way), torch.randn(6, 4))
    with pytest.raises(CaptureError, match=r"with dimension 0 of x being 1 stage 0 takes .* of that size instead"):
        pipe(torch.randn(1, 4))
