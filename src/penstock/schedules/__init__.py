"""One file a schedule: sizes (and costs) -> plan of compute actions."""

from __future__ import annotations

from functools import partial

from penstock.schedules import (
    dualpipev,
    forward_only,
    generalized_interleaved,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zbv,
)
from penstock.schedules.registry import Recipe, Sizes, all_schedules, get_schedule, register

_family = partial(Recipe, is_family=True)
_one = partial(_family, stages_per_rank=1)
_several = partial(_family, default_stages_per_rank=2)
_v = partial(_family, placement="v", stages_per_rank=2)

for _recipe in (
    _family("forward", "forward only, for evaluation", forward_only.rank_actions, aliases=("ForwardOnly",)),
    _one("gpipe", "all forwards, then all backwards", gpipe.rank_actions),
    _one("1f1b", "one forward, one backward", one_f_one_b.rank_actions),
    _several("loopedbfs", "looped breadth-first", looped_bfs.rank_actions),
    _several("interleaved1f1b", "interleaved 1F1B", interleaved_1f1b.rank_actions),
    _several("interleavedzerobubble", "interleaved zero bubble", interleaved_zero_bubble.rank_actions),
    _v("zbv", "zero bubble, V-shaped", zbv.rank_actions, aliases=("ZBVZeroBubble", "V-ZB")),
    _v("dualpipev", "overlapped pairs, V-shaped", dualpipev.rank_actions),
    _one("zb-h1", "zero bubble with the memory of 1F1B", zb_h1.rank_actions),
    _one("zb-h2", "zero bubble with twice the memory of 1F1B", zb_h2.rank_actions),
    _v("v-half", "V-shaped, half the memory of 1F1B", v_half.rank_actions),
    _v("v-min", "V-shaped, a third of the memory of 1F1B", v_min.rank_actions),
    _several(
        "gis",
        "generalised interleaved, smallest groups",
        generalized_interleaved.rank_actions,
        aliases=("GeneralisedInterleaved", "GeneralizedInterleaved"),
    ),
    _several(
        "zb-gis",
        "generalised interleaved, smallest groups, zero bubble",
        generalized_interleaved.zero_bubble_actions,
    ),
):
    register(_recipe)

__all__ = ["Recipe", "Sizes", "all_schedules", "get_schedule", "register"]
