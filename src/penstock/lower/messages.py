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

Receives from one rank are posted in the order in which that rank sends: messages between two ranks are delivered in
order, so a receive that is wanted early pulls those before it forward.

A rank needs its own list and those of the ranks that it exchanges messages with, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import PlanError
from penstock.plan import Plan, Rules
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, Op, partner_of, parts, peer_of


@dataclass(frozen=True)
class Early:
    """Post each receive just before the sender can possibly send."""


@dataclass(frozen=True)
class Ahead:
    """Post each receive `count` messages ahead of its use."""

    count: int = 2

    def __post_init__(self) -> None:
        if self.count < 0:
            raise PlanError(f"Ahead({self.count}): expected a number of messages >= 0")


@dataclass(frozen=True)
class JustInTime:
    """Post each receive right before its use."""


ReceivePolicy = Early | Ahead | JustInTime

_Receives = list[tuple[int, int, list[int]]]  # the receive, its send at the other end, the log of what we used from there
_Sends = list[tuple[int, int, int, tuple[list[int], list[int], list[int]]]]  # send, receive, contributors, the logs


def add_messages(plan: Plan, policy: ReceivePolicy = Early()) -> Plan:  # noqa: B008  a frozen value
    """The plan with its sends and receives.

    >>> from penstock.schedules import get_schedule
    >>> print(*add_messages(get_schedule("1f1b")(2, 2)).lines(), sep="\\n")
    rank 0: 0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0B1
    """
    if plan.is_lowered:
        raise PlanError("the plan holds its messages already; expected compute actions only")
    rules = Rules(plan.graph, plan.placement, lowered=True)
    codes = plan.codes
    lowering = MessageLowering(rules, codes.__getitem__, policy)
    return plan.with_codes(lowering.rank(rank) for rank in range(plan.num_ranks))


@dataclass
class _Traffic:
    """The messages of one rank, as its list of compute actions alone tells them."""

    after: dict[int, list[int]] = field(default_factory=dict)  # slot -> the sends that follow it
    left: dict[int, int] = field(default_factory=dict)  # send -> its slot
    used: dict[int, int] = field(default_factory=dict)  # receive -> the first slot that uses it
    sent: dict[int, list[int]] = field(default_factory=dict)  # by rank: what goes there, as receives, in order
    heard: dict[int, list[int]] = field(default_factory=dict)  # beside `sent`: how many of that rank's messages were used
    heeded: dict[int, list[int]] = field(default_factory=dict)  # by rank: its sends, in the order in which they are used

    def towards(self, rank: int) -> tuple[list[int], list[int], list[int]]:
        return self.sent.setdefault(rank, []), self.heard.setdefault(rank, []), self.heeded.setdefault(rank, [])


class MessageLowering:
    """Lowers rank after rank; `codes_of` gives the compute actions of a rank, and is asked for neighbours only."""

    def __init__(self, rules: Rules, codes_of: Callable[[int], Sequence[int]], policy: ReceivePolicy) -> None:
        self.rules, self.codes_of, self.policy = rules, codes_of, policy
        self._traffic: dict[int, _Traffic] = {}

    def rank(self, rank: int) -> list[int]:
        """The lowered list of one rank."""
        after, posts = self.traffic(rank).after, self.posts(rank)
        lowered: list[int] = []
        for slot, code in enumerate(self.codes_of(rank)):
            if 2 * slot in posts:
                lowered += posts[2 * slot]
            lowered.append(code)
            if 2 * slot + 1 in posts:
                lowered += posts[2 * slot + 1]
            if slot in after:
                lowered += after[slot]
        return lowered

    def traffic(self, rank: int) -> _Traffic:
        found = self._traffic.get(rank)
        if found is None:
            found = self._traffic[rank] = self._read(rank)
        return found

    def _read(self, rank: int) -> _Traffic:
        traffic = _Traffic()
        after, left, used = traffic.after, traffic.left, traffic.used
        table: dict[int, tuple[_Receives, _Sends]] = {}
        partial: dict[int, int] = {}  # sends that several actions contribute to -> how many have
        for slot, code in enumerate(self.codes_of(rank)):
            for part in (code,) if code & OP <= 3 else parts(code):
                entry = table.get(part & KEY)
                if entry is None:
                    entry = table[part & KEY] = self._entry(part & KEY, traffic)
                microbatch = part & MICROBATCH_FIELD
                for receive, send, heeded in entry[0]:
                    if receive | microbatch not in used:
                        used[receive | microbatch] = slot
                        heeded.append(send | microbatch)
                for send, receive, contributors, (sent, heard, heeded) in entry[1]:
                    if contributors > 1:
                        partial[send | microbatch] = partial.get(send | microbatch, 0) + 1
                        if partial[send | microbatch] < contributors:
                            continue
                    left[send | microbatch] = slot
                    after.setdefault(slot, []).append(send | microbatch)
                    sent.append(receive | microbatch)
                    heard.append(len(heeded))
        return traffic

    def _entry(self, key: int, traffic: _Traffic) -> tuple[_Receives, _Sends]:
        """What an action with this key receives and sends."""
        rank_of = self.rules.placement.rank_of
        receives = [n for n in self.rules.needs(key) if n & OP in (Op.RECV_F, Op.RECV_B)]
        return (
            [(receive, partner_of(receive), traffic.towards(rank_of(peer_of(receive)))[2]) for receive in receives],
            [
                (send, partner_of(send), len(self.rules.needs(send)), traffic.towards(rank_of(peer_of(send))))
                for send in self.rules.sends(key)
            ],
        )

    def posts(self, rank: int) -> dict[int, list[int]]:
        """Where to post the receives: 2 * slot is before the slot's action, 2 * slot + 1 after it and before its sends."""
        traffic = self.traffic(rank)
        posts: dict[int, list[int]] = {}
        for sender in sorted(traffic.heeded):
            theirs = self.traffic(sender)
            if rank not in theirs.sent:
                continue
            latest, slots = -1, [-1]  # the latest of our slots that the sender has heard of, by how many it has heard
            for send in theirs.heeded[rank]:
                latest = max(latest, traffic.left.get(send, -1))
                slots.append(latest)
            messages = theirs.sent[rank]
            places = self.places(messages, [slots[count] for count in theirs.heard[rank]], traffic.used)
            for place, receive in zip(places, messages, strict=True):
                posts.setdefault(place, []).append(receive)
        return posts

    def places(self, messages: list[int], heard: list[int], used: dict[int, int]) -> list[int]:
        """The place of each receive by the policy, never later than its use, in the order of sending."""
        uses = [2 * used.get(message, 0) for message in messages]
        early = [2 * slot + 1 for slot in heard]
        match self.policy:
            case Early():
                places = early
            case Ahead(count):
                places = [max(e, uses[n - count]) if n >= count else e for n, e in enumerate(early)]
            case JustInTime():
                places = uses
        place, ordered = 2 * len(used) + max(uses, default=0) + 1, []
        for wanted, use in zip(reversed(places), reversed(uses), strict=True):
            place = max(0, min(place, wanted, use))
            ordered.append(place)
        return ordered[::-1]
