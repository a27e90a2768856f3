"""P2P operations as programs written for torch.distributed.pipelining post them: `torch.distributed.P2POp` in lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from penstock.comm.messages import Work
from penstock.comm.transport import Transport


class TransportOp:
    """A send or receive between ranks that are threads; a process group's are `torch.distributed.P2POp`."""

    def __init__(self, transport: Transport, tensor: Tensor, peer: int, *, sends: bool) -> None:
        self.transport, self.tensor, self.peer, self.sends = transport, tensor, peer, sends

    def post(self) -> Work:
        return (self.transport.isend if self.sends else self.transport.irecv)(self.tensor, self.peer)


P2P: TypeAlias = "dist.P2POp | TransportOp"
"""A send or receive that is not posted yet."""


def batch_p2p(p2p_ops: Sequence[P2P], desc: str | None = None) -> list[Any]:
    """Post operations. Sends only, or receives only, go one by one; a mixture goes as one batch, so that it cannot hang."""
    ops = [op for op in p2p_ops if not isinstance(op, TransportOp)]
    if not ops:
        return [op.post() for op in p2p_ops if isinstance(op, TransportOp)]
    kinds = {op.op for op in ops}
    if kinds == {dist.isend}:
        return [dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in ops]
    if kinds == {dist.irecv}:
        return [dist.irecv(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in ops]
    return dist.batch_isend_irecv(ops)


def sorted_batch_p2p(p2p_ops: Iterable[P2P], desc: str | None = None) -> dict[int, list[Any]]:
    """Post operations rank by rank of the other end, in the order of ranks; their works by that rank."""
    by_peer: dict[int, list[P2P]] = {}
    for op in p2p_ops:
        by_peer.setdefault(op.peer, []).append(op)
    return {peer: batch_p2p(by_peer[peer], desc) for peer in sorted(by_peer)}


def wait_batch_p2p(work: Iterable[Work]) -> None:
    """Wait for posted operations."""
    for one in work:
        one.wait()
