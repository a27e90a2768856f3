"""Checkpoints: written by any number of ranks and stages, read by any other, and by the plain model."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

import penstock
from penstock.checkpoint import manifest
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.torch_list import read_list
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError, RunError
from penstock.front import saving as saving_module
from tests.front.models import Chain, batch, loss_fn, make, train_plainly

ROOT = Path(__file__).resolve().parents[2]


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


def write(transport: LocalTransport | None, folder: Path, *, tied: bool, wait: bool = True, **options: Any) -> None:
    pipe = pipeline(transport, tied=tied, **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    steps(pipe, optimizer, range(2))
    saving = pipe.save(folder, optimizer=optimizer, extra={"epoch": 2}, wait=wait)
    if saving is not None:
        steps(pipe, optimizer, range(2, 3))  # beside the writing
        saving.wait()


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

    for ranks, schedule in ((1, "1f1b"), (3, "1f1b"), (4, "gpipe"), (2, "interleaved1f1b")):
        for losses in LocalWorld(ranks).run(go_on, place, tied=tied, schedule=schedule):
            assert losses == pytest.approx(expected[2:])


CUTS = [("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2), ("gpipe", 3), ("v-half", 2), ("zb-h1", 4)]


def chain(transport: LocalTransport, schedule: str) -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
    """Stages of a model with a shared parameter, cut by hand: no capture, so that many cuts can be tried."""
    ranks = transport.num_ranks
    placement = penstock.get_schedule(schedule)(ranks, 4).placement
    modules = penstock.split_modules(make(Chain), list(Chain.PARTS), placement.num_stages, example=batch()[:1])
    here = placement.stages_of(transport.rank)
    stages = [penstock.PipelineStage(modules[k], k, placement.num_stages, "cpu", group=transport) for k in here]
    pipe = penstock.Pipeline(stages=stages, schedule=schedule, loss_fn=loss_fn, microbatches=4)
    weights = [p for p in pipe.parameters() if p.ndim > 1]
    others = [p for p in pipe.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return pipe, torch.optim.AdamW(groups, lr=0.01)


def test_any_cut_and_schedule_reads_what_any_other_wrote(tmp_path: Path) -> None:
    def write_chain(transport: LocalTransport, place: Path, schedule: str) -> None:
        pipe, optimizer = chain(transport, schedule)
        steps(pipe, optimizer, range(2))
        pipe.save(place, optimizer=optimizer)

    def read_chain(transport: LocalTransport, place: Path, schedule: str) -> Any:
        pipe, optimizer = chain(transport, schedule)
        for group in optimizer.param_groups:
            group["lr"] = 5.0
        pipe.load(place, optimizer=optimizer)
        return steps(pipe, optimizer, range(2, 4))

    model = make(Chain)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    expected = []
    for number in range(4):
        tokens, labels = batch(number)
        loss = loss_fn(model(tokens), labels)
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, (schedule, ranks) in enumerate(CUTS):
        place = tmp_path / f"by-{schedule}"
        LocalWorld(ranks).run(write_chain, place, schedule)
        assert set(penstock.load(place).model) == set(model.state_dict())
        for other, others in (CUTS[number - 1], CUTS[number - 3]):
            for losses in LocalWorld(others).run(read_chain, place, other):
                assert losses == pytest.approx(expected[2:]), (schedule, other)


WITHOUT_PENSTOCK = """
import sys, warnings
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from tests.front.models import make, train_plainly

place, optimizer_name = Path(sys.argv[1]), "optimizer.state.blocks.0.up.weight.exp_avg"
expected, loaded, other = (make(tied=True) for _ in range(3))
train_plainly(expected, 2)
state = {"model": loaded.state_dict()}
warnings.simplefilter("ignore")
dcp.load(state, checkpoint_id=place)
loaded.load_state_dict(state["model"])
dcp_to_torch_save(place, place / "one.pt")
one = torch.load(place / "one.pt", weights_only=True)
other.load_state_dict(one["model"])
for model in (loaded, other):
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
assert one["optimizer"]["state"]["blocks.0.up.weight"]["exp_avg"].shape == expected.blocks[0].up.weight.shape
assert not [name for name in sys.modules if name.partition(".")[0] == "penstock"]
print("well")
"""


@pytest.mark.processes
def test_a_process_without_penstock_reads_it(tmp_path: Path) -> None:
    """By torch's own loader into the plain model, shared parameters under each of their names; and as one file.

    It was written beside a step; the test above reads those that were waited for, which the same lines write."""
    place = tmp_path / "checkpoint"
    LocalWorld(2).run(write, place, tied=True, schedule="1f1b", wait=False)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PENSTOCK, str(place)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "well\n", done.stderr
    listed = read_list(place)
    assert listed["model.head.weight"] == listed["model.embed.weight"], "one copy, two names"


def test_what_cannot_be_saved_is_said_before_anything_is_written(tmp_path: Path) -> None:
    pipe = pipeline(None, schedule="1f1b")
    with pytest.raises(PenstockError, match="extra cannot be saved"):
        pipe.save(tmp_path / "checkpoint", extra={"tensor": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_told_to_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    world = LocalWorld(2)
    with pytest.raises(PenstockError):
        world.run(lambda transport: chain(transport, "1f1b")[0].save(tmp_path / "file" / "checkpoint"))
    assert ["NotADirectoryError" in repr(error) for error in world.errors] == [True, True]


def test_a_disk_that_is_stuck_is_named_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Saving.wait` waited for it without a bound, and so did a process that ended."""
    answers = threading.Event()

    class Stuck(Disk):
        def finish(self, stream: BinaryIO) -> None:
            assert answers.wait(60.0)
            super().finish(stream)

    def rank(transport: LocalTransport) -> None:
        pipe = pipeline(transport, schedule="1f1b")
        saving = pipe.save(tmp_path / "checkpoint", wait=False)
        assert saving is not None
        assert saving._thread.daemon, "the interpreter would wait for it at its end"
        saving.wait()

    monkeypatch.setattr(saving_module, "DISK", Stuck())
    monkeypatch.setattr(saving_module, "_DISK", 0.3)
    world = LocalWorld(2)
    with pytest.raises(RunError):  # no rank is lost, so that nobody starts the run again
        world.run(rank)
    assert all(f"the disk under {tmp_path} did not take" in str(error) for error in world.errors), world.errors
    answers.set()
    assert not saving_module._UNDER_WAY, "a process that ends would wait for the disk again"
    for thread in threading.enumerate():
        if thread.name == "penstock-checkpoint":
            thread.join(60.0)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.processes
def test_a_process_that_ends_lets_its_checkpoint_come_to_its_end(tmp_path: Path) -> None:
    """Also one that multiprocessing has forked."""
    looked = threading.Event()

    class Slow(Disk):
        def finish(self, stream: BinaryIO) -> None:
            assert looked.wait(60.0)
            super().finish(stream)

    def leave() -> None:
        saving_module.DISK = Slow()
        saving = pipe.save(tmp_path / "checkpoint", extra={"number": 7}, wait=False)
        assert saving is not None
        assert not saving.done
        looked.set()

    pipe = pipeline(None, schedule="1f1b")
    child = multiprocessing.get_context("fork").Process(target=leave)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert penstock.load(tmp_path / "checkpoint").extra["number"] == 7


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
import penstock
from torch import nn

place, rounds = Path(sys.argv[1]), int(sys.argv[2])
stage = penstock.PipelineStage(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), 0, 1, "cpu")
pipe = penstock.Pipeline(stages=[stage], schedule="1f1b", loss_fn=nn.functional.mse_loss, microbatches=1)
pipe.save(place, extra={"number": 0})
start = time.perf_counter()
pipe.save(place, extra={"number": 0})
long, number, caught, turn = time.perf_counter() - start, 0, 0, 0
while turn < rounds or (turn < 20 * rounds and not (number and caught)):  # a machine that got slower needs longer turns
    turn += 1
    child = os.fork()
    if child == 0:
        for more in range(1, 1000):
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.fill_(number + more)
            pipe.save(place, extra={"number": number + more})
    time.sleep(long * (1 + 3 * turn / rounds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    caught += any(place.parent.glob("checkpoint.saving-*")) or not place.exists()
    found = penstock.load(place)
    assert found.extra["number"] >= number, "an older one came back"
    number = found.extra["number"]
    if number:
        values = {float(value) for tensor in found.model.values() for value in (tensor.min(), tensor.max())}
        assert values == {float(number)}, "a mixture of two"
print(number > 0, caught > 0)
"""


@pytest.mark.processes
def test_kill_minus_nine_at_any_moment_of_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "checkpoint"), "16"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "True True\n", done.stderr


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="is no checkpoint"):
        penstock.load(tmp_path)
    place = tmp_path / "checkpoint"
    pipeline(None, schedule="1f1b").save(place)
    facts = json.loads((place / manifest.FILE).read_text())
    (place / manifest.FILE).write_text(json.dumps({**facts, "format": 99}))
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
