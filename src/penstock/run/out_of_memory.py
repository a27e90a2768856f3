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
    full, spared = in_flight(actions, at)
    stages = ", ".join(f"{count} of stage {stage}" for stage, count in sorted(full.items()))
    what = (
        f"what the forwards of {full.total()} microbatches saved ({stages})"
        if full
        else "nothing that forwards of other microbatches saved"
    )
    less = f"; of {spared} more only what is left until they are recomputed or loaded" if spared else ""
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return OutOfMemory(rank, action, f"{cause}. It held {what}{less}")


def in_flight(actions: Sequence[AnyAction], at: int) -> tuple[Counter[int], int]:
    """Before the action at this place: by stage, of how many microbatches all is held that the forward saved; and of how many,
    of all stages, less. Those are to be recomputed and were not yet, or are offloaded and were not loaded yet.

    >>> from penstock.plan import Plan
    >>> actions = Plan.of({0: ["0F0", "0F1", "0R0", "0B0", "0R1", "0B1"]}).actions(0)
    >>> [in_flight(actions, at) for at in (2, 3)]
    [(Counter(), 2), (Counter({0: 1}), 1)]
    """
    everything = [part for action in actions for part in parts_of(action)]
    repeated = {(part.stage, part.microbatch) for part in everything if part.op is Op.R}
    full: set[tuple[int, int | None]] = set()
    spared: set[tuple[int, int | None]] = set()
    for part in (part for action in actions[:at] for part in parts_of(action)):
        one = part.stage, part.microbatch
        if part.op is Op.O or (part.op is Op.F and one in repeated):
            full.discard(one)
            spared.add(one)
        elif part.op in (Op.F, Op.R, Op.L):
            spared.discard(one)
            full.add(one)
        elif part.op in (Op.B, Op.I):
            full.discard(one)
    return Counter(stage for stage, _ in full), len(spared)
