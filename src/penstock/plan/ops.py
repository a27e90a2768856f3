"""The table of ops: one row for each kind of action says all that is particular to it.

    >>> Op.B.row.word, Op.B.row.halves
    ('backward', (<Op.I: 1>, <Op.W: 2>))
    >>> [Op(number).name for number in sorted(SENDS)]
    ['SEND_F', 'SEND_B']

Checking, lowering, simulating, drawing, parsing and running ask here, and never compare the numbers of ops: about one
op its row, and in loops over packed actions the sets of numbers below, `code & OP in SENDS`. Two facts are elsewhere:
what an action needs is stated in `penstock.plan.dependencies`, what it does is a handler in `penstock.run.handlers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

OVERLAP: Final = 31  # stands where an op stands in an overlapped pair of packed actions
NOTHING: Final = ""  # holds no memory


class Op(IntEnum):
    """The kinds of action. The numbers are those of the packed form, and mean nothing else.

    Action(Op.F, stage=2, microbatch=0)  # 2F0
    """

    F = 0
    I = 1  # noqa: E741  the letter is the vocabulary of the field
    W = 2
    B = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    UNSHARD = 8
    RESHARD = 9
    REDUCE_GRAD = 10
    R = 11
    O = 12  # noqa: E741  the letters, again
    L = 13

    @property
    def row(self) -> Row:
        return ROWS[self]

    @property
    def is_compute(self) -> bool:
        return self.row.kind is OpKind.COMPUTE

    @property
    def is_message(self) -> bool:
        return self.row.kind is OpKind.MESSAGE

    @property
    def has_microbatch(self) -> bool:
        return self.row.kind is not OpKind.CARE


class OpKind(Enum):
    """Kind of an op: the data that it works on, and the resource that it occupies."""

    COMPUTE = "compute"  # a stage and a microbatch; occupies its rank
    MESSAGE = "message"  # a microbatch's value between two stages; occupies the way between their ranks
    COPY = "copy"  # what a forward saved of a microbatch, off the device or back; occupies the copy engine of its rank
    CARE = "care"  # the parameters of a stage, no microbatch; occupies its rank


@dataclass(frozen=True)
class Row:
    """Properties of one op. Names of costs and sizes are those of fields of `penstock.simulate.Costs`."""

    kind: OpKind
    word: str  # for people
    colour: str
    cost: str  # what it takes; a field that is None: as much as its halves together
    letter: str = ""  # where there is no room for the name
    training: bool = False  # has no place in a plan without backwards
    choice: bool = False  # may be there for some microbatches of a stage and not for others
    halves: tuple[Op, ...] = ()  # the ops that it does in one
    partner: Op | None = None  # of a message: its other half; of a choice: what goes with it
    sends: bool = False  # of a message: whether it is the half that sends
    peer: int = 0  # of a message: its other end is the stage after this one (1) or before it (-1)
    takes: str | None = None  # what its stage holds for the microbatch from its start on
    leaves: str | None = None  # and from its end on
    spares: str | None = None  # and what the forward leaves instead of all it made, where this op will come


_GREY: Final = "#94a3b8"
_TABLE: Final = {
    Op.F: Row(OpKind.COMPUTE, "forward", "#2f6fdb", "forward", takes="held_to_input"),
    Op.I: Row(OpKind.COMPUTE, "backward to inputs", "#f2a33a", "backward_input", training=True, leaves="held_to_weight"),
    Op.W: Row(OpKind.COMPUTE, "backward to weights", "#8a4fd6", "backward_weight", training=True, leaves=NOTHING),
    Op.B: Row(OpKind.COMPUTE, "backward", "#0d8a68", "backward", training=True, halves=(Op.I, Op.W), leaves=NOTHING),
    Op.SEND_F: Row(OpKind.MESSAGE, "send activation", _GREY, "posting", partner=Op.RECV_F, sends=True, peer=1),
    Op.RECV_F: Row(OpKind.MESSAGE, "receive activation", _GREY, "posting", partner=Op.SEND_F, peer=-1),
    Op.SEND_B: Row(OpKind.MESSAGE, "send gradient", _GREY, "posting", training=True, partner=Op.RECV_B, sends=True, peer=-1),
    Op.RECV_B: Row(OpKind.MESSAGE, "receive gradient", _GREY, "posting", training=True, partner=Op.SEND_B, peer=1),
    Op.UNSHARD: Row(OpKind.CARE, "gather parameters", "#8593a8", "unshard", letter="U"),
    Op.RESHARD: Row(OpKind.CARE, "drop gathered parameters", "#a9b4c4", "reshard", letter="D"),
    Op.REDUCE_GRAD: Row(OpKind.CARE, "reduce gradients", "#64748b", "reduce_grad", letter="G", training=True),
    Op.R: Row(OpKind.COMPUTE, "recompute", "#d1477a", "forward", training=True, choice=True, takes="held_to_input",
              spares="kept_input"),
    Op.O: Row(OpKind.COPY, "offload", "#7c8f2b", "copy", training=True, choice=True, partner=Op.L, leaves="unmoved"),
    Op.L: Row(OpKind.COPY, "load", "#b58a1f", "copy", training=True, choice=True, partner=Op.O, takes="held_to_input"),
}  # fmt: skip
ROWS: Final = tuple(_TABLE[op] for op in Op)


def _where(asked: Callable[[Row], bool]) -> frozenset[int]:
    return frozenset(int(op) for op, row in zip(Op, ROWS, strict=True) if asked(row))


def doing(op: Op) -> frozenset[int]:
    """The ops that do what this one does: itself, and those that it is a half of."""
    return _where(lambda row: row is op.row or op in row.halves)


OPS: Final = _where(lambda row: True)
COMPUTES: Final = _where(lambda row: row.kind is OpKind.COMPUTE) | {OVERLAP}
MESSAGES: Final = _where(lambda row: row.kind is OpKind.MESSAGE)
SENDS: Final = _where(lambda row: row.sends)
RECEIVES: Final = MESSAGES - SENDS
COPIES: Final = _where(lambda row: row.kind is OpKind.COPY)
BESIDE: Final = MESSAGES | COPIES  # leave their rank free for other things
CARES: Final = _where(lambda row: row.kind is OpKind.CARE)
COUNTED: Final = OPS - CARES  # belong to a microbatch
CHOICES: Final = _where(lambda row: row.choice)
TRAINING: Final = _where(lambda row: row.training)
INPUT_GRADIENTS: Final = doing(Op.I)
WEIGHT_GRADIENTS: Final = doing(Op.W)
