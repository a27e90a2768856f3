"""What is said of a rank that ran out of memory: where, and what it held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.errors import OutOfMemory
from penstock.plan import AnyAction, Op
from penstock.run.program import parts_of


def explained(error: BaseException, actions: Sequence[AnyAction], at: int, *, rank: int) -> OutOfMemory:
    """What to raise instead: it names what was held, and holds nothing itself (a traceback keeps what its frames used)."""
    action = str(actions[at]) if 0 <= at < len(actions) else None
    held, spared = in_flight(actions[:at])
    stages = ", ".join(f"{count} of stage {stage}" for stage, count in sorted(held.items()))
    what = (
        f"what the forwards of {held.total()} microbatches saved ({stages})"
        if held
        else "nothing of other microbatches"
    )
    less = f"; {spared} of them are recomputed or offloaded already" if spared else ""
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return OutOfMemory(rank, action, f"{cause}. It held {what}{less}")


def in_flight(done: Sequence[AnyAction]) -> tuple[Counter[int], int]:
    """By stage, how many microbatches wait for their backward after these actions; and how many of all hold less."""
    held: Counter[int] = Counter()
    spared: set[tuple[int, int | None]] = set()
    for action in done:
        for part in parts_of(action):
            if part.op is Op.F:
                held[part.stage] += 1
            elif part.op in (Op.B, Op.I):
                held[part.stage] -= 1
                spared.discard((part.stage, part.microbatch))
            elif part.op in (Op.R, Op.O):
                spared.add((part.stage, part.microbatch))
    return +held, len(spared)
