"""All passes in their order: for a whole plan, or rank by rank as its lists are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.lower.global_message_order import add_messages_in_one_order
from penstock.lower.merge_backward import free_stages, merge, merge_backward
from penstock.lower.message_pass import Early, InTurn, MessageLowering, ReceivePolicy
from penstock.lower.reduce_grad_pass import reduce_grad
from penstock.lower.unshard_pass import unshard_reshard
from penstock.plan import Plan, Rules
from penstock.plan.check_communicators import QueueLayout


def lower(
    plan: Plan,
    *,
    receives: ReceivePolicy = Early(),
    shards: bool = False,
    max_unsharded: int = 3,
    reduce: bool = False,
    queues: QueueLayout = "direction",
) -> Plan:
    """From what is computed to all that is done: messages, care of parameters; I and W merged where it delays nobody.

        lower(get_schedule("1f1b")(2, 4), shards=True, reduce=True)

    `shards` is for stages whose parameters are sharded (FSDP2), `reduce` for stages with data-parallel replicas. `queues`
    selects which messages share a queue of the transport (`penstock.plan.check_communicators`); `receives` is a choice only if
    each direction has its own queue, and `InTurn` means the same.
    """
    check_types("lower", PlanError, plan=(plan, Plan), receives=(receives, ReceivePolicy), queues=(queues, str))
    check_types("lower", PlanError, shards=(shards, bool | int), reduce=(reduce, bool | int))
    check_types("lower", PlanError, max_unsharded=(max_unsharded, int))
    care = Care(shards, max_unsharded, reduce)
    if isinstance(receives, InTurn) or queues != "direction":
        merged = merge_backward(plan, everywhere=False)
        return add_messages_in_one_order(merged.with_codes(care.taken(c, plan.num_microbatches) for c in merged.codes))
    lowered = lower_shares(plan, receives=receives, care=care)
    return lowered.with_codes(lowered.codes)


@dataclass(frozen=True)
class Care:
    """Data-parallel actions that lowering inserts: UNSHARD and RESHARD of sharded parameters, REDUCE_GRAD.

    Care(shards=True, reduce=True)
    """

    shards: bool = False
    max_unsharded: int = 3
    reduce: bool = False

    def taken(self, codes: Sequence[int], num_microbatches: int) -> Sequence[int]:
        """The list of one rank with it."""
        if self.shards:
            codes = unshard_reshard(codes, self.max_unsharded)
        return reduce_grad(codes, num_microbatches) if self.reduce else codes


def lower_shares(plan: Plan, *, receives: ReceivePolicy = Early(), care: Care = Care()) -> Plan:
    """Lower a plan lazily: the list of a rank is lowered on first access, from the actions of the rank and its neighbors.

    >>> from penstock.schedules import get_schedule
    >>> len(lower_shares(get_schedule("1f1b")(1024, 8)).codes[500])
    48
    """
    check_types("lower_shares", PlanError, plan=(plan, Plan), receives=(receives, ReceivePolicy), care=(care, Care))
    rules = Rules(plan.graph, plan.placement, lowered=True)

    @lru_cache(maxsize=8)
    def codes_of(rank: int) -> Sequence[int]:
        return care.taken(merge(plan.codes[rank], free_stages(rules, rank)), plan.num_microbatches)

    lowering = MessageLowering(plan, codes_of, receives)
    return plan.with_lists(lowering.rank, f"lowered with {receives} and {care}", lowered=True)
