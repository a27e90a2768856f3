"""A save that is killed at each of its acts on the disk in turn: a whole checkpoint can be loaded, and it is the right one.

The stories: `penstock train` without --resume deleted NAME.step-N, which was all that a kill between two renames had left. With
`keep=` the newest was the one with the highest step: whoever had gone back to an older checkpoint, trained on and was killed
between two renames went on with the steps that had been given up; so did `or_older=True`.

No process is started: the disk raises what nothing catches, and does nothing any more.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.checkpoint import kept
from penstock.checkpoint.lineage import LINEAGE, Lineage
from penstock.checkpoint.manifest import FILE, Damaged
from penstock.errors import RunError
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


CASES = [(situation, keep, True) for situation, keep in zip(SITUATIONS, (1, 2, 3, 2, 1), strict=True)]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("situation", "keep", "wait"), [*CASES, (straight, 1, False), (gone_back, 2, False)])
def test_killed_at_each_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: Any, keep: int, wait: bool
) -> None:
    place, base = tmp_path / "now" / "checkpoint", tmp_path / "base"
    monkeypatch.setattr(saving, "DISK", Interrupted())
    run, before = situation(place, keep)
    shutil.copytree(place.parent, base)
    lineage, seen, known = run.pipe._lineage, set(), set()
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
        names = tuple(sorted(str(path.relative_to(place.parent)) for path in place.parent.rglob("*")))
        if names not in known:
            goes_on(tmp_path / "after", place, value, keep)
        known.add(names)
        if not disk.dead:
            assert value == 77
            assert seen == {77} | before
            assert len(known) > 10
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


def test_a_start_that_is_killed_at_each_act_leaves_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`put_aside` removed the older ones first, and the one that an earlier start had put aside."""
    monkeypatch.setattr(saving, "DISK", Interrupted())
    base, place = tmp_path / "base", tmp_path / "now" / "checkpoint"
    gone_back(base / "checkpoint", 4)
    shutil.copytree(base / "checkpoint", base / "checkpoint.before")
    for at in range(1, 100):
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(base, place.parent)
        disk = Interrupted(at)
        disk.then = disk.kill
        with suppress(Killed):
            kept.put_aside(place, disk)
        if kept.is_any(place):
            assert loaded(place) == 30
            assert kept.put_aside(place, Interrupted()) is not None
        group = max(place.parent.glob("checkpoint.before-[23]"))
        assert loaded(group) == 30
        assert loaded(place.with_name("checkpoint.before")) == 30
        if not disk.dead:
            Run(place).save(88, 1)
            kept.forget(place, Interrupted())
            assert sorted(path.name for path in place.parent.iterdir()) == ["checkpoint", "checkpoint.before-2"]
            return
    raise AssertionError("a start takes fewer acts than that")


def damage(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 10)


def test_an_older_one_is_of_the_same_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`or_older` took the highest step: that of the run which had been given up."""
    monkeypatch.setattr(saving, "DISK", Interrupted())
    place = tmp_path / "checkpoint"
    run, _ = gone_back(place, 5)
    run.save(40, 26, keep=6)
    names = [path.name for path in kept.lines(place)[0]]
    assert names == ["checkpoint", "checkpoint.step-25", "checkpoint.step-20", "checkpoint.step-10"]
    damage(place)
    with pytest.warns(UserWarning, match="step-25"):
        assert run.load(or_older=True) == 30
    damage(place.with_name("checkpoint.step-25"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run.load(or_older=True) == 2
        for name in names[2:]:
            damage(place.with_name(name))
        with pytest.raises(Damaged, match=r"of other lines, .*step-40, .*step-30: give the name of one"):
            run.load(or_older=True)
    assert run.load("checkpoint.step-40") == 4


def test_a_newest_one_of_which_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all others are of one line it can only have come out of that; else nobody guesses."""
    monkeypatch.setattr(saving, "DISK", Interrupted())
    for situation, value in ((straight, 1), (gone_back, None)):
        place = tmp_path / situation.__name__ / "checkpoint"
        run, _ = situation(place, 2)
        if value is None:
            run.save(40, 26, keep=5)
        for name in (LINEAGE, FILE):
            (place / name).write_bytes(b"{")
        if value is None:
            with pytest.raises(Damaged, match="of other lines"):
                run.load(or_older=True)
        else:
            with pytest.warns(UserWarning, match="trying the older"):
                assert run.load(or_older=True) == value
        run.save(50, 50, keep=2)
        assert loaded(place) == 50
        assert (place.parent / "checkpoint.unreadable").is_dir()


def test_a_run_that_another_one_went_on_from_does_not_save_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was started again goes on from the last checkpoint, while the old one still runs and saves what is older."""
    monkeypatch.setattr(saving, "DISK", Interrupted())
    place = tmp_path / "checkpoint"
    old, new = Run(place), Run(place)
    old.save(1, 1)
    assert new.load() == 1
    old.save(2, 2)  # the new one has saved nothing yet
    new.save(30, 3, keep=2)
    with pytest.raises(RunError, match="went on from this one, and has saved since"):
        old.save(4, 4)
    assert loaded(place) == 30
    old.save(5, 5) if old.load() == 30 else None
    assert loaded(place) == 5


def test_a_second_run_saves_at_each_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever returns without an error has left a whole one, and the other says who was first."""
    place, base = tmp_path / "now" / "checkpoint", tmp_path / "base"
    monkeypatch.setattr(saving, "DISK", Interrupted())
    first, second = Run(place), Run(place)
    first.save(1, 1)
    shutil.copytree(place.parent, base)
    lineage, refused = first.pipe._lineage, 0

    def come_in() -> None:
        saving.DISK = Interrupted()  # type: ignore[misc]
        second.save(7, 7)

    for at in range(1, 400):
        shutil.rmtree(place.parent)
        shutil.copytree(base, place.parent)
        first.pipe._lineage, second.pipe._lineage = lineage, Lineage.new()
        disk = Interrupted(at, come_in)
        monkeypatch.setattr(saving, "DISK", disk)
        told = ""
        try:
            first.save(2, 2)
        except RunError as error:
            told = str(error)
        assert not told or "Let one run at a time save to a folder" in told
        refused += told != ""
        assert loaded(place) == 7 if told else loaded(place) in {2, 7}
        assert not list(place.parent.glob("*.saving*"))
        if disk.count < at:
            assert refused > 10
            return
    raise AssertionError("a save takes fewer acts than that")


def test_a_lineage_that_was_not_written_by_a_save_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked as the manifest is, and says nothing but which checkpoint is tried."""
    monkeypatch.setattr(saving, "DISK", Interrupted())
    run, _ = straight(tmp_path / "checkpoint", 2)
    place, hexes = tmp_path / "checkpoint", "0123456789abcdef" * 2
    good = {"run": hexes, "number": 3, "ancestors": [["", 4], [hexes, 1]]}
    assert Lineage.loads(sealed(good)).ancestors == (("", 4), (hexes, 1))
    bad: list[Any] = [
        *({**good, "run": one} for one in ("", "x" * 32, hexes[1:], None, 3, ["a"])),
        *({**good, "number": one} for one in (-1, 1 << 62, True, 1.5, "1", None)),
        *(
            {**good, "ancestors": one}
            for one in ({}, "ab", [[]], [[hexes]], [[hexes, -1]], [[hexes, True]], [["../x", 1]])
        ),
        {**good, "ancestors": [[hexes, 1]] * 10_001},
        {**good, "more": 1},
        {"run": hexes, "number": 3},
        [],
    ]
    for one in bad:
        with pytest.raises(Damaged):
            Lineage.loads(sealed(one))
        (place / LINEAGE).write_bytes(sealed(one))
        for read in (penstock.load, run.pipe.load):
            with pytest.raises(Damaged):
                read(place)
    for data in (
        b"",
        b"null",
        b"[" * 100_000,
        b"\xff",
        sealed(good)[:-2],
        sealed(good).replace(b"3", b"4"),
        b" " * (1 << 21),
    ):
        (place / LINEAGE).write_bytes(data)
        assert Lineage.of(place) is None
        with pytest.raises(Damaged):
            penstock.load(place)
    (place / LINEAGE).write_bytes(sealed({**good, "number": (1 << 62) - 1}))
    run.save(5, 5)  # the highest number there can be does not keep anybody from saving
    assert loaded(place) == 5


def sealed(body: Any) -> bytes:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"digest": digest, "lineage": body}).encode()
