"""Events of a run, and each logger read back with its own library."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PenstockError
from penstock.train.events import EventLog, Noted, RankFigures, StepEvent
from penstock.train.loggers import check_logger, open_logger

X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
RANKS = (RankFigures(0.5, busy=0.3, span=0.4, memory=1000), RankFigures(0.4, busy=0.4, span=0.4, memory=3000))


def events(count: int) -> list[StepEvent]:
    first = StepEvent.of(0, Noted(2.0, 1.5, tokens=100, rate=0.1), RANKS)
    return [replace(first, step=step, loss=2.0 - step / 8) for step in range(count)]


def written(name: str, folder: Path) -> None:
    logger = open_logger(name, folder)
    for event in events(3):
        logger.step(event)
    logger.validation(2, 1.25)
    logger.close()


class Collected:
    def __init__(self) -> None:
        self.events: list[StepEvent] = []

    def step(self, event: StepEvent) -> None:
        self.events.append(event)

    def validation(self, step: int, loss: float) -> None:
        self.events.append(replace(self.events[-1], step=step, loss=loss))

    def close(self) -> None:
        """Nothing is held back."""


def test_a_step_is_that_of_all_ranks() -> None:
    def train(transport: Any) -> tuple[list[float | None], list[StepEvent]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = penstock.Pipeline(
            model, (X,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, profile=False, group=transport
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.25)
        kept, losses = Collected(), []
        with EventLog(pipe, kept) as log:
            for step in range(3):
                with log.step(step, optimizer=optimizer, tokens=8) as event:
                    event.loss = pipe.step(X, target=Y).loss
                    event.norm = pipe.clip_grad_norm_(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(event.loss)
            log.validation(3, 0.5)
        return losses, kept.events

    (losses, found), (_, others) = penstock.LocalWorld(2).run(train)
    assert others == []
    assert [event.loss for event in found] == [*losses, 0.5]
    for event in found[:3]:
        assert len(event.ranks) == 2
        assert event.seconds == max(rank.seconds for rank in event.ranks)
        assert event.memory == max(rank.memory for rank in event.ranks) > 1_000_000
        assert event.rate == 0.25
        assert event.norm is not None
        assert event.norm > 0
        assert 0 <= event.bubble < 1
        assert all(0 < rank.busy <= rank.span <= rank.seconds for rank in event.ranks)


def test_a_loop_needs_one_line_for_its_log(tmp_path: Path) -> None:
    """Two batches for each step of the optimizer; one batch fails, and nothing is written of its step."""

    def train(transport: Any) -> list[tuple[float, float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = penstock.Pipeline(
            model, (X,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, profile=False, group=transport
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.25)
        log = EventLog(pipe, "jsonl", folder=tmp_path, optimizer=optimizer, first_step=5)
        expected = []
        for _ in range(2):
            with pytest.raises(PenstockError):
                pipe.step(X, X, target=Y)
            losses = [pipe.step(X, target=Y).loss, pipe.step(-X, target=Y).loss]
            norm = pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            expected.append((sum(losses) / 2, norm))
        pipe.step(X, target=Y)
        log.close()
        optimizer.step()  # of which the log knows nothing
        pipe.step(X, target=Y)
        return expected

    expected, _ = penstock.LocalWorld(2).run(train)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["loss"], line["norm"]) for line in lines] == [
        (5, *expected[0]),
        (6, *expected[1]),
    ]
    assert [line["rate"] for line in lines] == [0.25, 0.25]
    for line in lines:
        assert line["tokens_per_second"] == 16 / line["seconds"]
        assert len(line["ranks"]) == 2


def test_json_lines(tmp_path: Path) -> None:
    written("jsonl", tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["step", "step", "step", "validation"]
    assert (lines[1]["loss"], lines[1]["seconds"], lines[1]["memory"]) == (1.875, 0.5, 3000)
    assert lines[1]["ranks"][1] == {"seconds": 0.4, "busy": 0.4, "span": 0.4, "memory": 3000}


def test_losses_that_are_no_numbers_are_written_for_any_reader(tmp_path: Path) -> None:
    """They were written as NaN and Infinity, which is no JSON: `jq`, browsers and pandas refused the whole file."""
    logger = open_logger("jsonl", tmp_path)
    for loss in (float("nan"), float("inf"), float("-inf"), 1.5):
        logger.step(replace(events(1)[0], loss=loss, norm=float("nan")))
        logger.validation(0, loss)
    logger.close()
    text = (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [line["loss"] for line in lines] == [None] * 6 + [1.5] * 2
    assert [line["not_finite"]["loss"] for line in lines[:6]] == ["nan", "nan", "inf", "inf", "-inf", "-inf"]
    assert (lines[6]["norm"], lines[6]["not_finite"]) == (None, {"norm": "nan"})
    assert "not_finite" not in lines[7]
    again = open_logger("jsonl", tmp_path, first_step=1)  # a run that goes on reads them
    again.close()
    assert (tmp_path / "events.jsonl").read_text(encoding="utf-8") == text


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '3\n[]\nnull\n{"step": "x"}\n{"step": 0}\n{}\n' + "[" * 100_000, encoding="utf-8"
    )
    open_logger("jsonl", tmp_path, first_step=1).close()
    assert (tmp_path / "events.jsonl").read_text(encoding="utf-8") == '{"step": 0}\n'


def test_json_lines_of_a_run_that_goes_on_have_each_step_once(tmp_path: Path) -> None:
    written("jsonl", tmp_path)
    with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "st')  # a process that was killed while it wrote
    again = open_logger("jsonl", tmp_path, first_step=1)
    for event in events(3)[1:]:
        again.step(event)
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]


def test_tensorboard(tmp_path: Path) -> None:
    written("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("train/loss")] == [(0, 2.0), (1, 1.875), (2, 1.75)]
    assert found.Scalars("train/memory")[0].value == 3000
    assert found.Scalars("train/seconds")[0].value == 0.5
    assert found.Scalars("train/tokens_per_second")[0].value == 200
    assert found.Scalars("validation/loss")[0].value == 1.25


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # mlflow asks SQLAlchemy for what that deprecates
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    written("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("penstock").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(0, 2.0), (1, 1.875), (2, 1.75)]
    assert run.data.metrics["validation/loss"] == 1.25
    assert run.info.status == "FINISHED"
    again = open_logger("mlflow", tmp_path, first_step=3)  # a run that goes on is the same run
    again.step(events(4)[3])
    again.close()
    assert [one.info.run_id for one in client.search_runs([run.info.experiment_id])] == [run.info.run_id]
    assert client.get_metric_history(run.info.run_id, "train/loss")[-1].step == 3


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "100")  # seconds for the process that writes the file to start
    written("wandb", tmp_path)
    wandb.teardown()  # ends the process that writes the file
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = list(history(file))
    assert [row["train/loss"] for row in rows[:3]] == [2.0, 1.875, 1.75]
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert rows[3]["validation/loss"] == 1.25


def history(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of an offline run, by W&B's own description of its records."""
    from wandb.proto import wandb_internal_pb2

    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def records(data: bytes) -> Iterator[bytes]:
    """The file is a log of LevelDB behind a header of 7 bytes: blocks of 32 KiB, of chunks (checksum, length, kind)."""
    place, held = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        held += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or last
            yield held
            held = b""


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_missing_package_is_named(name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [one for one in sys.modules if one.split(".")[0] == package or one == "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    for asked in (
        lambda: open_logger(name, tmp_path),
        lambda: check_logger(name),
    ):  # before a run, too
        with pytest.raises(PenstockError, match=rf"needs the package {package}.*penstock\[log\]"):
            asked()
    check_logger(name, opens=False)  # a rank that opens none does not need it on its host
    with pytest.raises(PenstockError, match="there is no logger 'excel'"):
        check_logger("excel", opens=False)
