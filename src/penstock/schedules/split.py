"""What zero-bubble schedules over a loop share: forwards ahead, then F I W in turn, with some weight work owed.

::

    ahead = 2, owed = 1:   F0 F1 | F2 I0 | F3 I1 W0 | I2 W1 | I3 W2 | W3
"""

from __future__ import annotations

from penstock.schedules.weave import alternate


def split_actions(forwards: list[int], inputs: list[int], weights: list[int], *, ahead: int, owed: int) -> list[int]:
    """`ahead` forwards come before the first pair F I; the first `owed` input backwards are not followed by a W."""
    total = len(forwards)
    steady = total - ahead  # rounds with a forward
    owed = min(owed, total)
    actions = forwards[:ahead]
    both = min(steady, owed)  # rounds F I
    actions += alternate(forwards[ahead : ahead + both], inputs[:both])
    if owed < steady:  # rounds F I W, then I W
        actions += alternate(forwards[ahead + both :], inputs[both:steady], weights[: steady - owed])
        actions += alternate(inputs[steady:], weights[steady - owed : total - owed])
    else:  # rounds I, then I W
        actions += inputs[steady:owed]
        actions += alternate(inputs[owed:], weights[: total - owed])
    actions += weights[total - owed :]
    return actions
