"""Lists of one rank for interleaved schedules, as programs that write their own schedules build them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.compat._vocabulary import ComputationType as Kind
from penstock.compat._vocabulary import NamedAction

StageOf = Callable[[int], int]


class _Writer:
    """Writes actions down and hands out microbatch numbers: the next of its kind and stage."""

    def __init__(self) -> None:
        self.actions: list[NamedAction | None] = []
        self.numbers: Counter[tuple[Kind, int]] = Counter()

    def add(self, kind: Kind, stage: int) -> None:
        self.actions.append(NamedAction(stage, kind, self.numbers[kind, stage]))
        self.numbers[kind, stage] += 1

    def idle(self, slots: int) -> None:
        self.actions.extend([None] * slots)


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
    writer = _Writer()
    writer.idle(rank)
    hops = pp_group_size - 1 - rank
    aligned = n_local_stages * pp_group_size + 2 * hops - warmup_ops - rank
    kind = Kind.BACKWARD_INPUT if enable_zero_bubble else Kind.FULL_BACKWARD
    owed: list[int] = []  # stages whose weight work waits, the oldest first
    for at in range(warmup_ops + fwd_bwd_ops + cooldown_ops):
        if at < warmup_ops + fwd_bwd_ops:
            writer.add(Kind.FORWARD, forward_stage_index(at))
        elif not enable_zero_bubble:
            writer.idle(1)
        if at == warmup_ops - 1:
            writer.idle(hops if enable_zero_bubble else aligned)
        if at >= warmup_ops:
            writer.add(kind, backward_stage_index(at))
            owed.append(backward_stage_index(at))
            if enable_zero_bubble and at - warmup_ops >= num_1f1b_microbatches:
                writer.add(Kind.BACKWARD_WEIGHT, owed.pop(0))
    for stage in owed if enable_zero_bubble else ():
        writer.add(Kind.BACKWARD_WEIGHT, stage)
    return writer.actions
