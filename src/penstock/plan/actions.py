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

    op         4 bits     an Op; 15 stands for an overlapped pair
    stage     20 bits
    microbatch 24 bits    0 where the op has none
    peer      21 bits     0, or 1 + the stage at the other end of a message that skips stages

A packed overlapped pair is 15 in the lowest bits, then its two actions, 48 bits each. What is left of an action
without its microbatch (`code & KEY`) is its *key*: the rules of precedence are stated over keys, because everything
that an action needs belongs to its own microbatch.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.errors import ParseError

STAGE_SHIFT: Final = 4
MICROBATCH_SHIFT: Final = 24
PEER_SHIFT: Final = 48
OP: Final = 0xF
STAGE: Final = 0xFFFFF
MICROBATCH: Final = 0xFFFFFF
MICROBATCH_FIELD: Final = MICROBATCH << MICROBATCH_SHIFT
KEY: Final = ~MICROBATCH_FIELD
MAX_STAGE: Final = STAGE
MAX_MICROBATCH: Final = MICROBATCH
OVERLAP: Final = 15


class Op(IntEnum):
    """The kinds of action. F, I, W and B compute; the next four are messages; the last three tend to parameters."""

    F = 0  # forward
    I = 1  # noqa: E741  backward, gradients of the inputs only; the letter is the vocabulary of the field
    W = 2  # backward, gradients of the weights only
    B = 3  # full backward, both in one
    SEND_F = 4  # an activation leaves for a later stage
    RECV_F = 5  # an activation comes from an earlier stage
    SEND_B = 6  # a gradient leaves for an earlier stage
    RECV_B = 7  # a gradient comes from a later stage
    UNSHARD = 8  # gather the parameters of a sharded stage
    RESHARD = 9  # drop the gathered parameters
    REDUCE_GRAD = 10  # reduce the gradients over the data-parallel replicas

    @property
    def is_compute(self) -> bool:
        return self <= Op.B

    @property
    def is_message(self) -> bool:
        return Op.SEND_F <= self <= Op.RECV_B

    @property
    def has_microbatch(self) -> bool:
        return self <= Op.RECV_B


class Action(NamedTuple):
    """One thing that one rank does, on one stage, for one microbatch.

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
            text += (">" if self.op in (Op.SEND_F, Op.SEND_B) else "<") + str(self.peer)
        return text


class Overlap(NamedTuple):
    """A forward and a backward that run in one slot, so that one hides the communication of the other."""

    first: Action
    second: Action

    @property
    def code(self) -> int:
        return pack(self)

    def __str__(self) -> str:
        return f"({self.first};{self.second})OVERLAP_F_B"


AnyAction = Action | Overlap

_OPS: Final = tuple(Op)
_NAMES: Final = {op.name: op for op in Op}
_ACTION = re.compile(r"([0-9]+)([A-Z_]+?)([0-9]*)(?:([<>])([0-9]+))?")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def key_of(op: Op, stage: int, peer: int | None = None) -> int:
    """The packed form without a microbatch. A peer that is the neighbour needs no mention."""
    key = op | stage << STAGE_SHIFT
    if peer is not None and peer != neighbour(op, stage):
        key |= (peer + 1) << PEER_SHIFT
    return key


def neighbour(op: Op, stage: int) -> int:
    """The stage at the other end of a message that skips nothing."""
    return stage + 1 if op in (Op.SEND_F, Op.RECV_B) else stage - 1


def peer_of(code: int) -> int:
    """The stage at the other end of a packed message."""
    peer = code >> PEER_SHIFT
    if peer:
        return peer - 1
    return (code >> STAGE_SHIFT & STAGE) + (1 if code & OP in (Op.SEND_F, Op.RECV_B) else -1)


# From a message between neighbours to its other half: SEND_F(s) <-> RECV_F(s + 1), SEND_B(s) <-> RECV_B(s - 1).
_ACROSS: Final = {
    int(Op.SEND_F): 1 + (1 << STAGE_SHIFT),
    int(Op.RECV_F): -1 - (1 << STAGE_SHIFT),
    int(Op.SEND_B): 1 - (1 << STAGE_SHIFT),
    int(Op.RECV_B): -1 + (1 << STAGE_SHIFT),
}


def partner_of(code: int) -> int:
    """The other half of a packed message: its receive for a send, its send for a receive."""
    if not code >> PEER_SHIFT:
        return code + _ACROSS[code & OP]
    return key_of(Op(code & OP ^ 1), peer_of(code), code >> STAGE_SHIFT & STAGE) | code & MICROBATCH_FIELD


def pack(action: AnyAction) -> int:
    if isinstance(action, Overlap):
        return OVERLAP | pack(action.first) << 4 | pack(action.second) << (4 + PEER_SHIFT)
    return key_of(action.op, action.stage, action.peer) | (action.microbatch or 0) << MICROBATCH_SHIFT


def unpack(code: int) -> AnyAction:
    if code & OP == OVERLAP:
        first, second = split_overlap(code)
        return Overlap(_unpack_single(first), _unpack_single(second))
    return _unpack_single(code)


def _unpack_single(code: int) -> Action:
    op = _OPS[code & OP]
    peer = code >> PEER_SHIFT
    return Action(
        op,
        code >> STAGE_SHIFT & STAGE,
        code >> MICROBATCH_SHIFT & MICROBATCH if op.has_microbatch else None,
        peer - 1 if peer else None,
    )


def split_overlap(code: int) -> tuple[int, int]:
    """The two packed actions of a packed overlapped pair."""
    return code >> 4 & (1 << PEER_SHIFT) - 1, code >> (4 + PEER_SHIFT)


def parts(code: int) -> tuple[int, ...]:
    """The packed actions in one slot: one, or the two of an overlapped pair."""
    return split_overlap(code) if code & OP == OVERLAP else (code,)


def overlap(first: int, second: int) -> int:
    """An overlapped pair of two packed actions."""
    return OVERLAP | first << 4 | second << (4 + PEER_SHIFT)


def forward(stage: int, microbatch: int) -> int:
    """A packed F."""
    return stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def backward_input(stage: int, microbatch: int) -> int:
    """A packed I."""
    return 1 | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def backward_weight(stage: int, microbatch: int) -> int:
    """A packed W."""
    return 2 | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def backward(stage: int, microbatch: int) -> int:
    """A packed B."""
    return 3 | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT


def text(code: int) -> str:
    """The text of a packed action: ``text(pack(a)) == str(a)``."""
    if code >> PEER_SHIFT or code & OP > Op.RECV_B:
        return str(unpack(code))
    return f"{code >> STAGE_SHIFT & STAGE}{_OPS[code & OP].name}{code >> MICROBATCH_SHIFT & MICROBATCH}"


def parse(string: str) -> AnyAction:
    """Read one action. Strict: the whole text must be one action, nothing before or after it.

    >>> parse("(0F1;3B0)OVERLAP_F_B").second
    Action(op=<Op.B: 3>, stage=3, microbatch=0, peer=None)
    """
    stripped = string.strip()
    if pair := _PAIR.fullmatch(stripped):
        first, second = _parse_single(pair[1].strip()), _parse_single(pair[2].strip())
        kinds = {first.op, second.op}
        if Op.F not in kinds or not kinds & {Op.B, Op.I}:
            raise ParseError(f"{string!r} overlaps {first.op.name} with {second.op.name}; expected an F and a B (or I)")
        return Overlap(first, second)
    return _parse_single(stripped)


def _parse_single(string: str) -> Action:
    expected = "expected [stage][kind][microbatch], such as 2F0, 1SEND_F3 or 0UNSHARD"
    match = _ACTION.fullmatch(string)
    if match is None:
        raise ParseError(f"{_short(string)!r} is no action; {expected}")
    stage, name, microbatch, arrow, peer = match.groups()
    op = _NAMES.get(name)
    if op is None:
        raise ParseError(
            f"{_short(string)!r} has the unknown kind {_short(name)!r}; expected one of {', '.join(_NAMES)}"
        )
    if op.has_microbatch != bool(microbatch):
        raise ParseError(f"{string!r}: {op.name} takes {'a' if op.has_microbatch else 'no'} microbatch; {expected}")
    if arrow and (not op.is_message or (arrow == ">") != (op in (Op.SEND_F, Op.SEND_B))):
        raise ParseError(f"{string!r}: only a send may name where it goes (>), only a receive whence it comes (<)")
    if _above(stage, MAX_STAGE) or _above(microbatch, MAX_MICROBATCH) or _above(peer, MAX_STAGE):
        limits = f"stages go up to {MAX_STAGE}, microbatches up to {MAX_MICROBATCH}"
        raise ParseError(f"{_short(string)!r} is out of range: {limits}")
    other = int(peer) if peer else None
    if other is not None and other == neighbour(op, int(stage)):
        other = None
    return Action(op, int(stage), int(microbatch) if microbatch else None, other)


def _above(digits: str | None, limit: int) -> bool:
    return digits is not None and (len(digits) > 20 or int(digits or 0) > limit)


def _short(string: str) -> str:
    return string if len(string) <= 40 else string[:37] + "..."
