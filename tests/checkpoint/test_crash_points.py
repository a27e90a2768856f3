"""A save that is killed at each of its acts on the disk in turn: a whole checkpoint can be loaded, and it is the right one.

The stories: `penstock train` without --resume deleted NAME.step-N, which was all that a kill between two renames had left. With
`keep=` the newest was the one with the highest step: whoever had gone back to an older checkpoint, trained on and was killed
between two renames went on with the steps that had been given up; so did `or_older=True`.

No process is started: the disk raises what nothing catches, and does nothing any more.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.checkpoint import kept
from penstock.checkpoint.lineage import LINEAGE
from penstock.checkpoint.manifest import FILE
from penstock.front import saving
from tests.checkpoint.crashes import Interrupted, Killed
from tests.checkpoint.pipes import make


class Run:
    """A pipeline whose parameters all have one value, which says what was loaded."""

    def __init__(self, place: Path) -> None:
        self.place, (self.pipe, _) = place, make()

    def save(self, value: int, step: int, *, wait: bool = True, **options: Any) -> None:
        self.pipe.schedule.steps = step
        with torch.no_grad():
            for parameter in self.pipe.parameters():
                parameter.fill_(value)
        made = self.pipe.save(self.place, extra={"value": value}, wait=wait, **options)
        if made is not None:
            made._thread.join(60)
            if saving._UNDER_WAY.pop(made._thread, None) is not None:
                raise Killed
            made.wait()

    def load(self, name: str = "checkpoint", **options: Any) -> int:
        value = int(self.pipe.load(self.place.with_name(name), **options)["value"])
        assert {one for p in self.pipe.parameters() for one in p.flatten().tolist()} == {float(value)}, (
            "a mixture of two"
        )
        return value


def straight(place: Path, keep: int) -> tuple[Run, set[int]]:
    """Two were saved, one after the other."""
    run = Run(place)
    run.save(1, 1, keep=keep)
    run.save(2, 2, keep=keep)
    return run, {2}


def gone_back(place: Path, keep: int) -> tuple[Run, set[int]]:
    """Four were saved, then somebody went back to the second and saved once more; at steps that are lower."""
    run = Run(place)
    for value in range(1, 5):
        run.save(value, 10 * value, keep=4)
    run = Run(place)
    assert run.load("checkpoint.step-20") == 2
    run.save(30, 25, keep=max(keep, 4))
    return run, {30}


def going_back(place: Path, keep: int) -> tuple[Run, set[int]]:
    """The next is the first since somebody went back."""
    run = Run(place)
    for value in range(1, 5):
        run.save(value, 10 * value, keep=4)
    assert run.load("checkpoint.step-20") == 2
    return run, {4}


def without_lineage(place: Path, keep: int) -> tuple[Run, set[int]]:
    """By a penstock that wrote none."""
    run = Run(place)
    for value in (1, 2):
        run.save(value, value, keep=2)
    for path in (place, *kept.older(place)):
        forget_lineage(path)
    run = Run(place)
    assert run.load() == 2
    return run, {2}


def forget_lineage(folder: Path) -> None:
    (folder / LINEAGE).unlink()
    body = json.loads((folder / FILE).read_bytes())["checkpoint"]
    del body["files"][LINEAGE]
    (folder / FILE).write_bytes(signed(body))


def signed(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"format": 2, "digest": digest, "checkpoint": body}).encode()


def same_step(place: Path, keep: int) -> tuple[Run, set[int]]:
    """The same step is saved again and again."""
    run = Run(place)
    run.save(1, 99, keep=keep)
    run.save(2, 99, keep=keep)
    return run, {2}


SITUATIONS: list[Callable[[Path, int], tuple[Run, set[int]]]] = [
    straight,
    gone_back,
    going_back,
    without_lineage,
    same_step,
]


def loaded(place: Path) -> int:
    """By one process without a pipeline, and by a pipeline, which find the same."""
    found = penstock.load(place)
    values = {one for tensor in found.model.values() for one in tensor.flatten().tolist()}
    assert values == {float(found.extra["value"])}, "a mixture of two"
    return int(found.extra["value"])


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is killed says nothing."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("wait", [True, False], ids=["", "beside the steps"])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: one.__name__)
def test_killed_at_each_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: Any, keep: int, wait: bool
) -> None:
    place, base = tmp_path / "now" / "checkpoint", tmp_path / "base"
    monkeypatch.setattr(saving, "DISK", Interrupted())
    run, before = situation(place, keep)
    shutil.copytree(place.parent, base)
    lineage, seen = run.pipe._lineage, set()
    for at in range(1, 400):
        shutil.rmtree(place.parent)
        shutil.copytree(base, place.parent)
        run.pipe._lineage, run.pipe._saving = lineage, None
        disk = Interrupted(at)
        disk.then = disk.kill
        monkeypatch.setattr(saving, "DISK", disk)
        with suppress(Killed):
            run.save(77, 26, keep=keep, wait=wait)
        monkeypatch.setattr(saving, "DISK", Interrupted())
        value = loaded(place)
        assert value in {77} | before
        seen.add(value)
        goes_on(tmp_path / "after", place, value, keep)
        if not disk.dead:
            assert value == 77
            assert seen == {77} | before
            return
    raise AssertionError("a save takes fewer acts than that")


def goes_on(scratch: Path, place: Path, value: int, keep: int) -> None:
    """What may come after a kill: a run that goes on, one that begins anew, and one that does so by `penstock train`."""
    begun = Run(scratch / "checkpoint")
    for resumed in (False, True):
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(place.parent, scratch)
        if resumed:
            assert begun.load(or_older=True) == value
        begun.save(88, 27, keep=keep)
        assert loaded(scratch / "checkpoint") == 88
        assert not list(scratch.glob("*.saving*")), "what the one that was killed has left is gone"
        assert not list(scratch.glob("*.deleting"))
        assert len(list(scratch.iterdir())) <= keep
    shutil.rmtree(scratch)
    shutil.copytree(place.parent, scratch)
    kept.put_aside(scratch / "checkpoint", Interrupted())
    assert not kept.is_any(scratch / "checkpoint")
    assert loaded(scratch / "checkpoint.before") == value
