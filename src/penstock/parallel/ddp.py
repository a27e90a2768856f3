"""DistributedDataParallel, and the composable `replicate` that is built on it.

For the time of a step the wrapper is told not to synchronise. `.grad` grows as autograd adds to it, whatever the
schedule and the split, and every hook fires as it would without a wrapper. REDUCE_GRAD then averages `.grad` over the
replicas. An average of what is equal everywhere changes nothing, so gradients that earlier steps left there stay right.

Buffers are broadcast once a step (the wrapper itself does so once a forward). A communication hook of the user is given
the buckets that DDP's own reducer would give it.

A wrapper goes on to work by itself between steps. One with `static_graph=True` must have done so before its first step,
because the reducer learns the graph from the first backward that it sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import StageError
from penstock.parallel.buckets import agree_in_host_memory, average_gradients, average_sparse_gradients, local
from penstock.parallel.protocol import Adapter, change, replica_failed

if TYPE_CHECKING:
    from torch.distributed._composable.replicate import _ReplicateState


class DDPAdapter(Adapter):
    """One `DistributedDataParallel`, at the top of a stage's module or anywhere within it."""

    _syncs = True

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        super().__init__()
        _refuse_what_cannot_wait(wrapper)
        self._wrapper = wrapper

    def begin(self) -> None:
        super().begin()
        ddp, flags = self._wrapper, self._flags
        self._syncs = ddp.require_backward_grad_sync
        replicas = self._meet(ddp.process_group)
        if ddp.will_sync_module_buffers():
            with replicas.explained():
                ddp._sync_buffers()
        change(flags, ddp, "require_forward_param_sync", False)
        change(flags, ddp, "require_backward_grad_sync", False)
        change(flags, ddp, "find_unused_parameters", False)  # else it copies every output to find what buckets say
        if ddp.static_graph:
            change(flags, ddp, "_static_graph_delay_allreduce_enqueued", True)  # else the first backward reduces

    def end(self, *, failed: bool = True) -> None:
        if self._close():
            self._flags.close()
            self._wrapper.require_forward_param_sync = self._syncs  # as its own forward would leave it

    def reduce_grad(self, *, failed: bool = False) -> None:
        super().reduce_grad(failed=failed)
        if not self._syncs:  # the user's own `no_sync()` stands around the step
            return
        ddp = self._wrapper
        average = _average_through_hook if _has_comm_hook(ddp) else _average
        failures = average(ddp, failed)
        if failures and not failed:
            raise replica_failed(ddp.process_group, failures)


class ReplicateAdapter(DDPAdapter):
    """A module under `torch.distributed._composable.replicate`, which makes its DDP at the first forward."""

    def __init__(self, state: _ReplicateState) -> None:
        Adapter.__init__(self)
        self._state = state

    def begin(self) -> None:
        state = self._state
        if state._init_args or state._init_kwargs:
            state.lazy_init()
        _refuse_what_cannot_wait(state._ddp)
        self._wrapper = state._ddp
        self._wrapper.require_backward_grad_sync = not state._no_sync
        super().begin()
        change(self._flags, state, "_no_sync", True)


def _refuse_what_cannot_wait(ddp: DistributedDataParallel) -> None:
    """Options of DDP that communicate in the middle of a backward and cannot be told to wait."""
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters)
    options = [
        (ddp.mixed_precision is not None, "mixed_precision", "use autocast, or fully_shard and its mp_policy"),
        (ddp._delay_all_reduce_params, "delay_all_reduce_named_params", "leave it out, REDUCE_GRAD delays everything"),
        (hasattr(ddp, "buffer_hook"), "a hook for buffers", "leave it out, buffers are broadcast once a step"),
        (in_backward, "optimizers in backward", "call the optimizer after the step, gradients are complete then"),
    ]
    for present, name, advice in options:
        if present:
            raise StageError(
                f"a stage is wrapped in DistributedDataParallel with {name}, which acts within each backward, "
                f"that is for each microbatch; {advice}"
            )


def _has_comm_hook(ddp: DistributedDataParallel) -> bool:
    # Those that are written in C++ show up in the logging data alone.
    return bool(ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))


def _average(ddp: DistributedDataParallel, failed: bool) -> list[int]:
    """The replicas that have failed."""
    trained = [p for p in ddp._module_parameters if p.requires_grad]
    rows = _sparse_parameters(ddp.module)
    dense = [p for p in trained if id(p) not in rows]
    failures = average_gradients(dense, ddp.process_group, bucket_bytes=ddp.bucket_bytes_cap, failed=failed)
    if rows and not failures:
        average_sparse_gradients([p for p in trained if id(p) in rows], ddp.process_group)
    return failures


@torch.no_grad()
def _average_through_hook(ddp: DistributedDataParallel, failed: bool) -> list[int]:
    """The same by the user's hook: give it `.grad` in the reducer's own buckets, and write back what it returns."""
    parameters = ddp._module_parameters
    failures = agree_in_host_memory(parameters, ddp.process_group, failed=failed)
    if failures:
        return failures
    left = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    for bucket in ddp.reducer._get_zeros_like_grad_buckets():
        members = bucket.parameters()
        for parameter in members:
            left.pop(id(parameter), None)
        for parameter, view in zip(members, bucket.gradients(), strict=True):
            if parameter.grad is not None:
                view.copy_(local(parameter.grad))
        result = ddp.reducer._run_comm_hook(bucket).wait()
        bucket.set_buffer(result if isinstance(result, Tensor) else result[0])
        for parameter, view in zip(members, bucket.gradients(), strict=True):
            if parameter.grad is not None:  # else it is unused on all replicas
                local(parameter.grad).copy_(view)
    # The reducer has no buckets for what was frozen when the wrapper was made.
    return average_gradients([*left.values()], ddp.process_group, bucket_bytes=ddp.bucket_bytes_cap)


def _sparse_parameters(module: nn.Module) -> set[int]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(part.weight) for part in module.modules() if isinstance(part, kinds) and part.sparse}
