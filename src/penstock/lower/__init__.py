"""One file a pass: Plan -> Plan (messages, shards, reduction, merging, holding less), and all that lowering takes in order."""

from __future__ import annotations

from penstock.lower.divide_stages import divide
from penstock.lower.global_message_order import add_messages_in_one_order
from penstock.lower.lower import Care, lower, lower_shares
from penstock.lower.merge_backward import merge_backward
from penstock.lower.message_pass import Ahead, Early, InTurn, JustInTime, ReceivePolicy, add_messages
from penstock.lower.offload_pass import offload
from penstock.lower.recompute_pass import recompute, recompute_rank
from penstock.lower.reduce_grad_pass import add_reduce_grad
from penstock.lower.unshard_pass import add_unshard_reshard

__all__ = [
    "Ahead",
    "Care",
    "Early",
    "InTurn",
    "JustInTime",
    "ReceivePolicy",
    "add_messages",
    "add_messages_in_one_order",
    "add_reduce_grad",
    "add_unshard_reshard",
    "divide",
    "lower",
    "lower_shares",
    "merge_backward",
    "offload",
    "recompute",
    "recompute_rank",
]
