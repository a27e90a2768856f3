"""Values from one rank to others: the outputs of the last stage, for whoever wants them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import torch

from penstock.comm.framing import complete, frame, receive_frame
from penstock.comm.transport import Transport
from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import RunError
from penstock.front.ends import Ends
from penstock.nest import Value
from penstock.run.layout import wire
from penstock.stage.boundary import Spec, flatten, unflatten

Where = Literal["all", "last"] | int | None  # on which ranks the outputs are wanted


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

    _, description = complete(receive_frame(lambda parts: transport.control.irecv(parts[0], rank)))
    rows, spec = json.loads(description)
    buffers = [torch.empty(shape, dtype=dtype_named(dtype), device=transport.device) for shape, dtype in rows]
    for buffer in buffers:
        transport.irecv(buffer, rank).wait()
    return unflatten(Spec.from_json(spec), buffers)


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
