"""Checkpoints: written by any number of ranks and stages, read by any other, and by the plain model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError
from penstock.front import checkpoint
from tests.front.models import batch, loss_fn, make, train_plainly


def pipeline(transport: LocalTransport | None, *, tied: bool = False, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        make(tied=tied), (batch()[0],), group=transport, loss_fn=loss_fn, microbatches=4, profile=False, **options
    )


def steps(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, numbers: range) -> list[float | None]:
    losses = []
    for number in numbers:
        tokens, labels = batch(number)
        losses.append(pipe.step(tokens, target=labels).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def write(transport: LocalTransport | None, folder: Path, *, tied: bool, **options: Any) -> None:
    pipe = pipeline(transport, tied=tied, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    steps(pipe, optimizer, range(2))
    pipe.save(folder, optimizer=optimizer, extra={"epoch": 2})


def go_on(transport: LocalTransport | None, folder: Path, *, tied: bool, **options: Any) -> Any:
    pipe = pipeline(transport, tied=tied, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=123.0)
    extra = pipe.load(folder, optimizer=optimizer)
    assert extra == {"epoch": 2}
    assert optimizer.param_groups[0]["lr"] == 0.01
    return steps(pipe, optimizer, range(2, 4))


def test_written_with_four_stages_on_two_ranks_and_read_by_all_others(tmp_path: Path) -> None:
    tied = True
    model = make(tied=tied)
    expected = [loss for loss, _ in train_plainly(model, 4)]
    after_two = make(tied=tied)
    train_plainly(after_two, 2)
    place = tmp_path / "checkpoint"
    LocalWorld(2).run(write, place, tied=tied, schedule="zbv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"], "nothing half-written is left"

    loaded = penstock.load(place)
    plain = make(tied=tied)
    plain.load_state_dict(loaded.model)
    for name, value in after_two.state_dict().items():
        torch.testing.assert_close(plain.state_dict()[name], value)
    assert loaded.extra["epoch"] == 2
    assert loaded.optimizer["blocks.0.up.weight"]["exp_avg"].shape == model.blocks[0].up.weight.shape

    for ranks, options in ((1, {"schedule": "1f1b"}), (3, {"schedule": "1f1b"}), (2, {"schedule": "interleaved1f1b"})):
        for losses in LocalWorld(ranks).run(go_on, place, tied=tied, **options):
            assert losses == pytest.approx(expected[2:])


def test_the_plain_model_reads_it_without_penstock(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    LocalWorld(2).run(write, place, tied=False, schedule="1f1b")
    expected, model = make(), make()
    train_plainly(expected, 2)
    state = {"model": model.state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=place)
    model.load_state_dict(state["model"])
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_a_crash_while_saving_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "checkpoint"
    pipe = pipeline(None, schedule="1f1b")
    pipe.save(place, extra={"number": 1})
    first = {name: value.clone() for name, value in penstock.load(place).model.items()}
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.add_(1.0)

    class Crash(BaseException):
        """As sudden as a kill."""

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    monkeypatch.setattr(checkpoint, "_write_facts", crash)
    with pytest.raises(Crash):
        pipe.save(place, extra={"number": 2})
    monkeypatch.undo()
    again = penstock.load(place)
    assert again.extra["number"] == 1
    assert all(torch.equal(again.model[name], value) for name, value in first.items())

    real = Path.rename

    def rename_once(self: Path, target: Path) -> Path:
        if self.name.endswith(".saving"):
            raise Crash
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename_once)
    with pytest.raises(Crash):
        pipe.save(place, extra={"number": 3})
    monkeypatch.undo()
    assert not place.exists(), "between the two renames"
    assert penstock.load(place).extra["number"] == 1

    pipe.save(place, extra={"number": 4})
    assert penstock.load(place).extra["number"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="is no checkpoint"):
        penstock.load(tmp_path)
    place = tmp_path / "checkpoint"
    pipeline(None, schedule="1f1b").save(place)
    facts = json.loads((place / checkpoint.FACTS).read_text())
    (place / checkpoint.FACTS).write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(PenstockError, match="format 99"):
        penstock.load(place)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    pipeline(None, schedule="1f1b").save(place)
    tokens, labels = batch()
    larger = penstock.Pipeline(
        make(layers=6), (tokens,), loss_fn=loss_fn, microbatches=4, profile=False, schedule="1f1b"
    )
    with pytest.raises(PenstockError, match=r"blocks\.4\.down\.bias"):
        larger.load(place)
    with pytest.raises(PenstockError, match=r"blocks\.4\.down\.bias"):
        larger.load_state_dict(make().state_dict())
    assert labels.shape == tokens.shape


def test_state_dicts_in_memory() -> None:
    def run(transport: LocalTransport) -> Any:
        pipe = pipeline(transport, tied=True, schedule="1f1b")
        other = make(tied=True)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2.0)
        pipe.load_state_dict(other.state_dict())
        return [torch.equal(value, other.state_dict()[name]) for name, value in pipe.state_dict().items()]

    assert all(all(row) for row in LocalWorld(2).run(run))
