"""Position: where this rank is in its step, found by looking from another thread, so that the steps need not tell. Lookout: a
thread that writes it into a folder, for `penstock top`, and shows it all when SIGUSR1 comes.

lookout = Lookout(transport, "runs/mine")      # on every rank
print(read_folder("runs/mine"))                # in any other process, also when the job is stuck

The runner keeps the number of its action, as it must anyway, and whoever waits for a message notes whose. Whether that action
computes or waits is read off the stack of the thread that runs it: a rank waits when the innermost function is one of
penstock's own messages. A look costs the steps nothing.

Note "Stacks". Frame objects of a running thread may be freed while another thread walks them, and to ask one for its names keeps
alive what they refer to. So the stack is taken from faulthandler, which only writes down where each thread is.
"""

from __future__ import annotations

import faulthandler
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.comm.transport import Transport
from penstock.errors import PenstockError
from penstock.health.position import Whereabouts, table

if TYPE_CHECKING:
    from penstock.plan import AnyAction
    from penstock.run.program import Program

_HERE = Path(__file__).parent.parent
_MESSAGES = (str(_HERE / "comm"), str(_HERE / "run"), threading.__file__)
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)", re.MULTILINE)
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)', re.MULTILINE)
FOLDER = "top"  # in the folder of the run
_TICK = 0.25  # seconds between looks
_STALE = 5.0  # seconds after which what a file says is of the past
_LARGEST = 1 << 16
_SHOWS = threading.Lock()  # held by the one lookout of this process that SIGUSR1 is for
_ONE_STACK = b"first):"  # in the heading of what faulthandler writes


class Position:
    """Where a rank is: the runner sets `program`, `at` and `thread`, others call `look`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.program: Program | None = None  # that of the current step; None between steps
        self.at = -1  # the action of it; -1 before the first, and one beyond the last after it
        self.thread = threading.main_thread().ident or 0
        self._seen: tuple[object, ...] = ()
        self._since = time.monotonic()

    @property
    def action(self) -> AnyAction | None:
        """The action that the rank is in, if it is in one."""
        program, at = self.program, self.at
        return program.actions[at] if program is not None and 0 <= at < len(program.actions) else None

    def look(self, awaited: int | None) -> Whereabouts:
        """Now; `seconds` counts from the first look that found the same. `awaited`: whose message was waited for last."""
        program, at, step, action = self.program, self.at, self.step, self.action
        waits, place = _reading(_stack(self.thread))
        peer = awaited if waits else None
        doing = "waits" if waits else "computes"
        if program is None or action is None:
            doing = "is between steps" if program is None else "begins the step" if at < 0 else "ends the step"
        seen = (step, at, doing, peer)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        total, seconds = len(program.actions) if program is not None and action else 0, time.monotonic() - self._since
        return Whereabouts(self.rank, step, str(action or ""), max(at, 0), total, doing, peer, seconds, place)


def _stack(thread: int) -> list[tuple[str, str, str]]:
    """File, line and function of each call that the thread is in, the innermost first; see the note "Stacks"."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError:  # no room for a file: then it is not known
        return []
    _, *sections = _THREAD.split(text)  # by turns the number of a thread, and its calls
    stacks = {int(number, 16): calls for number, calls in zip(sections[::2], sections[1::2], strict=True)}
    return _CALL.findall(stacks.get(thread, ""))


def _reading(stack: list[tuple[str, str, str]]) -> tuple[bool, str]:
    """Whether a thread waits for a message, and the place in the user's program where it is."""
    waits = bool(stack) and stack[0][0].startswith(_MESSAGES)
    for file, line, function in stack:
        if not file.startswith((str(_HERE), sys.prefix, threading.__file__, "<")):
            return waits, f"{Path(file).name}:{line} in {function}"
    return waits, ""


class Lookout:
    """Writes from when it is made until `close`, or until the transport is gone."""

    def __init__(self, transport: Transport, folder: str | Path) -> None:
        self.folder = Path(folder) / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        if transport.rank == 0:
            for old in self.folder.glob("rank-*.json"):  # of an earlier run with more ranks
                if int("0" + "".join(filter(str.isdigit, old.stem))) >= transport.num_ranks:
                    old.unlink(missing_ok=True)
        self._transport = weakref.ref(transport)
        self._file = self.folder / f"rank-{transport.rank}.json"
        self._put(transport)
        self._stopping = False
        self._bell, self._button = os.pipe()  # whatever is written to the second wakes the thread
        for end in (self._bell, self._button):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._listen, name="penstock lookout", daemon=True)
        self._shows = _hear_signal(self._button)
        self._thread.start()

    def _put(self, transport: Transport) -> None:
        fresh = self._file.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(transport.where().encode())
        fresh.replace(self._file)

    def _listen(self) -> None:
        heard = b""
        while not self._stopping:
            if select.select([self._bell], [], [], _TICK)[0]:
                heard += os.read(self._bell, _LARGEST)
            for _ in range(heard.count(_ONE_STACK)):
                sys.stderr.write(f"{read_folder(self.folder.parent)}\n")
                sys.stderr.flush()
            heard = heard.rpartition(_ONE_STACK)[2][-len(_ONE_STACK) :]
            transport = self._transport()
            if transport is None or self._stopping:
                return
            with suppress(OSError):  # a full disk must not end the job
                self._put(transport)
            del transport

    def close(self) -> None:
        if self._shows:
            self._shows = False
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # else the program has a handler of its own by now
                faulthandler.unregister(signal.SIGUSR1)
            _SHOWS.release()
        self._stopping = True
        with suppress(OSError):
            os.write(self._button, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            for end in (self._bell, self._button):
                with suppress(OSError):
                    os.close(end)
        self._file.unlink(missing_ok=True)


def _hear_signal(button: int) -> bool:
    """Have SIGUSR1 write into the pipe, unless the program has other plans for it, or another lookout hears it; whether it does.

    In a wait of the backend no handler of Python's runs. That of faulthandler does, at once: it writes the stack of the thread
    that the signal interrupts, and that something comes is all that is wanted here.
    """
    if not hasattr(signal, "SIGUSR1") or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return False
    if not _SHOWS.acquire(blocking=False):
        return False
    faulthandler.register(signal.SIGUSR1, file=button, all_threads=False)
    return True


def read_folder(folder: str | Path) -> str:
    """The table of a running job; an error if nobody writes into the folder.

    print(read_folder("runs/train"))
    """
    place = Path(folder) / FOLDER
    found: dict[int, Whereabouts] = {}
    past: list[str] = []
    try:
        files = sorted(place.glob("rank-*.json"))
    except OSError as error:
        raise PenstockError(f"{str(folder)[:200]} cannot be read: {error.strerror}") from error
    for file in files:
        try:
            with file.open("rb") as stream:
                one = Whereabouts.decode(stream.read(_LARGEST))
            age = time.time() - file.stat().st_mtime
        except OSError:
            continue  # the rank ends just now
        found[one.rank] = one
        if age > _STALE:
            past.append(
                f"rank {one.rank} has written nothing for {age:.0f} s: it has ended, is stopped, or its disk is full"
            )
    if not found:
        raise PenstockError(
            f"{folder} has no running job: give the output folder of a `penstock train` that runs, or that of "
            "Pipeline(run_folder=...)"
        )
    return "\n".join([table(list(found.values()), num_ranks=max(found) + 1), *past])
