"""The norm of all gradients, over all stages and replicas, each parameter once: that of the model before it was cut."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.front.ends import Ends
from penstock.stage.dtensors import to_local


def total_norm(gradients: Iterable[Tensor], ends: Ends, *, norm_type: float = 2.0) -> float:
    """Of the gradients that count here, and of those on the other ranks."""
    if not norm_type > 0:
        raise RunError(f"norm_type={norm_type}; expected a number above 0, or math.inf")
    largest = math.isinf(norm_type)
    whole, parts = torch.zeros(2, dtype=torch.float64, device=ends.transport.device)
    for grad in gradients:
        sharded = hasattr(grad, "placements")
        local = to_local(grad).detach()
        size = torch.linalg.vector_norm(local, norm_type).to(torch.float64) if local.numel() else whole.new_zeros(())
        term = size if largest else size**norm_type
        if sharded:
            parts = torch.maximum(parts, term) if largest else parts + term
        else:
            whole = torch.maximum(whole, term) if largest else whole + term
    if ends.num_replicas > 1:
        dist.all_reduce(parts, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=ends.mesh.get_group())
    here = torch.maximum(whole, parts) if largest else whole + parts
    everywhere = torch.zeros(ends.transport.num_ranks, dtype=torch.float64, device=here.device)
    everywhere[ends.rank] = here
    if ends.transport.num_ranks > 1:
        ends.transport.sum(everywhere)
    return float(everywhere.max()) if largest else float(everywhere.sum()) ** (1 / norm_type)


@torch.no_grad()
def scale(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply in place."""
    local = [to_local(grad) for grad in gradients]
    if local:
        torch._foreach_mul_(local, factor)
