"""What zero-bubble schedules over a loop share: forwards ahead, then F I W in turn, with some weight work owed.

::

    ahead = 2, owed = 1:   F0 F1 | F2 I0 | F3 I1 W0 | I2 W1 | I3 W2 | W3
"""

from __future__ import annotations

from penstock.plan.actions import backward_input, backward_weight, forward
from penstock.schedules.interleaved import Rounds, track, warmup
from penstock.schedules.registry import Sizes
from penstock.schedules.weave import alternate


def split_in_turn(sizes: Sizes, rank: int, taken: Rounds, *, per_hop: int = 1, owed: int) -> list[int]:
    """As many forwards ahead as the rounds ask for; the first `owed` input backwards are not followed by a W."""
    forwards, inputs, weights = (track(kind, sizes, rank, taken) for kind in (forward, backward_input, backward_weight))
    total = len(forwards)
    ahead, owed = min(warmup(sizes, rank, taken, per_hop=per_hop), total), min(owed, total)
    steady = total - ahead  # rounds with a forward
    actions = forwards[:ahead]
    both = min(steady, owed)  # rounds F I
    actions += alternate(forwards[ahead : ahead + both], inputs[:both])
    if owed < steady:  # rounds F I W, then I W
        actions += alternate(forwards[ahead + both :], inputs[both:steady], weights[: steady - owed])
        actions += alternate(inputs[steady:], weights[steady - owed : total - owed])
    else:  # rounds I, then I W
        actions += inputs[steady:owed]
        actions += alternate(inputs[owed:], weights[: total - owed])
    return actions + weights[total - owed :]
