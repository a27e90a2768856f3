"""Runs of actions over neighbouring microbatches, and runs woven together: what every schedule is made of.

>>> from penstock.plan.actions import backward, forward, text
>>> " ".join(map(text, weave(2, forward(0, 3), backward(0, 0))))
'0F3 0B0 0F4 0B1'

Packed actions of neighbouring microbatches are `STEP` apart, so a run is a `range`, and a weave is a few slice
assignments: no step of Python for each action.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from penstock.plan.action_positions import STEP, column

run = column  # from any packed action on, the same for the next microbatches


def weave(count: int, *firsts: int) -> list[int]:
    """`count` rounds, each of which takes one action from every run."""
    return alternate(*(run(first, count) for first in firsts))


def alternate(*tracks: Sequence[int]) -> list[int]:
    """Rounds that take one action from every track; the tracks are of one length."""
    woven = [0] * sum(map(len, tracks))
    for position, track in enumerate(tracks):
        woven[position :: len(tracks)] = track
    return woven


def repeat(block: Iterable[tuple[int, int]], interval: int, num_microbatches: int) -> list[int]:
    """Repeat a building block every `interval`, once a microbatch, and order all actions by their time.

    The block holds (time, action for microbatch 0). No two of its times may be equal modulo the interval.

    >>> from penstock.plan.actions import backward, forward, text
    >>> " ".join(map(text, repeat([(0, forward(0, 0)), (3, backward(0, 0))], 2, 3)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    phased = sorted((time % interval, time // interval, code) for time, code in block)
    edges = sorted({edge for _, begin, _ in phased for edge in (begin, begin + num_microbatches)})
    actions: list[int] = []
    for low, high in pairwise(edges):
        active = [code + (low - begin) * STEP for _, begin, code in phased if begin <= low < begin + num_microbatches]
        actions += weave(high - low, *active)
    return actions
