"""Actions in the words of torch.distributed.pipelining: what programs written for it build, read and compare.

>>> NamedAction.from_str("2SEND_B1")
2SEND_B1
>>> NamedAction(2, ComputationType.SEND_B, 1) == NamedAction.from_str("2SEND_B1")
True
>>> to_code(of_code(0x2000023)) == 0x2000023
True

penstock itself speaks of `Action` and `Overlap`. An *order* is a dictionary from rank to a list of these named actions,
in which None is an idle slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from penstock.errors import ParseError, PlanError
from penstock.plan.actions import Action, AnyAction, Overlap, pack, parse, unpack
from penstock.plan.ops import Op
from penstock.plan.placement import Placement
from penstock.plan.plan import Plan


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


_OPS: dict[ComputationType, Op] = {
    kind: Op[kind.value] for kind in ComputationType if kind is not ComputationType.OVERLAP_F_B
}
_KINDS = {op: kind for kind, op in _OPS.items()}


class NamedAction(NamedTuple):
    """One action. An overlapped pair has `sub_actions`, and then stage and microbatch mean nothing."""

    stage_index: int
    computation_type: ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[NamedAction, ...] | None = None

    def __str__(self) -> str:
        kind = self.computation_type.value
        if self.sub_actions is not None:
            return f"({';'.join(map(str, self.sub_actions))}){kind}"
        return f"{self.stage_index}{kind}{'' if self.microbatch_index is None else self.microbatch_index}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_compute_op(self) -> bool:
        op = to_op(self.computation_type)
        return not isinstance(op, Op) or op.is_compute

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
        raise PlanError(
            f"{action}: torch has no word for {action.op.row.word}; expected one of {', '.join(_KINDS.values())}"
        )
    return NamedAction(action.stage, _KINDS[action.op], action.microbatch)


def to_op(kind: ComputationType) -> Op | type[Overlap]:
    """What penstock calls a kind of action."""
    return Overlap if kind is ComputationType.OVERLAP_F_B else _OPS[kind]


def of_code(code: int) -> NamedAction:
    """A packed action in these words."""
    return of_action(unpack(code))


def to_action(action: NamedAction) -> AnyAction:
    if action.sub_actions is None:
        return _single(action)
    if len(action.sub_actions) != 2:
        raise PlanError(f"{action} overlaps {len(action.sub_actions)} actions; expected a forward and a backward")
    return Overlap(*map(_single, action.sub_actions))


def _single(action: NamedAction) -> Action:
    return Action(_OPS[action.computation_type], action.stage_index, action.microbatch_index)


def to_code(action: NamedAction) -> int:
    """A named action, packed."""
    return pack(to_action(action))


def named(codes: Iterable[int]) -> list[NamedAction | None]:
    """The packed list of a rank in these words."""
    return [of_code(code) for code in codes]


def packed(actions: Actions) -> list[int]:
    """The list of a rank, packed; idle slots are left out."""
    return [to_code(action) for action in actions if action is not None]


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
