"""Actions: what a rank can do, their text, and their packed form.

    >>> action = parse("1SEND_F3")
    >>> action
    Action(op=<Op.SEND_F: 4>, stage=1, microbatch=3, peer=None)
    >>> str(action)
    '1SEND_F3'
    >>> unpack(action.code) == action
    True

An action is a small value. Plans of a million actions hold them *packed*, as one int each, and unpack them when
somebody looks. The fields of a packed action, from the lowest bit::

    op         5 bits     an Op; OVERLAP stands for an overlapped pair
    stage     20 bits
    microbatch 24 bits    0 where the op has none
    peer      21 bits     0, or 1 + the stage at the other end of a message that skips stages

A packed overlapped pair is OVERLAP in the lowest bits, then its two actions, 49 bits each. What is left of an action
without its microbatch (`code & KEY`) is its *key*: the rules of precedence are stated over keys, because everything
that an action needs belongs to its own microbatch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from penstock.errors import ParseError, PlanError
from penstock.plan.ops import COUNTED, INPUT_GRADIENTS, OVERLAP, ROWS, Op

STAGE_SHIFT: Final = 5
MICROBATCH_SHIFT: Final = STAGE_SHIFT + 20
PEER_SHIFT: Final = MICROBATCH_SHIFT + 24
OP: Final = (1 << STAGE_SHIFT) - 1
STAGE: Final = 0xFFFFF
MICROBATCH: Final = 0xFFFFFF
MICROBATCH_FIELD: Final = MICROBATCH << MICROBATCH_SHIFT
KEY: Final = ~MICROBATCH_FIELD
MAX_STAGE: Final = STAGE
MAX_MICROBATCH: Final = MICROBATCH


class Action(NamedTuple):
    """One thing that one rank does, on one stage, for one microbatch.

        str(Action(Op.F, 2, 0))  # "2F0"

    `peer` is the stage at the other end of a message, and None when that is the neighbouring stage.
    """

    op: Op
    stage: int
    microbatch: int | None = None
    peer: int | None = None

    @property
    def code(self) -> int:
        """The packed form."""
        return pack(self)

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.name}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.peer is not None:
            text += (">" if self.op.row.sends else "<") + str(self.peer)
        return text


class Overlap(NamedTuple):
    """A forward and a backward that run in one slot, so that one hides the communication of the other.

    Overlap(Action(Op.F, 0, 3), Action(Op.B, 3, 1))  # (0F3;3B1)OVERLAP_F_B
    """

    first: Action
    second: Action

    @property
    def code(self) -> int:
        return pack(self)

    def __str__(self) -> str:
        return f"({self.first};{self.second})OVERLAP_F_B"


AnyAction = Action | Overlap

_OPS: Final = tuple(Op)
_ACTION = re.compile(r"([0-9]+)([A-Z_]+?)([0-9]*)(?:([<>])([0-9]+))?")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def key_of(op: Op, stage: int, peer: int | None = None) -> int:
    """The packed form without a microbatch. A peer that is the neighbour needs no mention."""
    key = op | stage << STAGE_SHIFT
    if peer is not None and peer != neighbour(op, stage):
        key |= (peer + 1) << PEER_SHIFT
    return key


def with_op(code: int, op: int) -> int:
    """The packed action (or key) of another op on the same stage and microbatch."""
    return code & ~OP | op


def stage_of(code: int) -> int:
    """The stage of a packed action."""
    return code >> STAGE_SHIFT & STAGE


def microbatch_of(code: int) -> int:
    """The microbatch of a packed action."""
    return code >> MICROBATCH_SHIFT & MICROBATCH


def neighbour(op: Op, stage: int) -> int:
    """The stage at the other end of a message that skips nothing."""
    return stage + op.row.peer


def peer_of(code: int) -> int:
    """The stage at the other end of a packed message."""
    peer = code >> PEER_SHIFT
    return peer - 1 if peer else (code >> STAGE_SHIFT & STAGE) + ROWS[code & OP].peer


# From a message between neighbours to its other half: SEND_F(s) <-> RECV_F(s + 1), SEND_B(s) <-> RECV_B(s - 1).
_ACROSS: Final = tuple(
    0 if row.partner is None else row.partner - op + row.peer * (1 << STAGE_SHIFT) for op, row in enumerate(ROWS)
)


def partner_of(code: int) -> int:
    """The other half of a packed message: its receive for a send, its send for a receive."""
    if not code >> PEER_SHIFT:
        return code + _ACROSS[code & OP]
    partner = ROWS[code & OP].partner
    assert partner is not None, f"{text(code)} is no message"
    return key_of(partner, peer_of(code), stage_of(code)) | code & MICROBATCH_FIELD


def pack(action: AnyAction) -> int:
    """An action as one int.

    pack(Action(Op.F, 2, 0))  # the int that a plan holds
    """
    if isinstance(action, Overlap):
        return overlap(pack(action.first), pack(action.second))
    try:
        op, stage, microbatch, peer = action
        if 0 <= stage <= MAX_STAGE and 0 <= (microbatch or 0) <= MAX_MICROBATCH and -1 <= (peer or 0) <= MAX_STAGE:
            return key_of(op, stage, peer) | (microbatch or 0) << MICROBATCH_SHIFT
    except (TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"pack({action!r:.80}); expected an action, such as Action(Op.F, 2, 0)") from error
    raise PlanError(f"{action!r}: stages go from 0 to {MAX_STAGE}, microbatches from 0 to {MAX_MICROBATCH}")


def unpack(code: int) -> AnyAction:
    """The readable action of an int.

    str(unpack(forward(2, 0)))  # "2F0"
    """
    try:
        return Overlap(*map(_unpack_single, split_overlap(code))) if code & OP == OVERLAP else _unpack_single(code)
    except (TypeError, IndexError, RuntimeError) as error:
        raise PlanError(f"unpack({code!r:.80}); expected a packed action, such as Action(Op.F, 2, 0).code") from error


def _unpack_single(code: int) -> Action:
    op = _OPS[code & OP]
    peer = code >> PEER_SHIFT
    microbatch = code >> MICROBATCH_SHIFT & MICROBATCH if op.has_microbatch else None
    return Action(op, code >> STAGE_SHIFT & STAGE, microbatch, peer - 1 if peer else None)


def split_overlap(code: int) -> tuple[int, int]:
    """The two packed actions of a packed overlapped pair."""
    return code >> STAGE_SHIFT & (1 << PEER_SHIFT) - 1, code >> (STAGE_SHIFT + PEER_SHIFT)


def parts(code: int) -> tuple[int, ...]:
    """The packed actions in one slot: one, or the two of an overlapped pair."""
    return split_overlap(code) if code & OP == OVERLAP else (code,)


def overlap(first: int, second: int) -> int:
    """An overlapped pair of two packed actions."""
    return OVERLAP | first << STAGE_SHIFT | second << (STAGE_SHIFT + PEER_SHIFT)


def below(num_microbatches: int, codes: Iterable[int]) -> list[int]:
    """Only the actions on the first microbatches; of an overlapped pair the half that is left.

    What an action needs belongs to its own microbatch, so an order stays right when whole microbatches are left out.
    """
    limit = num_microbatches << MICROBATCH_SHIFT  # pairs, and messages that skip stages, are above it as well
    kept: list[int] = []
    for code in codes:
        if code < limit:
            kept.append(code)
        else:
            left = [part for part in parts(code) if microbatch_of(part) < num_microbatches]
            kept += left if len(left) < 2 else [code]
    return kept


def is_pair(kinds: Collection[int]) -> bool:
    """Return True if these ops may overlap: a forward and a backward that computes input gradients."""
    return Op.F in kinds and not INPUT_GRADIENTS.isdisjoint(kinds)


_F, _I, _W, _B = map(int, (Op.F, Op.I, Op.W, Op.B))


def forward(stage: int, microbatch: int) -> int:
    """A packed F."""
    return _F | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def backward_input(stage: int, microbatch: int) -> int:
    """A packed I."""
    return _I | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def backward_weight(stage: int, microbatch: int) -> int:
    """A packed W."""
    return _W | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def backward(stage: int, microbatch: int) -> int:
    """A packed B."""
    return _B | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def text(code: int) -> str:
    """The text of a packed action: ``text(pack(a)) == str(a)``."""
    if code >> PEER_SHIFT or code & OP not in COUNTED:
        return str(unpack(code))
    return f"{_head(code & KEY)}{code >> MICROBATCH_SHIFT & MICROBATCH}"


@lru_cache(maxsize=4096)
def _head(key: int) -> str:
    """The text of an action before its microbatch."""
    return f"{stage_of(key)}{_OPS[key & OP].name}"


def parse(string: str) -> AnyAction:
    """Read one action. Strict: the whole text must be one action, nothing before or after it.

    >>> parse("(0F1;3B0)OVERLAP_F_B").second
    Action(op=<Op.B: 3>, stage=3, microbatch=0, peer=None)
    """
    if not isinstance(string, str):
        raise ParseError(f"parse({string!r}); expected the text of an action, such as '0F1'")
    stripped = string.strip()
    if pair := _PAIR.fullmatch(stripped):
        first, second = _parse_single(pair[1].strip()), _parse_single(pair[2].strip())
        if not is_pair((first.op, second.op)):
            raise ParseError(f"{string!r} overlaps {first.op.name} with {second.op.name}; expected an F and a B (or I)")
        return Overlap(first, second)
    return _parse_single(stripped)


def _parse_single(string: str) -> Action:
    expected = "expected [stage][kind][microbatch], such as 2F0, 1SEND_F3 or 0UNSHARD"
    match = _ACTION.fullmatch(string)
    if match is None:
        raise ParseError(f"{_short(string)!r} is no action; {expected}")
    stage, name, microbatch, arrow, peer = match.groups()
    op = Op.__members__.get(name)
    if op is None:
        kinds = ", ".join(Op.__members__)
        raise ParseError(f"{_short(string)!r} has the unknown kind {_short(name)!r}; expected one of {kinds}")
    if op.has_microbatch != bool(microbatch):
        raise ParseError(f"{string!r}: {op.name} takes {'a' if op.has_microbatch else 'no'} microbatch; {expected}")
    if arrow and (not op.is_message or (arrow == ">") != op.row.sends):
        raise ParseError(f"{string!r}: only a send may name where it goes (>), only a receive whence it comes (<)")
    if _above(stage, MAX_STAGE) or _above(microbatch, MAX_MICROBATCH) or _above(peer, MAX_STAGE):
        limits = f"stages go up to {MAX_STAGE}, microbatches up to {MAX_MICROBATCH}"
        raise ParseError(f"{_short(string)!r} is out of range: {limits}")
    other = int(peer) if peer and int(peer) != neighbour(op, int(stage)) else None
    return Action(op, int(stage), int(microbatch) if microbatch else None, other)


def _above(digits: str | None, limit: int) -> bool:
    return digits is not None and (len(digits) > 20 or int(digits or 0) > limit)


def _short(string: str) -> str:
    return string if len(string) <= 40 else string[:37] + "..."
