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
from dataclasses import dataclass

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


class MessageLowering:
    """Lowers rank after rank; `codes_of` gives the compute actions of a rank, and is asked for neighbours only."""

    def __init__(self, rules: Rules, codes_of: Callable[[int], Sequence[int]], policy: ReceivePolicy) -> None:
        self.rules, self.codes_of, self.policy = rules, codes_of, policy
        self._sends: dict[int, tuple[int, ...]] = {}
        self._receives: dict[int, tuple[int, ...]] = {}

    def rank(self, rank: int) -> list[int]:
        """The lowered list of one rank."""
        codes = self.codes_of(rank)
        after = self.sends_by_slot(codes)
        posts = self.posts(rank, codes, after)
        lowered: list[int] = []
        for slot, code in enumerate(codes):
            if 2 * slot in posts:
                lowered += posts[2 * slot]
            lowered.append(code)
            if 2 * slot + 1 in posts:
                lowered += posts[2 * slot + 1]
            if slot in after:
                lowered += after[slot]
        return lowered

    def sends_by_slot(self, codes: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Which sends follow which slot."""
        found: dict[int, tuple[int, ...]] = {}
        partial: dict[int, int] = {}  # sends that several actions contribute to -> how many have
        sends = self._sends
        for slot, code in enumerate(codes):
            for part in parts(code) if code & OP > 3 else (code,):
                key = part & KEY
                keys = sends.get(key)
                if keys is None:
                    keys = sends[key] = self.rules.sends(key)
                for send in keys:
                    message = send | part & MICROBATCH_FIELD
                    contributors = len(self.rules.needs(send))
                    if contributors > 1:
                        partial[message] = partial.get(message, 0) + 1
                        if partial[message] < contributors:
                            continue
                    found[slot] = (*found.get(slot, ()), message)
        return found

    def receives(self, key: int) -> tuple[int, ...]:
        """The receives that an action needs, by key."""
        found = self._receives.get(key)
        if found is None:
            needs = self.rules.needs(key)
            found = self._receives[key] = tuple(n for n in needs if n & OP in (Op.RECV_F, Op.RECV_B))
        return found

    def posts(self, rank: int, codes: Sequence[int], after: dict[int, tuple[int, ...]]) -> dict[int, list[int]]:
        """Where to post the receives: 2 * slot is before the slot's action, 2 * slot + 1 after it and before its sends."""
        use: dict[int, int] = {}
        for slot, code in enumerate(codes):
            for part in parts(code) if code & OP > 3 else (code,):
                for receive in self.receives(part & KEY):
                    use.setdefault(receive | part & MICROBATCH_FIELD, slot)
        left = {message: slot for slot, messages in after.items() for message in messages}
        posts: dict[int, list[int]] = {}
        rank_of = self.rules.placement.rank_of
        for sender in sorted({rank_of(peer_of(receive)) for receive in self._keys(use)}):
            messages, heard = self.incoming(sender, rank, left)
            for place, receive in zip(self.places(messages, heard, use), messages, strict=True):
                posts.setdefault(place, []).append(receive)
        return posts

    @staticmethod
    def _keys(messages: dict[int, int]) -> set[int]:
        return {message & KEY for message in messages}

    def incoming(self, sender: int, rank: int, left: dict[int, int]) -> tuple[list[int], list[int]]:
        """What `sender` sends us, as receives in the order of sending, and how far it has heard of us by then."""
        codes = self.codes_of(sender)
        after = self.sends_by_slot(codes)
        rank_of = self.rules.placement.rank_of
        messages: list[int] = []
        heard: list[int] = []
        latest = -1
        to_us: dict[int, bool] = {}
        for slot, code in enumerate(codes):
            for part in parts(code) if code & OP > 3 else (code,):
                for receive in self.receives(part & KEY):
                    slot_here = left.get(partner_of(receive) | part & MICROBATCH_FIELD, -1)
                    if slot_here > latest:
                        latest = slot_here
            for send in after.get(slot, ()):
                key = send & KEY
                ours = to_us.get(key)
                if ours is None:
                    ours = to_us[key] = rank_of(peer_of(send)) == rank
                if ours:
                    messages.append(partner_of(send))
                    heard.append(latest)
        return messages, heard

    def places(self, messages: list[int], heard: list[int], use: dict[int, int]) -> list[int]:
        """The place of each receive by the policy, never later than its use, in the order of sending."""
        places: list[int] = []
        for number, (message, slot) in enumerate(zip(messages, heard, strict=True)):
            used = 2 * use.get(message, 0)
            early = 2 * slot + 1 if slot >= 0 else 0
            match self.policy:
                case Early():
                    place = early
                case Ahead(count):
                    place = max(early, 2 * use.get(messages[number - count], 0)) if number >= count else early
                case JustInTime():
                    place = used
            places.append(min(place, used))
        for number in range(len(places) - 2, -1, -1):
            places[number] = min(places[number], places[number + 1])
        return places
