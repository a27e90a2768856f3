"""Position: where this rank is in its step, found by looking from another thread, so that the steps need not tell.

The runner keeps the number of its action, as it must anyway. Whether that action computes or waits is read off the stack of the
thread that runs it: a rank waits when the innermost function is one of penstock's own messages. A look costs the steps nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.comm.whereabouts import Whereabouts

if TYPE_CHECKING:
    from penstock.run.program import Program

_HERE = Path(__file__).parent.parent
_MESSAGES = (str(_HERE / "comm"), str(_HERE / "run"), threading.__file__)
_DEPTH = 16  # frames that are looked at for the name of a peer


class Position:
    """Where a rank is: the runner sets `program`, `at` and `thread`, others call `look`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.program: Program | None = None  # that of the current step; None between steps
        self.at = -1  # the action of it; -1 before the first, and one beyond the last after it
        self.thread = threading.main_thread().ident or 0
        self._seen: tuple[Any, ...] = ()
        self._since = time.monotonic()

    def look(self) -> Whereabouts:
        """Now; `seconds` counts from the first look that found the same."""
        program, at, step = self.program, self.at, self.step
        frame = sys._current_frames().get(self.thread)
        waits, peer, place = _reading(frame)
        action, total, doing = "", 0, "waits" if waits else "computes"
        if program is None:
            doing, peer = "is between steps", peer if waits else None
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


def _reading(frame: FrameType | None) -> tuple[bool, int | None, str]:
    """Whether a thread waits for a message, for whose, and the place in the user's program where it is."""
    if frame is None:
        return False, None, ""
    waits = frame.f_code.co_filename.startswith(_MESSAGES)
    peer, place, depth = None, "", 0
    walked: FrameType | None = frame
    while walked is not None and not place:
        file = walked.f_code.co_filename
        if waits and peer is None and depth < _DEPTH:
            peer = _peer_in(walked)
        if not file.startswith((str(_HERE), sys.prefix, threading.__file__, "<")):
            place = f"{Path(file).name}:{walked.f_lineno} in {walked.f_code.co_name}"
        walked, depth = walked.f_back, depth + 1
    return waits, peer, place


def _peer_in(frame: FrameType) -> int | None:
    """The rank that a function of penstock's waits for, if it says so."""
    names = frame.f_locals
    owner = names.get("self")
    for found in (
        names.get("peer"),
        names.get("child"),
        getattr(owner, "peer", None),
        getattr(owner, "_peer", None),
        getattr(getattr(owner, "channel", None), "peer", None),
        getattr(owner, "parent", None),
    ):
        if isinstance(found, int):
            return found
    return None
