"""A measured step again, with the time that each single action took in it: how long it takes by what is known of messages.

replayed(plan, lengths, delays, pickup=3e-5)      # lengths by rank and position, delays by ordered pair of ranks

Equal actions do not take equal time, and not on all ranks at once: so the ranks wait for one another longer than they would if
every action took its mean. (The end of a step is a maximum of sums of such times, so with the means it comes never later than on
the mean of the steps.) The difference is what `Costs.uneven` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import inf

from penstock.errors import DeadlockError
from penstock.plan import Plan
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, parts
from penstock.plan.ops import COMPUTES, SENDS


def replayed(
    plan: Plan, lengths: Sequence[Sequence[float]], delays: Mapping[tuple[int, int], float], *, pickup: float
) -> float:
    """From the first start to the last end of what is computed.

    A rank does its actions one after another. One that needs messages begins when the last of them has been under way for its
    delay, or, if they are there already, when the rank has picked them up.
    """
    needing, usual = cache(plan.rules.receives), max(delays.values(), default=0.0)
    sent: dict[int, tuple[int, float]] = {}  # by receive: by whom and when
    at, free = [0] * plan.num_ranks, [0.0] * plan.num_ranks
    first, last, waiting = inf, 0.0, set(range(plan.num_ranks))
    while waiting:
        before = sum(at)
        for rank in tuple(waiting):
            codes = plan.codes[rank]
            while at[rank] < len(codes):
                code, start = codes[at[rank]], free[rank]
                wanted = [need | part & MICROBATCH_FIELD for part in parts(code) for need in needing(part & KEY)]
                if not all(need in sent for need in wanted):
                    break
                if wanted:
                    there = (left + delays.get((sender, rank), usual) for sender, left in map(sent.__getitem__, wanted))
                    start = max(start, *there) + pickup
                free[rank] = start + lengths[rank][at[rank]]
                if code & OP in COMPUTES:
                    first, last = min(first, start), max(last, free[rank])
                elif code & OP in SENDS:
                    sent[partner_of(code)] = rank, free[rank]
                at[rank] += 1
            else:
                waiting.discard(rank)
        if sum(at) == before and waiting:
            raise DeadlockError(f"ranks {sorted(waiting)} wait for messages that nobody sends; expected a lowered plan")
    return last - first if last else 0.0
