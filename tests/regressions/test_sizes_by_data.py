"""Captured models with sizes that depend on data, or that their code fixes; each test tells what happened before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capture import cost_cuts
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import ShapeError
from tests.run.pipes import close, loop_grads

WIDTH = 8


class Experts(nn.Module):
    """Each row goes to the experts that a router chooses: as many rows for each as the data say."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            if self.how == "where":
                rows, place = torch.where(chosen == number)
            else:
                rows, place = (chosen == number).nonzero().unbind(1)
            made = made.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return x + made.reshape(x.shape)


def experts(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Experts(how) for _ in range(4)), nn.Linear(WIDTH, WIDTH)).double()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize(("how", "profile"), [("where", False), ("nonzero", None)], ids=["estimated", "measured"])
def test_experts_routed_by_where_or_nonzero(how: str, profile: bool | None, schedule: str) -> None:
    """A size that depends on data is unknown with an example: estimating the work failed with `TypeError: unsupported operand
    type(s) for *: 'int' and 'NoneType'`, also with profile=False."""
    model = experts(how)
    x, y = (torch.randn(8, 3, WIDTH, dtype=torch.float64) for _ in range(2))
    want = loop_grads([model], x, y, 4)

    def run(transport: LocalTransport) -> dict[str, Tensor | None]:
        pipe = penstock.Pipeline(
            model, (x[:2],), loss_fn=nn.functional.mse_loss, schedule=schedule, microbatches=4, group=transport,
            profile=profile,
        )  # fmt: skip
        pipe.step(x, target=y)
        pipe.step(x * 2, target=y)  # other sizes than those of the first step
        pipe.evaluate(x, target=y)
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(x, target=y)
        return {name: p.grad for name, p in pipe.named_parameters()}

    first, last = LocalWorld(2).run(run)
    found = first | last
    assert close([grad for name, _ in model.named_parameters() if (grad := found[name]) is not None], want)


def test_experts_count_in_an_estimate_and_are_not_cut_where_a_size_changes() -> None:
    """Were an unknown size taken for nothing, all that lies in experts would look free; a cut between an expert's rows and the
    expert would send another size in each step, which a schedule refuses."""
    with torch.device("meta"):
        model = experts("where")
    pipe = penstock.pipeline(model, (torch.empty(6, WIDTH, dtype=torch.float64),), num_stages=4)
    info = pipe.info()
    assert "estimated" in info.cut_by
    assert info.cuts is not None
    costs = [stage.cost for stage in info.cuts.stages]
    assert max(costs) < 2 * min(costs), costs
    crossing = [size for wires in info.stage_outputs for wire in wires for size in wire.shape]
    assert not [size for size in crossing if str(size).startswith("u")], crossing
    cost_cuts.forget()


class RowByRow(nn.Module):
    """Goes through its rows in Python, as LLaVA does through images: every number of rows is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(torch.stack([self.first(row) for row in x])))
        return made


@pytest.mark.parametrize("profile", [False, None], ids=["estimated", "measured"])
def test_a_model_that_fixes_its_rows_is_captured_with_a_microbatch(profile: bool | None) -> None:
    """The example was a whole batch, and the model was captured for its number of rows alone: `dimension 0 of x is 2; the model
    was captured with 8 there`, with the advice to give dynamic_shapes that had been given."""
    torch.manual_seed(0)
    model = RowByRow().double()
    x, y = (torch.randn(8, WIDTH, dtype=torch.float64) for _ in range(2))
    want = loop_grads([model], x, y, 4)

    def run(transport: LocalTransport) -> dict[str, Tensor | None]:
        pipe = penstock.Pipeline(
            model, (x,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, group=transport,
            profile=profile, dynamic_shapes={"x": {0: torch.export.Dim.AUTO}},
        )  # fmt: skip
        pipe.step(x, target=y)
        return {name: p.grad for name, p in pipe.named_parameters()}

    first, last = LocalWorld(2).run(run)
    found = first | last
    assert close([grad for name, _ in model.named_parameters() if (grad := found[name]) is not None], want)


def test_advice_for_a_fixed_size_helps() -> None:
    """It named dynamic_shapes also where these had been given, or cannot help since the model's code fixes the size."""
    fixed = penstock.pipeline(RowByRow(), (torch.zeros(4, WIDTH),), num_stages=1)
    with pytest.raises(ShapeError, match="Capture with an example that has this size"):
        fixed(torch.zeros(2, WIDTH))
    one = penstock.pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH)), (torch.zeros(1, WIDTH),), num_stages=1)
    with pytest.raises(ShapeError, match=r"at least 2 to keep the batch size open\). Capture with an example"):
        one(torch.zeros(2, WIDTH))
    wide = penstock.pipeline(nn.Sequential(nn.Tanh()), (torch.zeros(4, WIDTH),), num_stages=1)
    with pytest.raises(ShapeError, match=r"Capture with dynamic_shapes=\{'input': \{1: torch.export.Dim.AUTO\}\}"):
        wide(torch.zeros(4, WIDTH + 1))
    opened = penstock.pipeline(
        nn.Sequential(nn.Tanh()), (torch.zeros(4, WIDTH),), num_stages=1,
        dynamic_shapes={"input": {1: torch.export.Dim.AUTO}},
    )  # fmt: skip
    assert opened(torch.zeros(4, WIDTH + 1)).shape == (4, WIDTH + 1)
