"""Dependencies between actions, defined here alone: lowering, the check, the simulator and the runtime use them.

Everything that an action needs belongs to its own microbatch, so the rules are stated over *keys* (packed actions
without their microbatch). A full backward B counts as both I and W: a need for a gradient is written as a need for I.

    F(s)            each producer's output: F(p) on this rank, or its message RECV_F
    I(s), B(s)      F(s), and each consumer's gradient: I(c) on this rank, or its message RECV_B; R(s) or L(s) where chosen
    W(s)            I(s)
    R(s), O(s)      F(s): its kept input, or what it saved
    L(s)            O(s)
    SEND_F(s > c)   F(s)
    SEND_B(s > p)   the gradients of all consumers of p on this rank: they travel summed, once
    RECV            the send at the other end
    REDUCE_GRAD(s)  the weight gradients of all microbatches (the one rule that spans microbatches)

A value that several stages of one rank use crosses to that rank once: its message is addressed to the first of them,
the *carrier*; the others find it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import assert_never

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan.actions import KEY, OP, Action, key_of, partner_of, parts, peer_of, stage_of, unpack
from penstock.plan.ops import INPUT_GRADIENTS, RECEIVES, Op
from penstock.plan.placement import Placement
from penstock.plan.stage_graph import StageGraph


@dataclass(frozen=True)
class Rules:
    """The rules of precedence for one graph and placement.

    >>> rules = Rules(StageGraph.chain(2), Placement.loop(2), lowered=True)
    >>> [str(need) for need in rules.requires(Action(Op.F, 1, 0))]
    ['1RECV_F0']
    """

    graph: StageGraph
    placement: Placement
    lowered: bool  # whether values cross ranks by messages, or (a compute-only plan) as if by magic
    chosen: frozenset[int] = frozenset()  # the keys of actions that a plan may do without, and that are in this one
    _cache: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def requires(self, action: Action) -> tuple[Action, ...]:
        """All actions that must be complete before this one starts. A required I may be there as part of a B.

        An action that a plan may do without is required only where it is there.
        """
        check_types("Rules.requires", PlanError, action=(action, Action))
        if action.microbatch is None:
            raise PlanError(f"requires({action}); expected an action of a microbatch: the check rules the others")
        found = (unpack(need) for need in self.needs(key_of(action.op, action.stage, action.peer)))
        return tuple(need._replace(microbatch=action.microbatch) for need in found if isinstance(need, Action))

    def needs(self, key: int) -> tuple[int, ...]:
        """The keys of what the action with this key needs, of the same microbatch."""
        try:
            found = self._cache.get(key)
            if found is None:
                found = self._cache[key] = tuple(self._find(key))
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"{key!r:.80} is no key of an action; expected action.code & KEY") from error
        return found

    def _find(self, key: int) -> Iterator[int]:
        op, stage = Op(key & OP), stage_of(key)
        match op:
            case Op.F:
                yield from self.arrivals(key)
            case Op.I | Op.B:
                yield key_of(Op.F, stage)
                yield from self.chosen.intersection([key_of(Op.R, stage), key_of(Op.L, stage)])
                yield from self.arrivals(key)
            case Op.W:
                yield key_of(Op.I, stage)
            case Op.R | Op.O | Op.SEND_F:
                yield key_of(Op.F, stage)
            case Op.L:
                yield key_of(Op.O, stage)
            case Op.SEND_B:
                producer, rank = peer_of(key), self.placement.rank_of(stage)
                for consumer in self.graph.consumers(producer):
                    if self.placement.rank_of(consumer) == rank:
                        yield key_of(Op.I, consumer)
            case Op.RECV_F | Op.RECV_B:
                yield partner_of(key)
            case Op.UNSHARD | Op.RESHARD | Op.REDUCE_GRAD:
                return
            case _:
                assert_never(op)

    def arrivals(self, key: int) -> Iterator[int]:
        """The keys of what brings a compute action its values from other stages: inputs for F, gradients for I and B.

        >>> from penstock.plan.actions import text
        >>> rules = Rules(StageGraph.chain(4), Placement.loop(2, 2), lowered=False)
        >>> [text(key) for key in rules.arrivals(key_of(Op.I, 2))]
        ['3I0']
        """
        stage = stage_of(key)
        rank = self.placement.rank_of(stage)
        if key & OP == Op.F:
            for producer in self.graph.producers(stage):
                if not self.lowered or self.placement.rank_of(producer) == rank:
                    yield key_of(Op.F, producer)
                else:
                    yield key_of(Op.RECV_F, self.carrier(producer, rank), producer)
        elif key & OP in INPUT_GRADIENTS:
            for consumer in self.graph.consumers(stage):
                there = self.placement.rank_of(consumer)
                if not self.lowered or there == rank:
                    yield key_of(Op.I, consumer)
                elif consumer == self.carrier(stage, there):
                    yield key_of(Op.RECV_B, stage, consumer)

    def awaited(self, code: int) -> list[int]:
        """The packed messages that a packed action, or overlapped pair, needs; of a key their keys."""
        try:
            split = parts(code)
        except Exception:
            check_types("Rules.awaited", PlanError, code=(code, int))
            raise
        return [need | part & ~KEY for part in split for need in self.needs(part & KEY) if need & OP in RECEIVES]

    def sends(self, key: int) -> tuple[int, ...]:
        """The keys of the sends that this compute action (F, I or B) contributes to.

        A send goes out when all that it `needs` is there: one action, but for the gradient of a value that several
        stages of this rank use.
        """
        try:
            stage = stage_of(key)
        except Exception:
            check_types("Rules.sends", PlanError, key=(key, int))
            raise
        rank = self.placement.rank_of(stage)
        if key & OP == Op.F:
            ranks = {self.placement.rank_of(c): None for c in self.graph.consumers(stage)}
            return tuple(key_of(Op.SEND_F, stage, self.carrier(stage, r)) for r in ranks if r != rank)
        if key & OP in INPUT_GRADIENTS:
            return tuple(
                key_of(Op.SEND_B, self.carrier(producer, rank), producer)
                for producer in self.graph.producers(stage)
                if self.placement.rank_of(producer) != rank
            )
        return ()

    def carrier(self, producer: int, rank: int) -> int:
        """The first stage on `rank` that uses the output of `producer`: messages are addressed to it."""
        try:
            for consumer in self.graph.consumers(producer):
                if self.placement.rank_of(consumer) == rank:
                    return consumer
        except RuntimeError:  # a tensor, which is neither equal nor unequal
            check_types("Rules.carrier", PlanError, rank=(rank, int))
            raise
        raise PlanError(f"no stage on rank {rank!r:.40} uses the output of stage {producer}")
