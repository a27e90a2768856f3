"""Colours: that of the op (see `penstock.plan.ops`), in a shade for each stage of a rank, and what can be read on it."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from penstock.plan import Op, Plan

_DARK, _LIGHT = "#101827", "#ffffff"
_PALEST: Final = 0.58  # how far the last of several stages on a rank goes towards white


class Paint(NamedTuple):
    """A fill, and a text colour that can be read on it."""

    fill: str
    ink: str


@lru_cache(maxsize=4096)
def paint(op: Op, shade: int = 0, shades: int = 1) -> Paint:
    """The colour of an action on the `shade`-th of the `shades` stages of its rank.

    >>> paint(Op.F)
    Paint(fill='#2f6fdb', ink='#ffffff')
    >>> paint(Op.F, 1, 2).ink
    '#101827'
    """
    towards_white = _PALEST * shade / (shades - 1) if shades > 1 else 0.0
    mixed = tuple(round(part + (255 - part) * towards_white) for part in bytes.fromhex(op.row.colour[1:]))
    return Paint("#{:02x}{:02x}{:02x}".format(*mixed), _ink(mixed))


def shades(plan: Plan) -> dict[int, tuple[int, int]]:
    """For each stage: its place among the stages of its rank, and how many those are."""
    ranks = map(plan.placement.stages_of, range(plan.num_ranks))
    return {stage: (place, len(stages)) for stages in ranks for place, stage in enumerate(stages)}


def rank_colour(rank: int, num_ranks: int) -> str:
    """A colour for the curve of one rank: from blue for the first to red for the last, for any background."""
    hue = 215 - 215 * rank / max(num_ranks - 1, 1)
    return f"hsl({hue:.0f} 62% 52%)"


def _ink(rgb: tuple[int, ...]) -> str:
    """White or near black, whichever contrasts more (the relative luminance of WCAG)."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return _LIGHT if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.0586 else _DARK
