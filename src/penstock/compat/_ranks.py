"""Lists of one rank for interleaved schedules, as programs that write their own schedules build them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count

from penstock.compat._vocabulary import ComputationType as Kind
from penstock.compat._vocabulary import NamedAction

StageOf = Callable[[int], int]


def get_warmup_ops(
    rank: int,  # in the group
    n_local_stages: int,  # on this rank
    microbatches_per_round: int,  # that one stage takes before the next one of the rank
    pp_group_size: int,
    n_microbatches: int,  # of a step
    multiply_factor: int = 2,  # forwards for each hop to the last rank
) -> int:
    """How many forwards a rank does before its first backward."""
    wanted = (n_local_stages - 1) * microbatches_per_round + multiply_factor * (pp_group_size - 1 - rank)
    return min(wanted, n_microbatches * n_local_stages)


def get_1f1b_rank_ops(
    n_local_stages: int,
    pp_group_size: int,
    warmup_ops: int,
    fwd_bwd_ops: int,
    cooldown_ops: int,
    rank: int,
    forward_stage_index: StageOf,
    backward_stage_index: StageOf,
    num_1f1b_microbatches: int = 0,
    enable_zero_bubble: bool = False,
) -> list[NamedAction | None]:
    """Forwards, then a forward and a backward in turn, then backwards; with `enable_zero_bubble` weights come later."""
    slots: list[tuple[int, Kind] | None] = [None] * rank  # None: idle
    hops = pp_group_size - 1 - rank
    aligned = n_local_stages * pp_group_size + 2 * hops - warmup_ops - rank
    kind = Kind.BACKWARD_INPUT if enable_zero_bubble else Kind.FULL_BACKWARD
    owed: list[int] = []  # stages whose weight work waits, the oldest first
    for at in range(warmup_ops + fwd_bwd_ops + cooldown_ops):
        if at < warmup_ops + fwd_bwd_ops:
            slots.append((forward_stage_index(at), Kind.FORWARD))
        elif not enable_zero_bubble:
            slots.append(None)
        if at == warmup_ops - 1:
            slots += [None] * (hops if enable_zero_bubble else aligned)
        if at >= warmup_ops:
            slots.append((backward_stage_index(at), kind))
            owed.append(backward_stage_index(at))
            if enable_zero_bubble and at - warmup_ops >= num_1f1b_microbatches:
                slots.append((owed.pop(0), Kind.BACKWARD_WEIGHT))
    slots += [(stage, Kind.BACKWARD_WEIGHT) for stage in owed if enable_zero_bubble]
    microbatches: defaultdict[tuple[int, Kind], Iterator[int]] = defaultdict(count)  # the next of its stage and kind
    return [slot and NamedAction(*slot, next(microbatches[slot])) for slot in slots]
