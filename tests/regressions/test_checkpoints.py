"""Checkpoints that were attacked, cut off, flipped, filled up and killed; each test tells what happened before."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import penstock
import penstock.capture
from penstock.checkpoint import kept, manifest
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.manifest import Damaged, Manifest
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError, RanksDisagree, RunError, StageError
from penstock.front import saving
from tests.checkpoint import attack
from tests.checkpoint.pipes import batch, everything, make, same, saved, train
from tests.gloo_pool import GlooPool

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["simple", "twisted"])
def test_a_checkpoint_runs_nothing(tmp_path: Path, kind: str) -> None:
    """A list of contents could run code: it was unpickled twice, by names that were looked at. Pickle's BUILD on one of these,
    torch's `_get_layout`, replaced a cache of torch's, so that a tensor of the first reading was bytes at the second, and torch
    unpickled the bytes as they were."""
    place, mark = tmp_path / "checkpoint", tmp_path / "was here"
    pipe, _ = make()
    pipe.save(place)
    evil = attack.evil_part(mark)
    (place / "__9_0.distcp").write_bytes(evil)
    shapes = {key: entry.shape for key, entry in Manifest.read(place).tensors.items()}
    listed = attack.twisted_list(shapes, "__9_0.distcp", len(evil)) if kind == "twisted" else attack.simple_list(mark)
    (place / ".metadata").write_bytes(listed)
    layouts = dict(getattr(torch.serialization._get_layout, "cache", {}))
    for read in (penstock.load, pipe.load):
        with pytest.raises(Damaged, match=r"\.metadata"):
            read(place)
    assert not mark.exists()
    assert getattr(torch.serialization._get_layout, "cache", {}) == layouts


def test_a_manifest_opens_nothing_outside_its_folder(tmp_path: Path) -> None:
    """A relative of it: the files that torch's list names were opened wherever they were."""
    place = tmp_path / "checkpoint"
    make()[0].save(place)
    whole = Manifest.read(place)
    for name in ("../secret", "/etc/passwd", "a/b", "", "..", "x" * 300):
        forged = whole.dumps().replace(b"__0_0.distcp", name.encode())
        facts = json.loads(forged)["checkpoint"]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        with pytest.raises(Damaged, match="no name of a file"):
            Manifest.loads(json.dumps({"format": 2, "digest": digest, "checkpoint": facts}).encode())


def test_a_part_that_is_damaged_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    """That rank raised, the others went on with what they had read; after falling back to an older checkpoint the ranks
    were at different steps, silently."""
    old, new = tmp_path / "old", tmp_path / "new"
    saved(old, steps=1)
    saved(new, steps=3)
    flip(new / "__1_0.distcp", 2000)

    def run(transport: LocalTransport) -> Any:
        pipe, optimizer = make(transport)
        train(pipe, optimizer, range(2))
        before = everything(pipe, optimizer)
        with pytest.raises(Damaged, match=r"__1_0\.distcp is damaged") as caught:
            pipe.load(new, optimizer=optimizer)
        assert same(before, everything(pipe, optimizer))
        assert "Nothing was changed" in str(caught.value)
        extra = pipe.load(old, optimizer=optimizer)
        return extra["steps"], pipe.schedule.steps

    assert LocalWorld(2).run(run) == [(1, 1), (1, 1)]


def test_ranks_that_see_different_checkpoints_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts with a folder of the same name each: every rank read its own, and none compared."""
    place = tmp_path / "checkpoint"
    saved(place)
    real = Manifest.read
    monkeypatch.setattr(
        Manifest, "read", lambda folder: replace(real(folder), step=1 + len(threading.current_thread().name))
    )

    def run(transport: LocalTransport) -> None:
        pipe, optimizer = make(transport)
        threading.current_thread().name = "host" * transport.rank
        before = everything(pipe, optimizer)
        with pytest.raises(RanksDisagree, match=r"rank 0: step 1.*\n.*rank 1: step 5"):
            pipe.load(place)
        assert same(before, everything(pipe, optimizer))

    LocalWorld(2).run(run)


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position % len(data)] ^= 1 << position % 8
    file.write_bytes(data)


def test_flips_and_cuts_of_every_file_are_found_or_harmless(tmp_path: Path) -> None:
    """A flipped bit in the values was loaded as it was; a file that was cut off was an error of torch's on one rank."""
    place, broken = tmp_path / "checkpoint", tmp_path / "broken"
    saved(place)
    random.seed(0)
    damages: list[tuple[str, int | None]] = []
    for file in sorted(place.iterdir()):
        size = file.stat().st_size
        damages += [(file.name, position) for position in (0, size - 1, *random.sample(range(size), 12))]
        damages += [(file.name, None)]
    outcomes = {"found": 0, "harmless": 0}

    def run(transport: LocalTransport) -> Any:
        pipe, optimizer = make(transport)
        pipe.load(place, optimizer=optimizer)
        right = everything(pipe, optimizer)
        train(pipe, optimizer, range(1))
        before = everything(pipe, optimizer)
        for name, position in damages:
            if transport.rank == 0:
                shutil.rmtree(broken, ignore_errors=True)
                shutil.copytree(place, broken)
                if position is None:
                    os.truncate(broken / name, (broken / name).stat().st_size // 2)
                else:
                    flip(broken / name, position)
            pipe.ranks.barrier("the damage")
            try:
                pipe.load(broken, optimizer=optimizer)
                assert same(right, everything(pipe, optimizer)), (name, position)
                outcome = "harmless"
                with torch.no_grad():
                    for parameter in pipe.parameters():
                        parameter.add_(1.0)
                before = everything(pipe, optimizer)
            except PenstockError:
                assert same(before, everything(pipe, optimizer)), (name, position)
                outcome = "found"
            if transport.rank == 0:
                outcomes[outcome] += 1

    LocalWorld(2).run(run)
    assert outcomes["found"] > 10 * outcomes["harmless"], outcomes


class FailingDisk(Disk):
    """A disk that is full from its nth act on."""

    def __init__(self, acts: int) -> None:
        self.left = acts
        self.lock = threading.Lock()

    def act(self) -> None:
        with self.lock:
            self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def make_folder(self, folder: Path) -> None:
        self.act()
        super().make_folder(folder)

    def create(self, file: Path) -> BinaryIO:
        self.act()
        return super().create(file)

    def write(self, stream: BinaryIO, data: bytes | memoryview) -> None:
        self.act()
        super().write(stream, data)

    def finish(self, stream: BinaryIO) -> None:
        self.act()
        super().finish(stream)

    def rename(self, old: Path, new: Path) -> None:
        self.act()
        super().rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        self.act()
        super().sync_folder(folder)


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_fails_at_any_act_is_told_to_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """A full disk was a CaptureError on one rank and torch's CheckpointException, which is no Exception, on another."""
    place = tmp_path / "checkpoint"
    failures = 0

    def run(transport: LocalTransport) -> int:
        nonlocal failures
        pipe, optimizer = make(transport)
        pipe.save(place, extra={"number": 0})
        for acts in range(0, 400, 3):
            if transport.rank == 0:
                monkeypatch.setattr(saving, "DISK", FailingDisk(acts))
            pipe.ranks.barrier("the disk")
            told = ""
            try:
                found = pipe.save(place, optimizer=optimizer, extra={"number": acts + 1}, wait=wait)
                if found is not None:
                    found.wait()
            except PenstockError as error:
                told = str(error)
            failed = told != ""
            assert not failed or "No space left" in told or "another rank cannot write" in told, told
            everyone = [
                answer == b"1" for answer in transport.collectives.all_bytes("who failed", b"1" if failed else b"0")
            ]
            assert len(set(everyone)) == 1, "all ranks or none"
            if transport.rank == 0:
                monkeypatch.setattr(saving, "DISK", Disk())
                failures += failed
                assert penstock.load(place).extra["number"] <= acts + 1, "whole"
            pipe.ranks.barrier("the look")
            if not failed:
                return acts
        raise AssertionError("a save takes fewer acts than that")

    first, second = LocalWorld(2).run(run)
    assert first == second
    assert failures > 10
    assert penstock.load(place).extra["number"] == first + 1


KILLED = """
import os, signal, sys, warnings
from pathlib import Path
import torch
import penstock
import penstock.capture
from penstock.comm import LocalWorld
from penstock.front import saving
from tests.checkpoint.pipes import make
from tests.regressions.test_checkpoints import FailingDisk

class KillingDisk(FailingDisk):
    def act(self):
        with self.lock:
            self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

def save(transport, number, place, wait):
    pipe, _ = make(transport)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(number)
    for _ in range(number):
        pipe.schedule.steps += 1
    found = pipe.save(place, extra={"number": number}, keep=2, wait=wait)
    if found is not None:
        found.wait()

for ranks, wait, stride in ((1, True, 1), (2, True, 7), (2, False, 7)):
    place = Path(sys.argv[1]) / f"{ranks} {wait}"
    LocalWorld(ranks).run(save, 1, place, wait)
    last, killed, points = 1, 0, 0
    for acts in range(0, 1000, stride):
        child = os.fork()
        if child == 0:
            saving.DISK = KillingDisk(acts)
            LocalWorld(ranks).run(save, last + 1, place, wait)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        found = penstock.load(place)
        assert found.extra["number"] in (last, last + 1), found.extra
        last = found.extra["number"]
        assert {float(v) for t in found.model.values() for v in (t.min(), t.max())} == {float(last)}, "a mixture of two"
        assert found.step == last
        points += 1
        if os.WIFEXITED(status):
            break
    print("killed", killed == points - 1, killed > 5)
"""


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_killed_at_any_act_of_a_save_the_last_whole_one_is_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout == "killed True True\n" * 3, done.stderr


class Loader:
    """Batches one after another, which knows where it is."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Any:
        self.position += 1
        return batch(self.position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def run_and_resume(folder: str) -> Any:
    """Steps with dropout from torch's own generator, noise from Python's and numpy's, a scheduler, a scaler and a loader."""
    import numpy as np
    import torch.distributed as dist

    rank = dist.get_rank()

    def program() -> Any:
        torch.manual_seed(3)
        stage = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh())
        stages = [penstock.PipelineStage(stage, rank, 2, "cpu")]
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        pipe = penstock.Pipeline(
            stages=stages, schedule="1f1b", loss_fn=nn.functional.mse_loss, microbatches=2, loss_scale=scaler
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        return pipe, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20), Loader(), scaler

    def steps(parts: Any, count: int) -> None:
        pipe, optimizer, scheduler, data, scaler = parts
        for _ in range(count):
            x, y = data.next()
            noise = random.random() + float(np.random.rand())
            pipe.step(*() if rank else (x + noise,), target=y + noise if rank else None)  # each rank draws its own
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()

    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    whole = program()
    steps(whole, 2)
    whole[0].save(folder, optimizer=whole[1], scheduler=whole[2], data=whole[3])
    steps(whole, 3)
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    again = program()
    again[0].load(folder, optimizer=again[1], scheduler=again[2], data=again[3])
    steps(again, 3)
    one, other = everything(whole[0], whole[1]), everything(again[0], again[1])
    return same(one, other), whole[4].state_dict() == again[4].state_dict(), again[3].position, one["lr"]


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_resuming_is_bitwise(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Dropout of torch's own generator, the scheduler and the scaler began anew, so a resumed run was another run."""
    for equal, scaler, position, rate in gloo_pool.run(2, run_and_resume, str(tmp_path / "checkpoint")):
        assert equal
        assert scaler
        assert position == 5
        assert rate != 0.01


def test_several_are_kept_and_the_last_whole_one_is_taken(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"

    def write(transport: LocalTransport) -> None:
        pipe, optimizer = make(transport)
        for number in range(1, 6):
            train(pipe, optimizer, range(number, number + 1))
            pipe.save(place, optimizer=optimizer, extra={"number": number}, keep=3)

    LocalWorld(2).run(write)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "checkpoint.step-3", "checkpoint.step-4"]
    flip(place / "__0_0.distcp", 1500)
    os.truncate(tmp_path / "checkpoint.step-4" / "__1_0.distcp", 10)

    def read(transport: LocalTransport) -> Any:
        pipe, optimizer = make(transport)
        with pytest.raises(Damaged, match=r"There is an older one, .*step-4: give or_older=True"):
            pipe.load(place, optimizer=optimizer)
        return pipe.load(place, optimizer=optimizer, or_older=True), pipe.schedule.steps

    with pytest.warns(UserWarning, match="trying the older checkpoint"):
        assert LocalWorld(2).run(read) == [({"number": 3}, 3)] * 2


@pytest.mark.parametrize("damaged", [0, 1])
def test_ranks_with_different_errors_go_the_same_way(tmp_path: Path, damaged: int) -> None:
    """One rank found its part damaged and went on to the older checkpoint; the other one raised what was wrong there."""
    place = tmp_path / "checkpoint"

    def write(transport: LocalTransport) -> None:
        pipe, optimizer = make(transport)
        for number in range(1, 3):
            train(pipe, optimizer, range(number, number + 1))
            pipe.save(place, optimizer=optimizer, keep=2)

    LocalWorld(2).run(write)
    flip(place / f"__{damaged}_0.distcp", 1500)

    def read(transport: LocalTransport) -> str:
        pipe, optimizer = make(transport)
        data = Loader() if transport.rank != damaged else None  # which was not saved
        with pytest.raises(StageError, match="saved without data") as caught:
            pipe.load(place, optimizer=optimizer, data=data, or_older=True)
        return str(caught.value)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        texts = LocalWorld(2).run(read)
    assert len([one for one in told if "trying the older checkpoint" in str(one.message)]) == (damaged == 0)
    assert all(("step-1" in text) == (damaged == 0) for text in texts), texts


def test_a_state_that_is_refused_on_one_rank_changes_nothing(tmp_path: Path) -> None:
    class Picky(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["position"] == 7:
                raise KeyError("position")
            super().load_state_dict(state)

    place = tmp_path / "checkpoint"

    def write(transport: LocalTransport) -> None:
        pipe, optimizer = make(transport)
        loader = Loader()
        loader.position = 7
        pipe.save(place, optimizer=optimizer, data=loader)

    def read(transport: LocalTransport) -> Any:
        pipe, optimizer = make(transport)
        train(pipe, optimizer, range(2))
        loader = Picky() if transport.rank == 1 else Loader()
        before = everything(pipe, optimizer)
        with pytest.raises(PenstockError, match="data does not take the state"):
            pipe.load(place, optimizer=optimizer, data=loader)
        assert same(before, everything(pipe, optimizer))
        return loader.position

    LocalWorld(2).run(write)
    assert LocalWorld(2).run(read) == [0, 0]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    """`save` renamed whatever had the name, and deleted it: `pipe.save("results")` lost the results."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.txt").write_text("years of work")
    pipe, _ = make()
    with pytest.raises(PenstockError, match="is no checkpoint; penstock does not replace it"):
        pipe.save(tmp_path / "results")
    assert (tmp_path / "results" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    pipe.save(tmp_path / "empty")
    assert penstock.load(tmp_path / "empty").model.keys() == pipe.state_dict().keys()


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """The state of one kind went into another, whose next step was a KeyError; one that was not saved began anew, silently."""
    place = tmp_path / "checkpoint"
    pipe, adam = make()
    train(pipe, adam, range(1))
    pipe.save(place, optimizer=adam)
    with pytest.raises(StageError, match="has the state of AdamW, and optimizer is SGD"):
        pipe.load(place, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    pipe.save(place)
    with pytest.raises(StageError, match="was saved without an optimizer"):
        pipe.load(place, optimizer=adam)
    with pytest.raises(StageError, match="was saved without scheduler="):
        pipe.load(place, scheduler=torch.optim.lr_scheduler.StepLR(adam, 3))


def test_a_save_beside_the_steps_has_the_values_of_its_beginning(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"

    def run(transport: LocalTransport) -> Any:
        pipe, optimizer = make(transport)
        train(pipe, optimizer, range(2))
        then = everything(pipe, optimizer)
        first = pipe.save(place, optimizer=optimizer, wait=False)
        assert first is not None
        train(pipe, optimizer, range(2, 4))
        second = pipe.save(place, optimizer=optimizer, keep=2, wait=False)  # waits for the first: one at a time
        assert first.done
        assert first.seconds > 0
        assert second is not None
        second.wait()
        assert kept.older(place) == [tmp_path / "checkpoint.step-2"]
        pipe.load(tmp_path / "checkpoint.step-2", optimizer=optimizer)
        assert same(then, everything(pipe, optimizer))
        return pipe.schedule.steps

    assert LocalWorld(2).run(run) == [2, 2]
    assert penstock.load(place).step == 4
    assert not [path for path in tmp_path.iterdir() if "saving" in path.name or "deleting" in path.name]
    assert {path.name for path in place.iterdir()} == {*Manifest.read(place).sizes(), manifest.FILE}


class Counting(DefaultStager):
    """DCP's own, which copies in a thread and keeps its memory for the next time; `after` times it works."""

    def __init__(self, after: int = 100) -> None:
        super().__init__(StagingOptions(False, False, True, False))
        self.left = after
        self.copied: list[int] = []

    def stage(self, state_dict: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise MemoryError("no room for a copy")
        self.copied.append(len(state_dict))
        return super().stage(state_dict, **options)


def test_of_a_part_of_a_large_tensor_that_part_is_copied() -> None:
    """DCP's stager copies all the memory behind a tensor: of parameters in one buffer every rank copied all of them."""
    whole = torch.arange(1000.0)
    ((_, _, copy),) = saving.staged([("x", (0,), whole[10:20])], None)
    assert torch.equal(copy, whole[10:20])
    assert copy.untyped_storage().nbytes() == copy.nbytes


def test_tensors_are_copied_by_dcps_stager_and_all_ranks_hear_if_it_cannot(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"

    def run(transport: LocalTransport) -> Any:
        pipe, optimizer = make(transport)
        stager = Counting(after=2 if transport.rank else 100)
        with pytest.raises(RunError, match="wait=False"):
            pipe.save(place, stager=stager)
        for number in range(2):  # the second time its memory is used again
            train(pipe, optimizer, range(number, number + 1))
            then = everything(pipe, optimizer)
            made = pipe.save(place, optimizer=optimizer, wait=False, stager=stager)
            assert made is not None
            train(pipe, optimizer, range(7, 8))
            made.wait()
            pipe.load(place, optimizer=optimizer)
            assert same(then, everything(pipe, optimizer))
        made = pipe.save(place, optimizer=optimizer, wait=False, stager=stager)
        assert made is not None
        with pytest.raises(PenstockError, match="no room for a copy"):
            made.wait()
        stager.close()
        return stager.copied

    first, second = LocalWorld(2).run(run)
    assert min(first[:2] + second) > 0
    assert penstock.load(place).step == 2  # the last whole one


def test_an_expanded_buffer_is_filled(tmp_path: Path) -> None:
    """Torch refuses to copy into it: that was raised as it was, in the middle, when the parameters were those of the file."""

    class Expanded(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("shift", torch.full((1, 4), value).expand(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.before(x) + self.get_buffer("shift")[0])  # type: ignore[no-any-return]

    made = [penstock.Pipeline(Expanded(value), (torch.ones(2, 4),), profile=False) for value in (1.0, 2.0, 3.0, 4.0)]
    first, *others = made
    first.save(tmp_path / "checkpoint")
    others[0].load(tmp_path / "checkpoint")
    others[1].load_state_dict(first.state_dict())
    penstock.capture.load([stage.submod for stage in others[2].stages], tmp_path / "checkpoint")
    for other in others:
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in first.state_dict().items())


def _forged(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another manifest, with the digest that it would have."""
    facts = json.loads((place / manifest.FILE).read_bytes())["checkpoint"]
    change(facts)
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    (place / manifest.FILE).write_text(json.dumps({"format": 2, "digest": digest, "checkpoint": facts}))


def _forged_random(facts: dict[str, Any], place: Path, state: Any) -> None:
    for name in [name for name in facts["files"] if name.startswith("rank-")]:
        data = json.dumps({"random": state}).encode()
        (place / name).write_bytes(data)
        facts["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("params", []),  # the optimizer would have lost its parameters
        ("lr", "fast"),
        ("betas", 3),
        ("random", {}),
        ("random", {"torch": 3}),
        ("random", {"torch": {"~": "tensor", "is": ["uint8", [5], "AAAA"]}}),
    ],
)
def test_what_cannot_be_taken_is_found_before_anything_is_changed(tmp_path: Path, what: str, value: Any) -> None:
    """The options of the optimizer and the random state were set last. What torch refused was raw, and the tensors were
    those of the checkpoint by then."""
    place = tmp_path / "checkpoint"
    saved(place, ranks=1)

    def change(facts: dict[str, Any]) -> None:
        if what == "random":
            _forged_random(facts, place, value)
        else:
            facts["optimizer"]["groups"][0]["options"][what] = value

    _forged(place, change)
    pipe, optimizer = make()
    train(pipe, optimizer, range(3))
    before, drawn = everything(pipe, optimizer), torch.get_rng_state()
    words = None if what == "random" else f"has {what}=.* for group 0 of"
    with pytest.raises(PenstockError, match=words):
        pipe.load(place, optimizer=optimizer)
    assert same(before, everything(pipe, optimizer))
    assert torch.equal(drawn, torch.get_rng_state())
    assert optimizer.param_groups[0]["params"]


def test_more_groups_than_were_saved_are_refused(tmp_path: Path) -> None:
    """The second group kept the rate that it was made with, silently."""
    place = tmp_path / "checkpoint"
    saved(place, ranks=1)
    pipe, _ = make()
    own = list(pipe.parameters())
    with pytest.raises(StageError, match="has 1 groups of parameters and the optimizer 2"):
        pipe.load(place, optimizer=torch.optim.AdamW([{"params": own[:1]}, {"params": own[1:], "lr": 3.0}]))


def test_the_first_rank_says_which_checkpoint_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    """Each rank made a path of what it was given, before it met the others. A rank that knew of no folder raised alone, though
    it is the first one that looks for checkpoints; and if that one was given none, the others heard only that it had left."""
    place = tmp_path / "checkpoint"
    saved(place, ranks=2)

    def load(transport: LocalTransport, knows: int) -> str:
        pipe, _ = make(transport)
        given: Any = place if transport.rank == knows else None
        try:
            pipe.load(given)
        except PenstockError as error:
            return str(error)
        return "loaded"

    assert LocalWorld(2).run(load, 0) == ["loaded", "loaded"]
    found = LocalWorld(2).run(load, 1)
    assert all("load(folder=None)" in said for said in found), found
