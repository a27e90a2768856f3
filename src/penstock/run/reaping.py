"""When the sends of a cold step are known to have arrived, so that waiting for them cannot block and frees their memory.

In a cold step a receive happens when its value is needed, so a send may be under way for long. But a rank that has used a
message from another knows what the other had used before it sent that: everything up to there has arrived.
"""

from __future__ import annotations

from penstock.plan import Plan
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts, peer_of
from penstock.plan.ops import COMPUTES, RECEIVES, SENDS


def reap_points(plan: Plan, rank: int) -> dict[int, list[tuple[int, int]]]:
    """By position in the rank's list: after that action, the first `count` sends to `peer` have arrived: (peer, count)."""
    rank_of = plan.placement.rank_of
    order: dict[int, dict[int, int]] = {}  # by peer: our sends to it, and how many they are with those before
    for code in plan.codes[rank]:
        if code & OP in SENDS:
            sent = order.setdefault(rank_of(peer_of(code)), {})
            sent[code] = len(sent) + 1
    told: dict[int, int] = {}  # by our receive: how many of our sends its sender had used before
    for peer, sent in order.items():
        told.update(_told(plan, peer, rank, sent))
    points: dict[int, list[tuple[int, int]]] = {}
    best = dict.fromkeys(order, 0)
    for position, code in enumerate(plan.codes[rank]):
        for receive in _needed(plan, code):
            count, peer = told.get(receive, 0), rank_of(peer_of(receive))
            if count > best.get(peer, count):
                best[peer] = count
                points.setdefault(position, []).append((peer, count))
    return points


def _told(plan: Plan, peer: int, rank: int, sent: dict[int, int]) -> dict[int, int]:
    """For each message that the peer sends to us, as our receive: how many of ours it had used before."""
    rank_of = plan.placement.rank_of
    used = 0
    found: dict[int, int] = {}
    for code in plan.codes[peer]:
        if code & OP in SENDS and rank_of(peer_of(code)) == rank:
            found[partner_of(code)] = used
        for receive in _needed(plan, code):
            used = max(used, sent.get(partner_of(receive), 0))
    return found


def _needed(plan: Plan, code: int) -> list[int]:
    """The receives that a compute action needs."""
    if code & OP not in COMPUTES:
        return []
    return [
        need | part & MICROBATCH_FIELD
        for part in parts(code)
        for need in plan.rules.needs(part & KEY)
        if need & OP in RECEIVES
    ]
