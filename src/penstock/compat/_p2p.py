"""P2P operations as programs written for torch.distributed.pipelining post them: `torch.distributed.P2POp` in lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from penstock.compat._exchange import TransportOp


def batch_p2p(p2p_ops: Sequence[Any], desc: str | None = None) -> list[Any]:
    """Post operations. Sends only, or receives only, go one by one; a mixture goes as one batch, so that it cannot hang."""
    if not p2p_ops:
        return []
    if isinstance(p2p_ops[0], TransportOp):
        return [op.post() for op in p2p_ops]
    kinds = {op.op for op in p2p_ops}
    if kinds == {dist.isend}:
        return [dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in p2p_ops]
    if kinds == {dist.irecv}:
        return [dist.irecv(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in p2p_ops]
    return dist.batch_isend_irecv(list(p2p_ops))


def sorted_batch_p2p(p2p_ops: Iterable[Any], desc: str | None = None) -> dict[int, list[Any]]:
    """Post operations rank by rank of the other end, in the order of ranks; their works by that rank."""
    by_peer: dict[int, list[Any]] = {}
    for op in p2p_ops:
        by_peer.setdefault(op.peer, []).append(op)
    return {peer: batch_p2p(by_peer[peer], desc) for peer in sorted(by_peer)}


def wait_batch_p2p(work: Iterable[Any]) -> None:
    """Wait for posted operations."""
    for one in work:
        one.wait()
