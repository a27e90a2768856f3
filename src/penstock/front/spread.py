"""A value from one rank to others: the outputs of the last stage, for whoever wants them. Tensors and plain numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.comm.framing import complete, frame, receive_frame
from penstock.comm.transport import Transport
from penstock.dtypes import dtype_name, dtype_named
from penstock.stage.boundary import Spec, flatten, unflatten
from penstock.stage.dtensors import to_local


def send_to(transport: Transport, ranks: Sequence[int], value: Any) -> None:
    """Send a tree of tensors to these ranks."""
    tensors, spec = flatten(value)
    local = [to_local(tensor.detach()).contiguous() for tensor in tensors]
    rows = [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in local]
    described = frame(0, json.dumps([rows, spec.to_json()]).encode(), transport.device)
    works = [transport.isend(tensor, rank) for rank in ranks for tensor in (*described, *local)]
    for work in works:
        work.wait()


def receive_from(transport: Transport, rank: int) -> Any:
    """Receive what `send_to` sends."""

    def receive(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(tuple(shape), dtype=dtype, device=transport.device)
        transport.irecv(buffer, rank).wait()
        return buffer

    _, description = complete(receive_frame(lambda parts: transport.irecv(parts[0], rank), transport.device))
    rows, spec = json.loads(description)
    return unflatten(Spec.from_json(spec), [receive(shape, dtype_named(dtype)) for shape, dtype in rows])
