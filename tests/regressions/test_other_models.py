"""Stages of another model on one rank, where no `Pipeline` has seen the whole model: refused before the first step.

The story: `Pipeline` compared what it captured, but a `Schedule` over stages of `split_modules` or of `pipe.build_stage` took
a stage of a model with six layers beside one of a model with four, and trained something that was no model at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
import penstock.balance
import penstock.plan
import penstock.show
import penstock.simulate
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError, RanksDisagree, RunError, SplitError
from tests.front.models import batch, loss_fn, make


class Chain(nn.Module):
    """Layers in a row, which split_modules can cut."""

    def __init__(self, layers: int, *, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(layers))
        self.layers[-1] = nn.Sequential(nn.Linear(4, width, dtype=dtype), nn.Linear(width, 4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_modules(model: Chain, transport: LocalTransport) -> penstock.PipelineStage:
    names = [f"layers.{number}" for number in range(len(model.layers))]
    dtype = next(model.parameters()).dtype
    module = penstock.split_modules(model, names, 2, example=(torch.ones(2, 4, dtype=dtype),))[transport.rank]
    return penstock.PipelineStage(module, transport.rank, 2, "cpu", group=transport)


def by_capture(model: Chain, transport: LocalTransport) -> penstock.PipelineStage:
    point = {f"layers.{len(model.layers) // 2}": penstock.SplitPoint.BEGINNING}
    pipe = penstock.pipeline(model, (torch.randn(2, 4),), split_spec=point)
    stage: penstock.PipelineStage = pipe.build_stage(transport.rank, "cpu", transport)
    return stage


def said_by_each(make_stage: Callable[[int, LocalTransport], penstock.PipelineStage], **options: Any) -> list[str]:
    """What the first step of each rank raised."""

    def run(transport: LocalTransport) -> str:
        stage = make_stage(transport.rank, transport)
        schedule = penstock.Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss, **options)
        with pytest.raises(RanksDisagree) as caught:
            schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
        return str(caught.value)

    return LocalWorld(2).run(run)


@pytest.mark.parametrize("cut", [by_modules, by_capture])
@pytest.mark.parametrize("other", [{"layers": 6}, {"layers": 4, "width": 9}, {"layers": 4, "dtype": torch.float64}])
def test_stages_cut_from_another_model_are_refused(cut: Any, other: dict[str, Any]) -> None:
    for text in said_by_each(lambda rank, transport: cut(Chain(**({"layers": 4}, other)[rank]), transport)):
        assert "model" in text
        assert "parameters, " in text


@pytest.mark.parametrize("other", [nn.ReLU(), nn.Dropout(0.2)])
@pytest.mark.parametrize("cut", [by_modules, by_capture, None])
def test_the_same_parameters_under_other_operations_are_another_model(other: nn.Module, cut: Any) -> None:
    """Names, shapes and wires were the same: one rank trained with another activation, or another share of dropout."""

    def run(transport: LocalTransport) -> str:
        model = Chain(4)
        model.layers[3] = nn.Sequential(nn.Linear(4, 4), other if transport.rank else nn.Dropout(0.1), nn.Linear(4, 4))
        x, y = torch.randn(2, 4, 4)

        def begin() -> None:
            if cut is None:
                penstock.Pipeline(model, (x,), group=transport, profile=False)
            else:
                stage = cut(model, transport)
                penstock.Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss).step(x, target=y)

        with pytest.raises(RanksDisagree) as caught:
            begin()
        return str(caught.value)

    for text in LocalWorld(2).run(run):
        assert "wires" not in text
        assert "operators" in text or "parameters, " in text


@pytest.mark.parametrize("cut", [by_modules, by_capture])
def test_stages_of_one_model_are_accepted(cut: Any) -> None:
    def run(transport: LocalTransport) -> None:
        schedule = penstock.Schedule1F1B(cut(Chain(4), transport), 2, loss_fn=nn.functional.mse_loss)
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))

    LocalWorld(2).run(run)


def test_hand_made_stages_that_declare_what_they_take_and_give_must_fit() -> None:
    def made(rank: int, transport: LocalTransport) -> penstock.PipelineStage:
        shapes = {"output_args": torch.empty(2, 4)} if rank == 0 else {"input_args": (torch.empty(2, 5),)}
        return penstock.PipelineStage(nn.Linear(4, 4), rank, 2, "cpu", group=transport, **shapes)

    for text in said_by_each(made):
        assert "output_args of stage 0 say (float32[2, 4]), input_args of stage 1 say (float32[2, 5])" in text


def test_ties_that_differ_in_any_holder_are_refused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = self.b(self.a(x))
            return value

    def run(transport: LocalTransport) -> str:
        stage = penstock.PipelineStage(Two(), transport.rank, 2, "cpu", group=transport)
        tied = penstock.tie([(0, "a.weight"), (1, "a.weight" if transport.rank == 0 else "b.weight")])
        schedule = penstock.Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss, ties=[tied])
        with pytest.raises(RanksDisagree) as caught:
            schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
        return str(caught.value)

    for text in LocalWorld(2).run(run):
        assert "a.weight of stage 0 = a.weight of stage 1" in text
        assert "a.weight of stage 0 = b.weight of stage 1" in text


def test_a_profile_that_is_not_there_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said after the machine had been measured, as a RunError around FileNotFoundError."""
    monkeypatch.setattr("penstock.front.build.measure_machine", lambda ends: pytest.fail("something was measured"))

    def run(transport: LocalTransport) -> str:
        with pytest.raises(PenstockError) as caught:
            penstock.Pipeline(
                make(), (batch()[0],), group=transport, loss_fn=loss_fn, microbatches=4, profile=tmp_path / "none.json"
            )
        return str(caught.value)

    for text in LocalWorld(2).run(run):
        assert "none.json cannot be read: No such file or directory" in text


@pytest.mark.parametrize(("rows", "target_rows"), [(8, 3), (8, 12), (6, 4)])
def test_a_target_for_other_rows_is_refused_on_one_rank_too(rows: int, target_rows: int) -> None:
    """Ranks compared their rows with those of the rank before; the first one with nobody's."""
    pipe = penstock.Pipeline(
        nn.Linear(4, 4), (torch.randn(8, 4),), loss_fn=nn.functional.mse_loss, microbatches=2, profile=False
    )
    with pytest.raises(SplitError, match=f"{target_rows} rows of the target here, {rows} rows of the input"):
        pipe.step(torch.randn(rows, 4), target=torch.randn(target_rows, 4))
    pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))


def test_a_schedule_without_a_loss_refuses_a_target() -> None:
    """It ran forward only, and left no gradients and no word."""
    schedule = penstock.ScheduleGPipe(penstock.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu"), 2)
    with pytest.raises(RunError, match="with a target and without a loss"):
        schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))
    assert schedule.step(torch.randn(8, 4)).shape == (8, 4)


@pytest.mark.parametrize("read", [penstock.plan.load, penstock.simulate.load_costs, penstock.balance.Profile.load])
@pytest.mark.parametrize("name", ["none", "folder", "zero\0byte"])
def test_files_that_cannot_be_opened_are_errors_of_penstock(read: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(PenstockError, match=r"cannot be read|is no name of a file"):
        read(str(tmp_path / name))


@pytest.mark.parametrize("name", ["none/plan", "folder", "zero\0byte"])
def test_files_that_cannot_be_written_are_errors_of_penstock(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    plan = penstock.get_schedule("1f1b")(2, 4)
    costs, file = penstock.Costs.unit(plan), str(tmp_path / name)
    profile = penstock.balance.Profile((penstock.balance.LayerCost("layer"),))
    for write in (
        lambda: penstock.plan.dump(plan, file),
        lambda: penstock.simulate.dump_costs(costs, file),
        lambda: penstock.show.dump_trace(plan, file),
        lambda: profile.save(file),
    ):
        with pytest.raises(PenstockError, match=r"cannot be written|is no name of a file"):
            write()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("ties", value) for value in ("x", [None], (1, 2), {"a": None}, [[("0", "weight")]])),
        *((name, torch.ones(2)) for name in ("ties", "dynamic", "scale_grads", "offload_to")),
        *(("dynamic", value) for value in ("x", None, [1])),
        ("offload_to", "x" * 5000),
        ("n_microbatches", 10**30),
        ("device", "x"),
    ],
)
def test_options_of_a_schedule_that_are_wrong_are_named(option: str, value: Any) -> None:
    """They were errors of Python's, some of them in the first step."""
    given: dict[str, Any] = {"n_microbatches": 2, "loss_fn": loss_fn, "device": "cpu", option: value}
    x = torch.ones(4, 4)
    with pytest.raises(PenstockError, match=r"expected|device=|name another"):
        penstock.ScheduleGPipe(
            penstock.PipelineStage(nn.Linear(4, 4), 0, 1, given.pop("device")), given.pop("n_microbatches"), **given
        ).step(x, target=x)


@pytest.mark.parametrize("norm", [-1.0, float("nan"), "1"])
def test_a_norm_that_is_none_is_refused(norm: Any) -> None:
    """A negative one turned the gradients round."""
    pipe = penstock.Pipeline(nn.Linear(4, 4), (torch.randn(8, 4),), profile=False)
    with pytest.raises(RunError, match="expected a number from 0"):
        pipe.clip_grad_norm_(norm)
