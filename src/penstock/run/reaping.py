"""When the sends of a cold step are known to have arrived, so that waiting for them cannot block and frees their memory.

In a cold step a receive happens when its value is needed, so a send may be under way for long. But a rank that has used a
message from another knows what the other had used before it sent that: everything up to there has arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from penstock.plan import Plan
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts, peer_of
from penstock.plan.ops import MESSAGES, SENDS


def reap_points(plan: Plan, rank: int) -> dict[int, list[tuple[int, int]]]:
    """By position in the rank's list: after that action, the first `count` sends to `peer` have arrived: (peer, count)."""
    rank_of, needed, codes = plan.placement.rank_of, cache(plan.rules.receives), plan.codes[rank]
    peers = {key: rank_of(peer_of(key)) for key in set(map(KEY.__and__, codes)) if key & OP in MESSAGES}
    order: dict[int, dict[int, int]] = {}  # by peer: its receives of our sends, and how many they are with those before
    for code in codes:
        if code & OP in SENDS:
            sent = order.setdefault(peers[code & KEY], {})
            sent[partner_of(code)] = len(sent) + 1
    told: dict[int, int] = {}  # by our receive: how many of our sends its sender had used before
    for peer, sent in order.items():
        told.update(_told(plan, peer, rank, sent, needed))
    points: dict[int, list[tuple[int, int]]] = {}
    best = dict.fromkeys(order, 0)
    for position, code in enumerate(codes):
        for part in parts(code):
            for need in needed(part & KEY):
                count, peer = told.get(need | part & MICROBATCH_FIELD, 0), peers[need]
                if count > best.get(peer, count):
                    best[peer] = count
                    points.setdefault(position, []).append((peer, count))
    return points


def _told(
    plan: Plan, peer: int, rank: int, sent: dict[int, int], needed: Callable[[int], tuple[int, ...]]
) -> dict[int, int]:
    """For each message that the peer sends to us, as our receive: how many of ours it had used before."""
    codes, rank_of = plan.codes[peer], plan.placement.rank_of
    keys = {key for key in set(map(KEY.__and__, codes)) if key & OP in SENDS and rank_of(peer_of(key)) == rank}
    partners = {key: partner_of(key) for key in keys}
    used = 0
    found: dict[int, int] = {}
    for code in codes:
        for part in parts(code):
            key = part & KEY
            if key in partners:
                found[partners[key] | part & MICROBATCH_FIELD] = used
            for need in needed(key):
                used = max(used, sent.get(need | part & MICROBATCH_FIELD, 0))
    return found
