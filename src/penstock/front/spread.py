"""A value from one rank to others: the outputs of the last stage, for whoever wants them. Tensors and plain numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.comm.transport import Transport
from penstock.stage.boundary import Spec, flatten, unflatten
from penstock.stage.dtensors import to_local

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def send_to(transport: Transport, ranks: Sequence[int], value: Any) -> None:
    """Send a tree of tensors to these ranks."""
    tensors, spec = flatten(value)
    local = [to_local(tensor.detach()).contiguous() for tensor in tensors]
    rows = [[list(tensor.shape), str(tensor.dtype)] for tensor in local]
    text = bytearray(json.dumps([rows, spec.to_json()]).encode())
    blob = torch.frombuffer(text, dtype=torch.uint8).to(transport.device)
    length = torch.tensor([blob.numel()], dtype=torch.int64, device=transport.device)
    works = [transport.isend(tensor, rank) for rank in ranks for tensor in (length, blob, *local)]
    for work in works:
        work.wait()


def receive_from(transport: Transport, rank: int) -> Any:
    """Receive what `send_to` sends."""

    def receive(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(tuple(shape), dtype=dtype, device=transport.device)
        transport.irecv(buffer, rank).wait()
        return buffer

    length = int(receive([1], torch.int64).item())
    rows, spec = json.loads(bytes(receive([length], torch.uint8).tolist()))
    return unflatten(Spec.from_json(spec), [receive(shape, _DTYPES[dtype]) for shape, dtype in rows])
