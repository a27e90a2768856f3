"""After a failure: the rest of the step is got out of the way, without computing, so that nobody is left waiting. And
what is said of a rank that ran out of memory: where, and what it held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from penstock.errors import OutOfMemory, PenstockError
from penstock.plan import AnyAction, Op
from penstock.run.channel import Channel, Poisoned
from penstock.run.program import Program, parts_of


def drain(program: Program, at: int) -> None:
    """Get the actions from `at` on out of the way.

    All remaining messages are posted, then the data-parallel replicas are met where they will wait (and told), then
    the messages are waited for.
    """
    program.abandon()
    for channel in program.channels.values():
        channel.drains = True
    for part in (part for action in program.actions[at:] for part in parts_of(action) if part.op.is_message):
        box = program.message_box(part)
        if box.channel is not None and not box.channel.lost and part.microbatch is not None:
            drains = box.drain_send if part.op.row.sends else box.drain_receive
            _try(box.channel, partial(drains, part.microbatch))
    meet_replicas(program, program.actions[at:])
    for each in program.channels.values():
        while each.incoming and not each.lost:
            _try(each, each.pull)
    for each in program.channels.values():  # only now: the other end may take them when it has pulled from a third
        while each.sent and not each.lost:
            _try(each, partial(each.wait_for_sent, 1))
    for box in program.boxes():
        for work in box.pending():
            if box.channel is not None and not box.channel.lost:
                _try(box.channel, partial(box.channel.wait, work))


def meet_replicas(program: Program, rest: Sequence[AnyAction]) -> None:
    """Data-parallel replicas wait for this rank wherever the rest of the plan says so, and are told there."""
    for part in (part for action in rest for part in parts_of(action)):
        adapter = program.setting.adapters[part.stage]
        with suppress(RuntimeError, PenstockError):  # the step has failed already, and its reason is known
            if part.op is Op.REDUCE_GRAD and adapter.reduces:
                adapter.reduce_grad(failed=True)
            elif part.op is Op.UNSHARD and adapter.sharded:
                adapter.unshard()
            elif part.op is Op.RESHARD and adapter.sharded:
                adapter.reshard()


def _try(channel: Channel, do: Callable[[], object]) -> None:
    """A peer that is gone cannot be drained: from its first error on its channel is left alone."""
    try:
        do()
    except Poisoned:
        return
    except (RuntimeError, PenstockError):
        channel.lost = True


def explained(error: BaseException, actions: Sequence[AnyAction], at: int, *, rank: int) -> OutOfMemory:
    """What to raise instead: it names what was held, and holds nothing itself (a traceback keeps what its frames used)."""
    action = str(actions[at]) if 0 <= at < len(actions) else None
    full, spared = in_flight(actions, at)
    stages = ", ".join(f"{count} of stage {stage}" for stage, count in sorted(full.items()))
    what = f"what the forwards of {full.total()} microbatches saved ({stages})"
    what = what if full else "nothing that forwards of other microbatches saved"
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
    repeated = {(p.stage, p.microbatch) for action in actions for p in parts_of(action) if p.op is Op.R}
    full: dict[tuple[int, int | None], bool] = {}  # by stage and microbatch, whether all of it is held
    for part in (part for action in actions[:at] for part in parts_of(action)):
        one = part.stage, part.microbatch
        if part.op in (Op.F, Op.R, Op.O, Op.L):
            full[one] = part.op is not Op.O and not (part.op is Op.F and one in repeated)
        elif part.op in (Op.B, Op.I):
            full.pop(one, None)
    return Counter(stage for (stage, _), whole in full.items() if whole), list(full.values()).count(False)
