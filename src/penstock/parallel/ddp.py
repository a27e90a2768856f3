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

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.comm.host_group import HostGroup, host_group
from penstock.errors import ReplicaFailed, StageError
from penstock.parallel.buckets import agree_in_host_memory, average_gradients, average_sparse_gradients, local
from penstock.parallel.protocol import Flags, StepOrder, replica_failed


class DDPAdapter:
    """One `DistributedDataParallel`, at the top of a stage's module or anywhere within it."""

    sharded = False
    reduces = True

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        _refuse_what_cannot_wait(wrapper)
        self._wrapper: Any = wrapper
        self._flags = Flags()
        self._order = StepOrder()
        self._replicas: HostGroup | None = None
        self._syncs = True

    def begin(self) -> None:
        self._order.begin()
        ddp = self._wrapper
        self._syncs = ddp.require_backward_grad_sync
        self._replicas = host_group(ddp.process_group)
        self._replicas.begin()
        if ddp.will_sync_module_buffers():
            with self._replicas.explained():
                ddp._sync_buffers()
        flags = self._flags
        flags.set(ddp, "require_forward_param_sync", False)
        flags.set(ddp, "require_backward_grad_sync", False)
        flags.set(ddp, "find_unused_parameters", False)  # else it copies every output, to find what buckets say anyway
        if ddp.static_graph:
            flags.set(ddp, "_static_graph_delay_allreduce_enqueued", True)  # else the first backward reduces

    def end(self, *, failed: bool = True) -> None:
        if self._order.end():
            if self._replicas is not None:
                self._replicas.end()
            self._flags.restore()
            self._wrapper.require_forward_param_sync = self._syncs  # as its own forward would leave it

    def unshard(self) -> None:
        self._order.unshard()

    def reshard(self) -> None:
        self._order.reshard()

    def reduce_grad(self, *, failed: bool = False) -> None:
        self._order.reduce()
        if not self._syncs:  # the user's own `no_sync()` stands around the step
            return
        ddp = self._wrapper
        average = _average_through_hook if _has_comm_hook(ddp) else _average
        failures = average(ddp, failed)
        if failures and not failed:
            raise replica_failed(ddp.process_group, failures)

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        return None if self._replicas is None else self._replicas.explain(error)

    def give_up(self, cause: str) -> None:
        if self._replicas is not None:
            self._replicas.give_up(cause)


class ReplicateAdapter:
    """A module under `torch.distributed._composable.replicate`, which makes its DDP at the first forward."""

    sharded = False
    reduces = True

    def __init__(self, state: Any) -> None:
        self._state = state
        self._flags = Flags()
        self._inner: DDPAdapter | None = None

    def begin(self) -> None:
        state = self._state
        if state._init_args or state._init_kwargs:
            state.lazy_init()
        if self._inner is None:
            self._inner = DDPAdapter(state._ddp)
        state._ddp.require_backward_grad_sync = not state._no_sync
        self._inner.begin()
        self._flags.set(state, "_no_sync", True)

    def end(self, *, failed: bool = True) -> None:
        self._flags.restore()
        if self._inner is not None:
            self._inner.end(failed=failed)

    def unshard(self) -> None:
        self._opened().unshard()

    def reshard(self) -> None:
        self._opened().reshard()

    def reduce_grad(self, *, failed: bool = False) -> None:
        self._opened().reduce_grad(failed=failed)

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        return None if self._inner is None else self._inner.explain(error)

    def give_up(self, cause: str) -> None:
        if self._inner is not None:
            self._inner.give_up(cause)

    def _opened(self) -> DDPAdapter:
        if self._inner is None:
            self._inner = DDPAdapter(self._state._ddp)
        return self._inner


def _refuse_what_cannot_wait(ddp: Any) -> None:
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


def _has_comm_hook(ddp: Any) -> bool:
    if ddp._comm_hooks:
        return True
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))  # those that are written in C++ show up here alone


def _average(ddp: Any, failed: bool) -> list[int]:
    """The replicas that have failed."""
    trained = [p for p in ddp._module_parameters if p.requires_grad]
    rows = _sparse_parameters(ddp.module)
    dense = [p for p in trained if id(p) not in rows]
    failures = average_gradients(dense, ddp.process_group, bucket_bytes=ddp.bucket_bytes_cap, failed=failed)
    if rows and not failures:
        average_sparse_gradients([p for p in trained if id(p) in rows], ddp.process_group)
    return failures


@torch.no_grad()
def _average_through_hook(ddp: Any, failed: bool) -> list[int]:
    """The same by the user's hook: give it `.grad` in the reducer's own buckets, and write back what it returns."""
    parameters = ddp._module_parameters
    failures = agree_in_host_memory(parameters, ddp.process_group, failed=failed)
    if failures:
        return failures
    unused = {id(p) for p in parameters if p.grad is None}  # on all replicas
    for bucket in ddp.reducer._get_zeros_like_grad_buckets():
        members = bucket.parameters()
        for parameter, view in zip(members, bucket.gradients(), strict=True):
            if parameter.grad is not None:
                view.copy_(local(parameter.grad))
        result = ddp.reducer._run_comm_hook(bucket).wait()
        bucket.set_buffer(result if isinstance(result, Tensor) else result[0])
        for parameter, view in zip(members, bucket.gradients(), strict=True):
            if id(parameter) not in unused:
                local(parameter.grad).copy_(view)
    return []


def _sparse_parameters(module: nn.Module) -> set[int]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(part.weight) for part in module.modules() if isinstance(part, kinds) and part.sparse}
