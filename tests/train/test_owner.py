"""Two runs in one folder: the second one is refused, and the folder is free again when the first ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.train import owner
from penstock.train.launch import launch
from penstock.train.owner import in_use, owned
from penstock.train.rank import run_rank
from penstock.train.train_options import TrainOptions


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """Each put away the checkpoints of the other, and their logs were mixed."""
    with owned(tmp_path / "run"):
        with pytest.raises(PenstockError, match=r"belongs to a run that is at work \(process"), owned(tmp_path / "run"):
            pass
        with pytest.raises(PenstockError, match="give another --output"):
            launch(TrainOptions(output=str(tmp_path / "run")), [], say=print)
        with owned(tmp_path / "other"):
            pass
    with owned(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("holds", "forks", "refusal"),
    [
        ("owned", False, "belongs to a run that is at work"),
        ("owned", True, "belongs to a run that is at work"),
        ("in_use", True, "still written to by ranks of a run whose launcher has gone"),
    ],
)
def test_a_run_that_was_killed_owns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: str, forks: bool, refusal: str
) -> None:
    """A process that it has forked, to load data, lives on for a while, and does not own the folder either. The ranks of a
    launcher that was killed do, until they have ended: a new run in the folder wrote beside them."""
    monkeypatch.setattr(owner, "_PATIENCE", 0.0)
    begun = f"held = runpy.run_path({owner.__file__!r})[{holds!r}]\nwith held(pathlib.Path({str(tmp_path)!r})):\n"
    said = "os.write(1, b'ready\\n')"  # in one piece, as two processes say it
    fork = f"    if not os.fork(): {said}; time.sleep(60)\n" if forks else ""
    program = f"import os, pathlib, runpy, time\n{begun}{fork}    {said}\n    input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for _ in range(1 + forks):  # also the one that was forked: until it runs it has what the other has
            assert process.stdout.readline() == "ready\n"
        with pytest.raises(PenstockError, match=refusal), owned(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        with owned(tmp_path):
            pass
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)


def test_a_run_waits_until_the_ranks_of_the_one_before_have_ended(tmp_path: Path) -> None:
    begun, order = threading.Event(), []

    def rank() -> None:
        with in_use(tmp_path):
            begun.set()
            time.sleep(0.3)
            order.append("the rank has ended")

    former = threading.Thread(target=rank)
    former.start()
    assert begun.wait(30)
    with owned(tmp_path):
        order.append("the next run begins")
    former.join(30)
    assert order == ["the rank has ended", "the next run begins"]


def test_a_rank_uses_the_folder_from_before_its_job_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probing_job.py").write_text(
        "import fcntl\n"
        "def build():\n"
        f"    with open({str(tmp_path / 'run' / '.ranks')!r}) as file:\n"
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BlockingIOError):
        run_rank(TrainOptions(build="probing_job:build", output=str(tmp_path / "run")))
    with owned(tmp_path / "run"):
        pass
