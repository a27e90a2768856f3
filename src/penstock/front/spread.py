"""Values from one rank to others: the loss, and the outputs of the last stage for whoever wants them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from penstock.comm.framing import complete, frame, receive_frame
from penstock.comm.transport import Transport
from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import RanksDisagree, RunError
from penstock.front.ends import Ends
from penstock.nest import Value
from penstock.run.layout import wire
from penstock.stage.boundary import Spec, flatten, unflatten

Where = Literal["all", "last"] | int | None  # on which ranks the outputs are wanted
_NOTHING, _FAILED = -1, -2  # in place of a number of rows


def send_to(transport: Transport, ranks: Sequence[int], value: object) -> None:
    """Send a tree of tensors to these ranks."""
    tensors, spec = flatten(value)
    local = [wire(tensor.detach()) for tensor in tensors]
    rows = [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in local]
    described = frame(0, json.dumps([rows, spec.to_json()]).encode())
    works = [transport.control.isend(part, rank) for rank in ranks for part in described]
    works += [transport.isend(tensor, rank) for rank in ranks for tensor in local]
    for work in works:
        work.wait()


def receive_from(transport: Transport, rank: int) -> Value:
    """Receive what `send_to` sends."""

    def receive(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(tuple(shape), dtype=dtype, device=transport.device)
        transport.irecv(buffer, rank).wait()
        return buffer

    _, description = complete(receive_frame(lambda parts: transport.control.irecv(parts[0], rank)))
    rows, spec = json.loads(description)
    return unflatten(Spec.from_json(spec), [receive(shape, dtype_named(dtype)) for shape, dtype in rows])


def deliver(ends: Ends, value: object, outputs: Where, *, last: int) -> Value:
    """The outputs on the ranks that want them."""
    if outputs is None or outputs == "last":
        return value
    wanted = range(ends.num_ranks) if outputs == "all" else (int(outputs),)
    others = [other for other in wanted if other != last]
    with ends.among_replicas():  # who must hear of it if this pipeline cannot go on
        if ends.rank == last:
            send_to(ends.transport, others, value)
            return value if last in wanted else None
        return receive_from(ends.transport, last) if ends.rank in others else None


def check_where(outputs: object, num_ranks: int) -> None:
    """Before anything runs: whether there is such a place."""
    if outputs in (None, "all", "last") or (type(outputs) is int and 0 <= outputs < num_ranks):
        return
    raise RunError(f'outputs={outputs!r}; expected "all", "last", a rank from 0 to {num_ranks - 1}, or nothing')


def share_losses(ends: Ends, total: float | None, losses: Sequence[float], *, count: int, last: int) -> list[float]:
    """The loss of the batch and of each microbatch, from the last stage's rank, on every rank."""
    shared = torch.full((count + 1,), float("nan"), dtype=torch.float64, device=ends.transport.device)
    if total is not None:
        shared.copy_(torch.tensor([total, *losses], dtype=torch.float64))
    with ends.among_replicas():
        if ends.transport.num_ranks > 1:
            ends.transport.broadcast(shared, last)
        ends.mean_over_replicas(shared[:1])
    return [float(value) for value in shared]


def agree_on_rows(ends: Ends, rows: int | None, problem: Exception | None) -> int | None:
    """The rows of the batch, which are the same on all ranks that were given one; else every rank raises."""
    if ends.transport.num_ranks == 1:
        if problem is not None:
            raise problem
        return rows
    table = torch.zeros(ends.transport.num_ranks, dtype=torch.float64)
    table[ends.rank] = _FAILED if problem is not None else _NOTHING if rows is None else rows
    with ends.transport.alone("evaluate() or predict()"), ends.among_replicas():
        ends.transport.sum(table)
    found = [int(value) for value in table]
    if problem is not None:
        raise problem
    if _FAILED in found:
        raise RunError(f"rank {found.index(_FAILED)} was given a batch that cannot be cut, and says why")
    given = {rank: count for rank, count in enumerate(found) if count != _NOTHING}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in given.items())
        raise RanksDisagree(
            f"the ranks were given batches of different sizes (rows: {listed}); give every rank the same"
        )
    return next(iter(given.values()), None)
