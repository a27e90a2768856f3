"""Pass: add the sends and receives.

A send stands right after the action that makes it possible; it is asynchronous, so nothing is gained by delaying it.
Where its receive is posted is a policy:

`Early`       as early as safe: just before the sender can possibly send. For each message the sender's list tells which
              of *our* messages it has heard before, and the receive is posted right before the last of those leaves.
              So a send always finds its receive posted, even under rendezvous semantics with blocking sends, and no
              buffer exists before its message can be under way. Proof: the sender has heard message j, so we have
              posted everything that stands before our send j in our list.
`Ahead(k)`    k messages ahead of use, per sender, but no earlier than `Early`: bounds the buffers.
`JustInTime`  right before use.
`InTurn`      sends and receives in one order of all messages, where they share queues (`lower/global_message_order.py`).

Receives from one rank are posted in the order in which that rank sends: messages between two ranks are delivered in
order, so a receive that is wanted early pulls those before it forward.

A rank needs its own list and those of the ranks that it exchanges messages with, nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from penstock.checks import check_types
from penstock.errors import IncompleteError, PlanError
from penstock.plan import Plan, Rules
from penstock.plan.action_positions import ABSENT, column, either, flatten, places
from penstock.plan.actions import KEY, key_of, partner_of, peer_of, stage_of, text
from penstock.plan.ops import Op


@dataclass(frozen=True)
class Early:
    """Post each receive just before the sender can possibly send.

    add_messages(plan, Early())
    """


@dataclass(frozen=True)
class Ahead:
    """Post each receive `count` messages ahead of its use.

    add_messages(plan, Ahead(2))
    """

    count: int = 2

    def __post_init__(self) -> None:
        check_types("Ahead", PlanError, count=(self.count, int))
        if self.count < 0:
            raise PlanError(f"Ahead({self.count}): expected a number of messages >= 0")


@dataclass(frozen=True)
class JustInTime:
    """Post each receive right before its use.

    add_messages(plan, JustInTime())
    """


@dataclass(frozen=True)
class InTurn:
    """Send and receive in one order of all messages, for ranks whose messages share queues: see `lower/global_message_order.py`.

        Schedule1F1B(stage, 8, loss_fn, receives=InTurn("one"))

    `queues` is "pair", a communicator for each neighbour, or "one", a single one for all: fewer than the usual two for each
    neighbour, and less that runs at the same time. In host memory every direction has its own queue whatever it is.
    """

    queues: Literal["pair", "one"] = "one"

    def __post_init__(self) -> None:
        if self.queues not in ("pair", "one"):
            raise PlanError(f'InTurn({self.queues!r}): expected "pair" or "one"')


ReceivePolicy = Early | Ahead | JustInTime | InTurn


def add_messages(plan: Plan, policy: ReceivePolicy = Early()) -> Plan:
    """The plan with its sends and receives.

    >>> from penstock.schedules import get_schedule
    >>> print(*add_messages(get_schedule("1f1b")(2, 2)).lines(), sep="\\n")
    rank 0: 0F0 0RECV_B0 0SEND_F0 0F1 0RECV_B1 0SEND_F1 0B0 0B1
    rank 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    check_types("add_messages", PlanError, plan=(plan, Plan), policy=(policy, ReceivePolicy))
    lowering = MessageLowering(plan, plan.codes.__getitem__, policy)
    return plan.with_codes(map(lowering.rank, range(plan.num_ranks)))


def rules_with_messages(plan: Plan) -> Rules:
    """The rules of a plan that is to get its messages."""
    if plan.is_lowered:
        raise PlanError("the plan holds its messages already; expected compute actions only")
    return Rules(plan.graph, plan.placement, lowered=True)


class MessageLowering:
    """Lowers rank after rank; `codes_of` gives the compute actions of a rank, and is asked for neighbours only."""

    def __init__(self, plan: Plan, codes_of: Callable[[int], Sequence[int]], policy: ReceivePolicy) -> None:
        self.codes_of, self.policy, rules = codes_of, policy, rules_with_messages(plan)
        self.traffic = cache(lambda rank: _Traffic(rules, rank, codes_of(rank), plan.num_microbatches))

    def rank(self, rank: int) -> list[int]:
        """The lowered list of one rank.

        Everything gets a place: the action in slot n has 4n + 1; before it, at 4n, come receives that it uses; after
        it, at 4n + 2, receives that must be posted before the sends, which are at 4n + 3.
        """
        traffic = self.traffic(rank)
        lowered = [*self.codes_of(rank)]
        at = [*range(1, 4 * len(lowered), 4)]
        for sender in sorted(traffic.senders):
            theirs = self.traffic(sender).channels.get(rank)
            if theirs is not None:
                lowered += theirs.messages
                at += self.posts(traffic, sender, theirs)
        for channel in traffic.channels.values():
            lowered += map(partner_of, channel.messages)
            at += [4 * slot + 3 for slot in channel.left]
        return [lowered[n] for n in sorted(range(len(lowered)), key=at.__getitem__)]

    def posts(self, traffic: _Traffic, sender: int, theirs: _Channel) -> list[int]:
        """Return the slots of the receives of a channel: by the policy, in the order of sending, never after their use."""
        uses = [4 * slot for slot in theirs.along(traffic.uses)]
        match self.policy:
            case Early():
                wanted = self.early(traffic, sender, theirs)
            case Ahead(count):
                early = self.early(traffic, sender, theirs)
                wanted = [*early[:count], *map(max, early[count:], uses)]
            case JustInTime():
                wanted = uses
        return [*accumulate(map(min, reversed(wanted), reversed(uses)), min)][::-1]

    def early(self, traffic: _Traffic, sender: int, theirs: _Channel) -> list[int]:
        """For each message of the sender: right before the last of our sends that it has heard when it sends."""
        ours = traffic.channels.get(sender)
        if ours is None:
            return [0] * len(theirs.left)
        heard = sorted(zip(ours.along(self.traffic(sender).uses), ours.left, strict=True))
        when = [use for use, _ in heard]
        latest = [0, *accumulate((4 * slot + 2 for _, slot in heard), max)]
        return [latest[bisect_right(when, slot)] for slot in theirs.left]


class _Channel(NamedTuple):
    """The messages from one rank to another, in the order of sending."""

    keys: tuple[int, ...]  # of the receives
    order: list[int]  # the place of each message among the columns of the keys, one after another
    left: list[int]  # the slot of the sender after which each leaves
    messages: list[int]  # the packed receives

    def along(self, columns: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the entries of the columns for each message."""
        every = [*chain.from_iterable(columns[key] for key in self.keys)]
        return [every[n] for n in self.order]


class _Traffic:
    """The messages of one rank, as its list of compute actions alone tells them."""

    def __init__(self, rules: Rules, rank: int, codes: Sequence[int], num_microbatches: int) -> None:
        self.rules, self.rank, self.num_microbatches = rules, rank, num_microbatches
        self.slots = self._slots(codes)
        self.uses = self._uses()
        self.senders = {rules.placement.rank_of(peer_of(receive)) for receive in self.uses}
        self.channels = self._channels()

    def _slots(self, codes: Sequence[int]) -> dict[int, list[int]]:
        """By key of an F or I: the slot of each microbatch. A B counts as an I."""
        standing = dict(zip(*flatten(codes, frozenset(map(KEY.__and__, codes))), strict=True))
        slots = {}
        for stage in self.rules.placement.stages_of(self.rank):
            keys = [key_of(op, stage) for op in (Op.F, Op.I, Op.B)]
            forward, half, whole = (places(standing, key, self.num_microbatches) for key in keys)
            slots[keys[0]], backward = forward, either(half, whole)
            if max(backward) > ABSENT:
                slots[keys[1]] = backward
        for key, found in slots.items():
            if ABSENT in found:
                missing = text(column(key, self.num_microbatches)[found.index(ABSENT)])
                raise IncompleteError(f"rank {self.rank} lacks {missing}; expected a whole plan that check accepts")
        return slots

    def _uses(self) -> dict[int, list[int]]:
        """By key of a receive: the first slot that uses each microbatch."""
        uses: dict[int, list[int]] = {}
        for key, slots in self.slots.items():
            for need in self.rules.awaited(key):
                uses[need] = [*map(min, uses[need], slots)] if need in uses else slots
        return uses

    def _channels(self) -> dict[int, _Channel]:
        """By rank: what goes there."""
        left: dict[int, dict[int, list[int]]] = {}  # by rank and key of the receive: the slot after which it leaves
        for key in self.slots:
            for send in self.rules.sends(key):
                receive = partner_of(send)
                there = self.rules.placement.rank_of(stage_of(receive))
                contributors = [self.slots[need] for need in self.rules.needs(send)]
                slots = [*map(max, *contributors)] if contributors[1:] else contributors[0]
                left.setdefault(there, {})[receive] = slots
        channels = {}
        for there, columns in left.items():
            every = [*chain.from_iterable(columns.values())]
            messages = [*chain.from_iterable(column(key, self.num_microbatches) for key in columns)]
            order = sorted(range(len(every)), key=every.__getitem__)
            channels[there] = _Channel(tuple(columns), order, [every[n] for n in order], [messages[n] for n in order])
        return channels
