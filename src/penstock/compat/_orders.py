"""Orders in the words of torch.distributed.pipelining: dictionaries from rank to lists of named actions, None an idle slot.

>>> NamedAction.from_str("2SEND_B1")
2SEND_B1
>>> NamedAction(2, ComputationType.SEND_B, 1) == NamedAction.from_str("2SEND_B1")
True
>>> packed(named([0x2000023])) == [0x2000023]
True

Programs build, read and compare these; penstock itself speaks of `Action` and `Overlap`. Messages are put where torch puts
them into its lists. The ranks take turns, one action each; a send follows its action at once, and its receive is appended, at
that very moment, to the list of the rank at the other end. So all lists together follow one sequence in which no receive
comes before its send, and receives may even block. `penstock.lower.Early` posts receives sooner; this order is what existing
programs load, save and compare.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from itertools import count, zip_longest
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.errors import DeadlockError, IncompleteError, OrderError, ParseError, PlanError
from penstock.lower.merge_backward import merge
from penstock.lower.reduce_grad_pass import reduce_grad
from penstock.lower.unshard_pass import unshard_reshard
from penstock.plan import Action, AnyAction, Overlap, Placement, Plan, Rules, StageGraph, check, pack, parse, unpack
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts, peer_of, stage_of, text, with_op
from penstock.plan.ops import INPUT_GRADIENTS, RECEIVES, ROWS, SENDS, Op


class ComputationType(StrEnum):
    """The kinds of action; the value is how it is written."""

    FORWARD = "F"
    FULL_BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    OVERLAP_F_B = "OVERLAP_F_B"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    RECV_F = "RECV_F"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> ComputationType:
        try:
            return ComputationType(action)
        except ValueError:
            known = ", ".join(kind.value for kind in ComputationType)
            raise ParseError(f"{action!r} is no kind of action; expected one of {known}") from None


# What penstock calls each kind of action; an overlapped pair is a type of its own.
OPS: dict[ComputationType, Op] = {kind: Op[kind] for kind in ComputationType if kind != "OVERLAP_F_B"}
_KINDS = {op: kind for kind, op in OPS.items()}


class NamedAction(NamedTuple):
    """One action. An overlapped pair has `sub_actions`, and then stage and microbatch mean nothing."""

    stage_index: int
    computation_type: ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[NamedAction, ...] | None = None

    def __repr__(self) -> str:
        kind = self.computation_type.value
        if self.sub_actions is not None:
            return f"({';'.join(map(str, self.sub_actions))}){kind}"
        return f"{self.stage_index}{kind}{'' if self.microbatch_index is None else self.microbatch_index}"

    @property
    def is_compute_op(self) -> bool:
        op = OPS.get(self.computation_type)
        return op is None or op.is_compute

    @property
    def leaves(self) -> tuple[NamedAction, ...]:
        """The action itself, or the actions of a pair."""
        return (self,) if self.sub_actions is None else self.sub_actions

    @staticmethod
    def from_str(action_string: str) -> NamedAction | None:
        """Read one action; a blank text is an idle slot. Strict: nothing may stand behind the action."""
        return of_action(parse(action_string)) if action_string.strip() else None


Actions = Sequence[NamedAction | None]
Order = Mapping[int, Actions]
OrderDict = dict[int, list[NamedAction | None]]


def of_action(action: AnyAction) -> NamedAction:
    if isinstance(action, Overlap):
        pair = of_action(action.first), of_action(action.second)
        return NamedAction(-1, ComputationType.OVERLAP_F_B, None, pair)
    if action.op not in _KINDS:
        raise PlanError(f"{action}: torch has no word for {action.op.row.word}; it has {', '.join(_KINDS.values())}")
    return NamedAction(action.stage, _KINDS[action.op], action.microbatch)


def to_action(action: NamedAction) -> AnyAction:
    singles = [Action(OPS[leaf.computation_type], leaf.stage_index, leaf.microbatch_index) for leaf in action.leaves]
    if action.sub_actions is None:
        return singles[0]
    if len(singles) != 2:
        raise PlanError(f"{action} overlaps {len(singles)} actions; expected a forward and a backward")
    return Overlap(*singles)


def named(codes: Iterable[int]) -> list[NamedAction | None]:
    """The packed list of a rank in these words."""
    return [of_action(unpack(code)) for code in codes]


def packed(actions: Actions) -> list[int]:
    """The list of a rank, packed; idle slots are left out."""
    return [pack(to_action(action)) for action in actions if action is not None]


def leaves_of(rows: Iterable[Actions]) -> Iterator[NamedAction]:
    """The actions of some ranks, and those of pairs one by one."""
    return (leaf for row in rows for action in row if action is not None for leaf in action.leaves)


def plan_of(order: Order, *, num_microbatches: int, num_stages: int) -> Plan:
    """The plan that an order spells out."""
    if sorted(order) != list(range(len(order))):
        raise PlanError(f"an order for the ranks {sorted(order)}; expected every rank from 0 to {len(order) - 1}")
    homes = {leaf.stage_index: rank for rank, row in order.items() for leaf in leaves_of([row])}
    missing = [stage for stage in range(num_stages) if stage not in homes]
    if missing:
        raise PlanError(f"no rank has an action of stage {missing[0]}; expected stages 0 to {num_stages - 1}")
    placement = Placement.of([homes[stage] for stage in range(num_stages)])
    rows = [packed(order[rank]) for rank in range(len(order))]
    return Plan.of(rows, placement=placement, num_microbatches=num_microbatches)


Mapped = Callable[[int], int]  # to the rank of a stage, or to the stage of a slot
T = TypeVar("T")


def add_send_recv(compute_actions: Order, stage_to_rank: Mapped, num_stages: int) -> OrderDict:
    """The order with its messages, for a chain of stages. The one that is given stays as it is. An idle slot: a turn passed up.

    >>> rows = ("0F0", "0B0"), ("1F0", "1B0")
    >>> add_send_recv({rank: [*map(NamedAction.from_str, row)] for rank, row in enumerate(rows)}, lambda stage: stage, 2)
    {0: [0F0, 0SEND_F0, 0RECV_B0, 0B0], 1: [1RECV_F0, 1F0, 1B0, 1SEND_B0]}
    """
    codes = {rank: [action and pack(to_action(action)) for action in row] for rank, row in compute_actions.items()}
    rules = _chain(stage_to_rank, num_stages)
    arrivals, sends = cache(lambda key: tuple(rules.arrivals(key))), cache(rules.sends)
    lists: dict[int, list[int]] = {rank: [] for rank in codes}
    there: dict[int, set[int]] = {rank: set() for rank in codes}  # what has arrived or was computed, as needs

    def turn(rank: int, code: int | None, _: int) -> bool:
        if code is None:
            return True
        if not there[rank].issuperset(_needs(code, arrivals)):
            return False
        lists[rank].append(code)
        for part in parts(code):
            there[rank].add(with_op(part, Op.I) if part & OP in INPUT_GRADIENTS else part)
            for key in sends(part & KEY):
                send = key | part & MICROBATCH_FIELD
                receive = partner_of(send)
                home = stage_to_rank(stage_of(receive))
                lists[rank].append(send)
                lists[home].append(receive)
                there[home].add(receive)
        return True

    if stuck := _take_turns(codes, turn):
        rank = min(stuck)
        raise OrderError(
            f"rank {rank} cannot go on at {text(stuck[rank] or 0)}: its input never comes; expected an order in which every "
            "action follows what it needs"
        )
    return {rank: named(row) for rank, row in lists.items()}


def _needs(code: int, of_key: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """What a packed action needs of its own microbatch, or of their own the parts of a pair; `of_key` says what that is."""
    return (need | part & MICROBATCH_FIELD for part in parts(code) for need in of_key(part & KEY))


def _take_turns(
    rows: Mapping[int, Sequence[T]], turn: Callable[[int, T, int], bool], *, chances: int = 1
) -> dict[int, T]:
    """Round by round, each rank in turn tries its next action, `chances` times in a round; `turn(rank, action, round)` does
    it and says whether it could. What the ranks are left with when none can go on comes back: nothing, if all is done.
    """
    at = dict.fromkeys(sorted(rows), 0)
    number = 0
    while left := {rank: rows[rank][place] for rank, place in at.items() if place < len(rows[rank])}:
        acted: set[int] = set()
        for rank in (*left,) * chances:
            if rank not in acted and turn(rank, left[rank], number):
                acted.add(rank)
                at[rank] += 1
        if not acted:
            break
        number += 1
    return left


def defer_recv_ops(actions: Order, stage_to_rank: Mapped) -> OrderDict:
    """Move each receive down to the action that uses it; the lower of two ranks still receives before it sends."""
    rows = {rank: packed(row) for rank, row in actions.items()}
    stages = (max(stage_of(part), peer_of(part)) for row in rows.values() for code in row for part in parts(code))
    rules = _chain(stage_to_rank, 1 + max(stages, default=0))
    return {rank: named(_deferred(rank, row, rules)) for rank, row in rows.items()}


def _chain(rank_of: Mapped, num_stages: int) -> Rules:
    """What precedes what in a chain of stages with messages."""
    placement = Placement.of([rank_of(stage) for stage in range(num_stages)])
    return Rules(StageGraph.chain(num_stages), placement, lowered=True)


def _deferred(rank: int, row: Sequence[int], rules: Rules) -> list[int]:
    rank_of = rules.placement.rank_of
    held: dict[int, None] = {}  # in order
    lowered: list[int] = []
    for code in row:
        if code & OP in RECEIVES:
            held[code] = None
            continue
        if code & OP in SENDS and rank < (peer := rank_of(peer_of(code))):
            due = [receive for receive in held if rank_of(peer_of(receive)) == peer]
        else:
            due = [need for need in _needs(code, rules.arrivals) if need in held]
        for receive in due:
            del held[receive]
        lowered += (*due, code)
    if held:
        unused = text(next(iter(held)))
        raise OrderError(f"rank {rank} receives {unused} and never uses it; expected a forward or backward for it")
    return lowered


def add_reduce_grad(actions: Actions, n_microbatches: int) -> list[NamedAction | None]:
    """REDUCE_GRAD after the last backward of each stage."""
    return named(reduce_grad(packed(actions), n_microbatches))


def add_unshard_reshard(compute_actions: Actions, max_active_stages: int = 3) -> list[NamedAction | None]:
    """UNSHARD before the use of a stage, RESHARD after it."""
    return named(unshard_reshard(packed(compute_actions), max_active_stages))


def merge_bw(compute_actions: Actions) -> list[NamedAction | None]:
    """An I and the W that follows it become a B. The list that is given stays as it is."""
    return named(merge(packed(compute_actions), {leaf.stage_index for leaf in leaves_of([compute_actions])}))


def simulate_comms_compute(pipeline_order: Order, stage_to_rank: Mapped, num_stages: int) -> OrderDict:
    """Work through a lowered order in lockstep, one slot an action: which rank does what in which slot, None where it waits.

    A rank that waits gets a second chance in the same slot, after all others. penstock's own clock is `penstock.simulate`.
    """
    rules = _chain(stage_to_rank, num_stages)
    rows = {rank: packed(pipeline_order[rank]) for rank in sorted(pipeline_order)}
    slots: OrderDict = {rank: [] for rank in rows}
    done: set[int] = set()

    def turn(rank: int, code: int, slot: int) -> bool:
        if not done.issuperset(_needs(code, rules.needs)):
            return False
        slots[rank] += (*[None] * (slot - len(slots[rank])), *named([code]))
        for part in parts(code):
            done.update((part, *(with_op(part, half) for half in ROWS[part & OP].halves)))
        return True

    if stuck := _take_turns(rows, turn, chances=2):
        waiting = ", ".join(f"rank {rank} at {text(code)}" for rank, code in stuck.items())
        raise DeadlockError(f"Schedule is not progressing: {waiting} wait for ever")
    return slots


def validate_schedule(actions: Order, pp_group_size: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    """Prove an order complete and free of deadlocks; the rank of each stage."""
    if sorted(actions) != list(range(pp_group_size)):
        raise IncompleteError(f"an order for the ranks {sorted(actions)}; expected the ranks 0 to {pp_group_size - 1}")
    try:
        plan = plan_of(actions, num_microbatches=num_microbatches, num_stages=num_stages)
        check(plan)
    except PlanError as error:
        raise error if isinstance(error, AssertionError) else IncompleteError(str(error)) from error
    if not plan.has_backward:
        raise IncompleteError("an order without a backward; expected a B, or an I and a W, for every F")
    return dict(enumerate(plan.placement.ranks))


def format_pipeline_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """A table: a row a step, a column a rank."""
    steps = range(max(map(len, pipeline_order.values()), default=0))
    digits = len(str(max(len(steps) - 1, 0)))
    columns = [["", *(f"Step {step:0{digits}}:" for step in steps)]]
    columns += [[f"Rank {rank}", *(str(one or "") for one in row)] for rank, row in sorted(pipeline_order.items())]
    widths = [max(map(len, column)) for column in columns]
    lines = [" ".join(map(str.ljust, row, widths)).rstrip() for row in zip_longest(*columns, fillvalue="")]
    if error_step_number is not None and error_step_number in steps:
        lines[1 + error_step_number] += " <-- ERROR HERE"
    return "\n".join(lines) + "\n"


def dump_chrometrace(schedule: Order, filename: str | PathLike[str]) -> None:
    """Write an order, a slot a microsecond, as a trace that chrome://tracing and Perfetto show."""
    slots = ((rank, step, action) for rank in sorted(schedule) for step, action in enumerate(schedule[rank]) if action)
    events = []
    for rank, step, action in slots:
        kind = "computation" if action.is_compute_op else "communication"
        events.append({"name": str(action), "cat": kind, "ph": "X", "pid": rank, "tid": rank, "ts": step, "dur": 1})
    Path(filename).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def get_warmup_ops(
    rank: int,  # in the group
    n_local_stages: int,  # on this rank
    microbatches_per_round: int,  # that one stage takes before the next one of the rank
    pp_group_size: int,
    n_microbatches: int,  # of a step
    multiply_factor: int = 2,  # forwards for each hop to the last rank
) -> int:
    """How many forwards a rank does before its first backward."""
    wanted = (n_local_stages - 1) * microbatches_per_round + multiply_factor * (pp_group_size - 1 - rank)
    return min(wanted, n_microbatches * n_local_stages)


def get_1f1b_rank_ops(
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: Mapped,
    backward_stage_index: Mapped,
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> list[NamedAction | None]:
    """Forwards, then a forward and a backward in turn, then backwards; with `enable_zero_bubble` weights come later."""
    slots: list[tuple[int, ComputationType] | None] = [None] * rank  # None: idle
    hops = pp_group_size - 1 - rank
    aligned = n_local_stages * pp_group_size + 2 * hops - warmup_ops - rank
    kind = ComputationType.BACKWARD_INPUT if enable_zero_bubble else ComputationType.FULL_BACKWARD
    owed: list[int] = []  # stages whose weight work waits, the oldest first
    for at in range(warmup_ops + fwd_bwd_ops + cooldown_ops):
        if at < warmup_ops + fwd_bwd_ops:
            slots.append((forward_stage_index(at), ComputationType.FORWARD))
        elif not enable_zero_bubble:
            slots.append(None)
        if at == warmup_ops - 1:
            slots += [None] * (hops if enable_zero_bubble else aligned)
        if at >= warmup_ops:
            slots.append((backward_stage_index(at), kind))
            owed.append(backward_stage_index(at))
            if enable_zero_bubble and at - warmup_ops >= num_1f1b_microbatches:
                slots.append((owed.pop(0), ComputationType.BACKWARD_WEIGHT))
    slots += [(stage, ComputationType.BACKWARD_WEIGHT) for stage in owed if enable_zero_bubble]
    # The number of the next microbatch, by stage and kind.
    microbatches: defaultdict[tuple[int, ComputationType], Iterator[int]] = defaultdict(count)
    return [slot and NamedAction(*slot, next(microbatches[slot])) for slot in slots]
