"""Position: where this rank is in its step, found by looking from another thread, so that the steps need not tell.

The runner keeps the number of its action, as it must anyway, and whoever waits for a message notes whose. Whether that action
computes or waits is read off the stack of the thread that runs it: a rank waits when the innermost function is one of
penstock's own messages. A look costs the steps nothing.

Note "Stacks". Frame objects of a running thread may be freed while another thread walks them, and to ask one for its names keeps
alive what they refer to. So the stack is taken from faulthandler, which only writes down where each thread is.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.comm.whereabouts import Whereabouts

if TYPE_CHECKING:
    from penstock.run.program import Program

_HERE = Path(__file__).parent.parent
_MESSAGES = (str(_HERE / "comm"), str(_HERE / "run"), threading.__file__)
_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


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

    def look(self, awaited: int | None) -> Whereabouts:
        """Now; `seconds` counts from the first look that found the same. `awaited`: whose message was waited for last."""
        program, at, step = self.program, self.at, self.step
        waits, place = _reading(_stack(self.thread))
        peer = awaited if waits else None
        action, total, doing = "", 0, "waits" if waits else "computes"
        if program is None:
            doing = "is between steps"
        elif 0 <= at < len(program.actions):
            action, total = str(program.actions[at]), len(program.actions)
        else:
            doing = "begins the step" if at < 0 else "ends the step"
        seen = (step, at, doing, peer)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return Whereabouts(
            self.rank, step, action, max(at, 0), total, doing, peer, time.monotonic() - self._since, place
        )


def _stack(thread: int) -> list[tuple[str, str, str]]:
    """File, line and function of each call that the thread is in, the innermost first; see the note "Stacks"."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError:  # no room for a file: then it is not known
        return []
    found: list[tuple[str, str, str]] = []
    ours = False
    for line in text.splitlines():
        if header := _THREAD.match(line):
            ours = int(header[1], 16) == thread
        elif ours and (call := _CALL.match(line)):
            found.append((call[1], call[2], call[3]))
    return found


def _reading(stack: list[tuple[str, str, str]]) -> tuple[bool, str]:
    """Whether a thread waits for a message, and the place in the user's program where it is."""
    waits = bool(stack) and stack[0][0].startswith(_MESSAGES)
    for file, line, function in stack:
        if not file.startswith((str(_HERE), sys.prefix, threading.__file__, "<")):
            return waits, f"{Path(file).name}:{line} in {function}"
    return waits, ""
