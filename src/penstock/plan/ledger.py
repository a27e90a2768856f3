"""The first half of the check: what is there, where, and whether what it needs on its own rank stands before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from operator import le, lt

from penstock.errors import DeadlockError, IncompleteError, OrderError
from penstock.plan.actions import KEY, OP, is_pair, key_of, partner_of, parts, peer_of, stage_of, text, with_op
from penstock.plan.ops import CARES, CHOICES, MESSAGES, OPS, OVERLAP, RECEIVES, ROWS, SENDS, TRAINING, Op
from penstock.plan.places import ABSENT, column, either, flatten, places
from penstock.plan.plan import Plan
from penstock.plan.tending import check_tending


class Ledger:
    """Reads the lists rank by rank. Afterwards `columns[key][microbatch]` is where that action stands on its rank.

    Every column is full, but for actions that a plan may do without. A B has no column of its own: it stands in those of
    its I and its W.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.columns: dict[int, list[int]] = {}
        self.reduced: set[int] = set()  # the stages with a REDUCE_GRAD

    def read(self) -> None:
        """Raise the first thing that is wrong with the lists, apart from how they meet."""
        for rank, codes in enumerate(self.plan.codes):
            if any(key & OP not in OPS and key & OP != OVERLAP for key in self.plan.keys[rank]):
                raise IncompleteError(f"rank {rank} holds numbers that are no packed actions")
            _RankLedger(self.plan, rank, codes, self.columns).read()
            if any(key & OP in CARES for key in self.plan.keys[rank]):
                self.reduced |= check_tending(self.plan, rank)
        for stage in range(self.plan.num_stages):
            if self.reduced and stage not in self.reduced:
                raise IncompleteError(
                    f"rank {self.plan.placement.rank_of(stage)} lacks {stage}REDUCE_GRAD; "
                    "expected one for every stage, or none at all"
                )
        self.compare_channels()

    def compare_channels(self) -> None:
        """Does every message have both its ends, and do both ends agree on the order?"""
        rank_of = self.plan.placement.rank_of
        channels: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by ordered pair of ranks: the receives
        for key in self.columns:
            if key & OP in MESSAGES:
                other = partner_of(key)
                here, there = rank_of(stage_of(key)), rank_of(stage_of(other))
                if other not in self.columns:
                    does, lacks = ("sends", "never posts") if key & OP in SENDS else ("posts", "never sends")
                    raise IncompleteError(f"rank {here} {does} {text(key)}, but rank {there} {lacks} {text(other)}")
                if key & OP in RECEIVES:
                    channels[there, here].append(key)
        for (sender, receiver), keys in channels.items():
            sent = [at for key in keys for at in self.columns[partner_of(key)]]
            received = [at for key in keys for at in self.columns[key]]
            order = sorted(range(len(sent)), key=sent.__getitem__)
            arrived = [received[index] for index in order]
            if all(map(lt, arrived, arrived[1:])):
                continue
            codes, posted = self.plan.codes[receiver], sorted(arrived)
            number = next(n for n, (a, b) in enumerate(zip(arrived, posted, strict=True)) if a != b)
            raise DeadlockError(
                f"messages from rank {sender} to rank {receiver} are delivered in order, but number {number + 1} is "
                f"sent as {text(partner_of(codes[arrived[number]]))} and received as {text(codes[posted[number]])}"
            )


class _RankLedger:
    """Reads the list of one rank."""

    def __init__(self, plan: Plan, rank: int, codes: Sequence[int], columns: dict[int, list[int]]) -> None:
        self.plan, self.rank, self.codes, self.columns = plan, rank, codes, columns
        self.flat, self.slots = flatten(codes, plan.keys[rank])
        self.standing = dict(zip(self.flat, self.slots, strict=True))

    def read(self) -> None:
        if self.flat is not self.codes:
            self.pairs()
        keys = self.plan.keys[self.rank] if self.flat is self.codes else set(map(KEY.__and__, self.flat))
        for key in keys:
            self.belongs(key)
        self.once()
        messages = [key for key in keys if key & OP in MESSAGES]
        computes = [key_of(op, stage) for stage in self.plan.placement.stages_of(self.rank) for op in self.halves()]
        chosen = [key for key in keys if key & OP in CHOICES]
        self.count(messages, chosen)
        self.order((*computes, *messages, *chosen))
        self.kept(chosen)

    def halves(self) -> tuple[Op, ...]:
        return (Op.F, Op.I, Op.W) if self.plan.has_backward else (Op.F,)

    def at(self, code: int) -> str:
        return f"rank {self.rank}, position {self.standing[code] + 1}: {text(code)}"

    def first(self, key: int) -> str:
        return self.at(next(code for code in self.flat if code & KEY == key))

    def pairs(self) -> None:
        for code in self.codes:
            if code & OP == OVERLAP and not is_pair([part & OP for part in parts(code)]):
                raise OrderError(f"rank {self.rank}: {text(code)}; expected an F overlapped with a B (or I)")

    def belongs(self, key: int) -> None:
        """Is there such a stage, on this rank, and such a message?"""
        plan, stage = self.plan, stage_of(key)
        if stage >= plan.num_stages:
            raise IncompleteError(f"{self.first(key)} is out of range; expected stages 0 to {plan.num_stages - 1}")
        home = plan.placement.rank_of(stage)
        if home != self.rank:
            raise IncompleteError(f"{self.first(key)} is on the wrong rank; stage {stage} sits on rank {home}")
        if key & OP in MESSAGES:
            self.message_belongs(key, stage)

    def message_belongs(self, key: int, stage: int) -> None:
        plan, peer = self.plan, peer_of(key)
        if not 0 <= peer < plan.num_stages:
            raise IncompleteError(f"{self.first(key)} goes to or comes from stage {peer}, which does not exist")
        producer, consumer = (stage, peer) if ROWS[key & OP].peer > 0 else (peer, stage)
        there = plan.placement.rank_of(peer)
        if there == self.rank:
            raise IncompleteError(f"{self.first(key)} is a message within a rank; expected none: it is handed over")
        if consumer not in plan.graph.consumers(producer):
            raise IncompleteError(f"{self.first(key)} carries what nobody needs; {producer} does not feed {consumer}")
        if key & OP in TRAINING and not plan.has_backward:
            raise IncompleteError(f"{self.first(key)} carries a gradient in a plan without backwards")
        carrier = plan.rules.carrier(producer, plan.placement.rank_of(consumer))
        if carrier != consumer:
            raise IncompleteError(
                f"{self.first(key)} crosses twice; stage {carrier} on that rank brings the same value"
            )

    def once(self) -> None:
        if len(self.standing) == len(self.flat):
            return
        seen: dict[int, int] = {}
        for number, (code, position) in enumerate(zip(self.flat, self.slots, strict=True)):
            if seen.setdefault(code, number) != number:
                raise IncompleteError(f"rank {self.rank}, position {position + 1}: {text(code)} stands there twice")

    def count(self, messages: Iterable[int], chosen: Iterable[int]) -> None:
        """Fill the columns, each of which must be full if its actions are no choice; then nothing may be left over."""
        size, counted = self.plan.num_microbatches, 0
        for stage in self.plan.placement.stages_of(self.rank):
            whole = places(self.standing, key_of(Op.B, stage), size)
            counted += size - whole.count(ABSENT)
            for op in self.halves():
                column_of = places(self.standing, key := key_of(op, stage), size)
                counted += size - column_of.count(ABSENT)
                if op is not Op.F:
                    self.not_both(key, column_of, whole)
                    column_of = either(column_of, whole)
                self.columns[key] = self.full(key, column_of)
        for key in messages:
            self.columns[key] = self.full(key, places(self.standing, key, size))
            counted += size
        for key in chosen:
            self.columns[key] = places(self.standing, key, size)
            counted += size - self.columns[key].count(ABSENT)
        if counted < len(self.flat):
            code = next(code for code in self.flat if code not in column(code & KEY, size))
            raise IncompleteError(f"{self.at(code)} is out of range; expected microbatches 0 to {size - 1}")

    def not_both(self, key: int, half: list[int], whole: list[int]) -> None:
        if half.count(ABSENT) + whole.count(ABSENT) >= len(half):
            return
        for code, a, b in zip(column(key, len(half)), half, whole, strict=True):
            if a != ABSENT and b != ABSENT:
                full = text(with_op(code, Op.B))
                raise IncompleteError(f"{self.at(code)} does again what {full} does; expected I and W, or B")

    def full(self, key: int, column_of: list[int]) -> list[int]:
        if ABSENT not in column_of:
            return column_of
        code = column(key, len(column_of))[column_of.index(ABSENT)]
        name = text(code) + (f" (or {text(with_op(code, Op.B))})" if key & OP in (Op.I, Op.W) else "")
        raise IncompleteError(
            f"rank {self.rank} lacks {name}; expected each microbatch once through every stage, forward"
            + (" and backward" if self.plan.has_backward else "")
        )

    def order(self, keys: Iterable[int]) -> None:
        """Does what an action needs on its own rank stand before it? Of all that does not, the first is raised."""
        late: list[tuple[int, int]] = []  # the action, and what it needs
        for key in keys:
            if key & OP in RECEIVES:
                continue
            column_of = self.columns[key]
            if key & OP in CHOICES:  # what is absent needs nothing
                column_of = [len(self.codes) if at == ABSENT else at for at in column_of]
            before = le if key & OP == Op.W else lt  # a B is at once the I and the W that needs it
            for need in self.plan.rules.needs(key):
                if self.plan.placement.rank_of(stage_of(need)) != self.rank:
                    continue
                needed = self.columns.get(need)
                if needed is None:
                    code = self.codes[min(column_of)]
                    raise IncompleteError(f"rank {self.rank} lacks {text(need)}, which {text(code)} needs")
                if not all(map(before, needed, column_of)):
                    index = next(n for n, (a, b) in enumerate(zip(needed, column_of, strict=True)) if not before(a, b))
                    late.append((column_of[index], needed[index]))
        if late:
            position, needed_at = min(late)
            where = f"rank {self.rank}, position {position + 1}: {text(self.codes[position])}"
            if position == needed_at:
                raise OrderError(f"{where} overlaps two actions that need each other")
            raise OrderError(f"{where} stands before {text(self.codes[needed_at])}, which it needs")

    def kept(self, chosen: Sequence[int]) -> None:
        """What a forward saved is recomputed or moved, not both, and what leaves comes back.

        That nothing is used before it is back is a rule of precedence: a backward needs the R, or the L, of its microbatch.
        """
        there = {key: {m for m, at in enumerate(self.columns[key]) if at != ABSENT} for key in chosen}
        for key, microbatches in there.items():
            partner = ROWS[key & OP].partner
            other = key if partner is None else with_op(key, partner)
            if alone := microbatches - there.get(other, set()):
                has, lacks = (text(column(each, max(alone) + 1)[min(alone)]) for each in (key, other))
                raise IncompleteError(f"rank {self.rank} has {has} and lacks {lacks}; expected both, or neither")
        for one, other in combinations(chosen, 2):
            twice = there[one] & there[other]
            if twice and stage_of(one) == stage_of(other) and ROWS[one & OP].partner != other & OP:
                both = " and ".join(text(column(each, max(twice) + 1)[min(twice)]) for each in (one, other))
                raise IncompleteError(f"rank {self.rank} has {both}; expected one way to hold less of a microbatch")
