"""Checks of the list of one rank: its actions, their positions, and their dependencies on the same rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from operator import le, lt

from penstock.errors import DeadlockError, IncompleteError, OrderError
from penstock.plan.action_positions import ABSENT, column, either, flatten, is_sparse, places
from penstock.plan.actions import KEY, OP, is_pair, key_of, partner_of, parts, peer_of, stage_of, text, with_op
from penstock.plan.check_sharding import check_sharding
from penstock.plan.ops import CARES, CHOICES, MESSAGES, OPS, OVERLAP, RECEIVES, ROWS, SENDS, TRAINING, Op
from penstock.plan.plan import Plan

Columns = dict[int, list[int]]  # `columns[key][microbatch]` is where that action stands on its rank


def read(plan: Plan) -> Columns:
    """Read the lists rank by rank, and raise the first thing that is wrong with them, apart from how they wait for one another.

    Every column is full, but for actions that a plan may do without. A B has no column of its own: it stands in those of
    its I and its W.
    """
    columns: Columns = {}
    reduced: set[int] = set()  # the stages with a REDUCE_GRAD
    for rank, keys in enumerate(plan.keys):
        if any(key & OP not in OPS and key & OP != OVERLAP for key in keys):
            raise IncompleteError(f"rank {rank} holds numbers that are no packed actions")
        columns |= _RankChecker(plan, rank).read()
        if any(key & OP in CARES for key in keys):
            reduced |= check_sharding(plan, rank)
    for stage in set(range(plan.num_stages)) - reduced if reduced else ():
        home = plan.placement.rank_of(stage)
        raise IncompleteError(f"rank {home} lacks {stage}REDUCE_GRAD; expected one for every stage, or none at all")
    _compare_channels(plan, columns)
    return columns


def _compare_channels(plan: Plan, columns: Columns) -> None:
    """Does every message have both its ends, and do both ends agree on the order?"""
    rank_of = plan.placement.rank_of
    channels: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by ordered pair of ranks: the receives
    for key in columns:
        if key & OP in MESSAGES:
            other = partner_of(key)
            here, there = rank_of(stage_of(key)), rank_of(stage_of(other))
            if other not in columns:
                does, lacks = ("sends", "never posts") if key & OP in SENDS else ("posts", "never sends")
                raise IncompleteError(f"rank {here} {does} {text(key)}, but rank {there} {lacks} {text(other)}")
            if key & OP in RECEIVES:
                channels[there, here].append(key)
    for (sender, receiver), keys in channels.items():
        sent = [at for key in keys for at in columns[partner_of(key)]]
        received = [at for key in keys for at in columns[key]]
        arrived = [received[index] for index in sorted(range(len(sent)), key=sent.__getitem__)]
        if all(map(lt, arrived, arrived[1:])):
            continue
        codes, posted = plan.codes[receiver], sorted(arrived)
        number = next(n for n, (a, b) in enumerate(zip(arrived, posted, strict=True)) if a != b)
        raise DeadlockError(
            f"messages from rank {sender} to rank {receiver} are delivered in order, but number {number + 1} is "
            f"sent as {text(partner_of(codes[arrived[number]]))} and received as {text(codes[posted[number]])}"
        )


class _RankChecker:
    """Reads the list of one rank."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.codes = plan, rank, plan.codes[rank]
        self.flat, self.slots = flatten(self.codes, plan.keys[rank])
        self.standing = dict(zip(self.flat, self.slots, strict=True))

    def read(self) -> Columns:
        whole = self.flat is self.codes  # nothing was taken apart or left out
        for code in () if whole else self.codes:
            if code & OP == OVERLAP and not is_pair([part & OP for part in parts(code)]):
                raise OrderError(f"rank {self.rank}: {text(code)}; expected an F overlapped with a B (or I)")
        keys = self.plan.keys[self.rank] if whole else set(map(KEY.__and__, self.flat))
        for key in keys:
            self.belongs(key)
        if len(self.standing) < len(self.flat):
            first = {code: number for number, code in reversed([*enumerate(self.flat)])}
            again = next(number for number, code in enumerate(self.flat) if first[code] != number)
            where = f"rank {self.rank}, position {self.slots[again] + 1}"
            raise IncompleteError(f"{where}: {text(self.flat[again])} stands there twice")
        size = self.plan.num_microbatches
        if is_sparse(max(len(keys), len(self.plan.placement.stages_of(self.rank))), size, len(self.flat)):
            self.sparse(keys)
        columns = {key: places(self.standing, key, size) for key in keys}
        if sum(size - found.count(ABSENT) for found in columns.values()) < len(self.flat):
            code = next(code for code in self.flat if code not in column(code & KEY, size))
            raise IncompleteError(f"{self.at(code)} is out of range; expected microbatches 0 to {size - 1}")
        self.complete(columns)
        self.order(columns)
        if not CHOICES.isdisjoint(key & OP for key in keys):
            self.kept()
        return columns

    def at(self, code: int) -> str:
        return f"rank {self.rank}, position {self.standing[code] + 1}: {text(code)}"

    def belongs(self, key: int) -> None:
        """Is there such a stage, on this rank, and such a message?"""
        plan, stage = self.plan, stage_of(key)
        wrong = None
        if stage >= plan.num_stages:
            wrong = f"is out of range; expected stages 0 to {plan.num_stages - 1}"
        elif (home := plan.placement.rank_of(stage)) != self.rank:
            wrong = f"is on the wrong rank; stage {stage} sits on rank {home}"
        elif key & OP in MESSAGES:
            wrong = self.wrong_message(key, stage, peer_of(key))
        if wrong:
            raise IncompleteError(f"{self.at(next(code for code in self.flat if code & KEY == key))} {wrong}")

    def wrong_message(self, key: int, stage: int, peer: int) -> str | None:
        plan = self.plan
        if not 0 <= peer < plan.num_stages:
            return f"goes to or comes from stage {peer}, which does not exist"
        producer, consumer = (stage, peer) if ROWS[key & OP].peer > 0 else (peer, stage)
        if plan.placement.rank_of(peer) == self.rank:
            return "is a message within a rank; expected none: it is handed over"
        if consumer not in plan.graph.consumers(producer):
            return f"carries what nobody needs; {producer} does not feed {consumer}"
        if key & OP in TRAINING and not plan.has_backward:
            return "carries a gradient in a plan without backwards"
        carrier = plan.rules.carrier(producer, plan.placement.rank_of(consumer))
        return f"crosses twice; stage {carrier} on that rank brings the same value" if carrier != consumer else None

    def sparse(self, keys: Collection[int]) -> None:
        """Raise the first F or message that is missing, without making a place for each microbatch."""
        forwards = (key_of(Op.F, stage) for stage in self.plan.placement.stages_of(self.rank))
        for key in (*forwards, *(key for key in keys if key & OP in MESSAGES)):
            for missing in (code for code in column(key, self.plan.num_microbatches) if code not in self.standing):
                raise self.lacks(missing)

    def lacks(self, code: int) -> IncompleteError:
        name = text(code) + (f" (or {text(with_op(code, Op.B))})" if code & OP in Op.B.row.halves else "")
        expected = "expected each microbatch once through every stage, forward"
        return IncompleteError(
            f"rank {self.rank} lacks {name}; {expected}{' and backward' if self.plan.has_backward else ''}"
        )

    def complete(self, columns: Columns) -> None:
        """Fill the columns of I and W with their B. Each must be full then, if its actions are no choice."""
        size = self.plan.num_microbatches
        none = [ABSENT] * size
        for stage in self.plan.placement.stages_of(self.rank):
            columns.setdefault(key_of(Op.F, stage), none)
            full = columns.pop(key_of(Op.B, stage), none)
            for key in (key_of(op, stage) for op in Op.B.row.halves) if self.plan.has_backward else ():
                half = columns.get(key, none)
                if half.count(ABSENT) + full.count(ABSENT) < size:
                    code = next(c for c in column(key, size) if {c, with_op(c, Op.B)} <= self.standing.keys())
                    again = text(with_op(code, Op.B))
                    raise IncompleteError(f"{self.at(code)} does again what {again} does; expected I and W, or B")
                columns[key] = either(half, full)
        for key, found in columns.items():
            if ABSENT in found and key & OP not in CHOICES:
                raise self.lacks(column(key, size)[found.index(ABSENT)])

    def order(self, columns: Columns) -> None:
        """Does what an action needs on its own rank stand before it? Of all that does not, the first is raised."""
        late: list[tuple[int, int]] = []  # the action, and what it needs
        for key, found in columns.items():
            if key & OP in RECEIVES:
                continue
            # What is absent needs nothing.
            standing = [len(self.codes) if at == ABSENT else at for at in found] if key & OP in CHOICES else found
            before = le if key & OP == Op.W else lt  # a B is at once the I and the W that needs it
            for need in self.plan.rules.needs(key):
                if self.plan.placement.rank_of(stage_of(need)) != self.rank:
                    continue
                needed = columns.get(need)
                if needed is None:
                    code = self.codes[min(standing)]
                    raise IncompleteError(f"rank {self.rank} lacks {text(need)}, which {text(code)} needs")
                if not all(map(before, needed, standing)):
                    late.append(next((b, a) for a, b in zip(needed, standing, strict=True) if not before(a, b)))
        if late:
            position, needed_at = min(late)
            where = f"rank {self.rank}, position {position + 1}: {text(self.codes[position])}"
            if position == needed_at:
                raise OrderError(f"{where} overlaps two actions that need each other")
            raise OrderError(f"{where} stands before {text(self.codes[needed_at])}, which it needs")

    def kept(self) -> None:
        """Check that saved activations are recomputed or offloaded, not both, and that offloaded ones are loaded.

        That nothing is used before it is back is a rule of precedence: a backward needs the R, or the L, of its microbatch.
        """
        for code in self.flat:
            for op in CHOICES - {code & OP} if code & OP in CHOICES else ():
                other, go_together = with_op(code, op), ROWS[code & OP].partner == op
                if (other in self.standing) != go_together:
                    one_way = f"{text(other)}; expected one way to hold less of a microbatch"
                    wrong = f"lacks {text(other)}; expected both, or neither" if go_together else one_way
                    raise IncompleteError(f"rank {self.rank} has {text(code)} and {wrong}")
