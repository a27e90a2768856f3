"""`fully_shard` (FSDP2) and the `replicate` that is built on it.

FSDP2 keeps two forms of each parameter: the sharded one that the user and the optimizer see, and the full one that
computes. Autograd accumulates in the full one; reducing moves that sum, once, into the `.grad` of the sharded one, and
adds to what earlier steps left there. During a step penstock's plan decides when that happens:

- *Held* groups of parameters are gathered by UNSHARD, stay so until RESHARD, and are never gathered on the way.
- *Frugal* groups, those whose user wrote `reshard_after_forward=True` (or a number), go on to gather and free their
  parameters around each forward and each backward: that is a choice of memory over time which a plan must not undo.
- Groups that are replicated and not sharded have nothing to gather: they get their full form when the step begins.

No group reduces before REDUCE_GRAD. It asks the replicas whether all went well, and then runs the reduction of FSDP2
itself, so that hooks, divide factors, mixed precision and two-level meshes (HSDP) mean what they mean without penstock.

Weight passes of a split backward do not pass through the module, and FSDP2 does not notice them. That matters only if
gradients are added up in another dtype than that of the parameters: then a hook on the full parameter moves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from penstock.errors import ReplicaFailed, RunError, StageError
from penstock.parallel.buckets import agree_in_host_memory
from penstock.parallel.protocol import Adapter, change, replica_failed


class FullyShardAdapter(Adapter):
    """One module under `fully_shard` or `replicate`, with all the modules inside it that are under them as well."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        assert isinstance(module, FSDPModule), "asked before"
        self._module: nn.Module = module
        self._root = module._get_fsdp_state()
        self._watched: set[int] = set()  # groups, by id
        self._syncing: list[FSDPParamGroup] = []  # groups that the user wants reduced

    @property
    def sharded(self) -> bool:
        return bool(self._held())

    def begin(self) -> None:
        super().begin()
        self._syncing = []
        self._root._lazy_init()
        if not self._root._is_root:
            raise StageError(
                f"the module of a stage, a {type(self._module).__name__}, has been run as a part of a larger module "
                "under fully_shard, which still governs it; build the stages first, then wrap and run each of them"
            )
        flags = self._flags
        change(flags, self._root._state_ctx, "is_last_backward", False)
        for state, group in self._groups():
            if group.reduce_grads:
                self._syncing.append(group)
            change(flags, group, "reduce_grads", False)
            if _is_frugal(state, group):
                continue
            change(flags, group, "reshard_after_backward", False)
            change(flags, group, "post_forward_mesh_info", None)
            if not state._states_to_backward_prefetch:
                change(flags, state, "_states_to_backward_prefetch", [state])  # itself, which is there: a no-op
        for process_group in _process_groups(self._syncing):
            self._meet(process_group)
        held = self._held()
        for _, group in self._groups():
            if group not in held:
                self._prepare(group)

    def unshard(self) -> None:
        super().unshard()
        for group in self._held():
            group.unshard(async_op=True)  # the forward or backward that needs it waits for it
            self._watch(group)

    def reshard(self) -> None:
        super().reshard()
        for group in self._held():
            _free(group)

    @torch.no_grad()
    def reduce_grad(self, *, failed: bool = False) -> None:
        super().reduce_grad(failed=failed)
        failure = self._failure(failed)
        if failure is not None:
            if not failed:
                raise failure
            return
        with ExitStack() as flags:
            change(flags, self._root._state_ctx, "is_last_backward", True)
            for group in self._syncing:
                change(flags, group, "reduce_grads", True)
            self._root._root_post_backward_final_callback()

    def end(self, *, failed: bool = True) -> None:
        if not self._close():
            return
        self._watched.clear()
        left = [name for group in self._syncing for name in _drop_unreduced(group)]
        with self._flags:  # which end also if a replica is gone, for whose messages this waits
            if self._interrupted():
                self._root._reset_iter_state()
            for _, group in self._groups():
                _free(group)
                group._post_forward_indices.clear()
            self._root._comm_ctx.post_forward_order.clear()
        if left and not failed:
            names = ", ".join(left[:3]) + (" ..." if left[3:] else "")
            raise RunError(
                f"the gradients of {names} were not reduced over the replicas and are lost: the plan has no "
                "REDUCE_GRAD after the last backward of this stage; lower it with `add_reduce_grad`"
            )

    def _failure(self, failed: bool) -> ReplicaFailed | None:
        """Ask the replicas before the reduction, whose messages fit together only if all of them take part in it.

        It names those of the first group that have failed, or have heard of one in the group before.
        """
        found = None
        for group in _process_groups(self._syncing):
            failures = agree_in_host_memory((), group, failed=failed or found is not None)
            if failures and found is None:
                found = replica_failed(group, failures)
        return found

    def _groups(self) -> Iterator[tuple[FSDPState, FSDPParamGroup]]:
        """All of the tree; before the first step FSDP2 itself has not collected its states yet."""
        states = self._root._state_ctx.all_states or dict.fromkeys(
            module._get_fsdp_state() for module in self._module.modules() if isinstance(module, FSDPModule)
        )
        for state in states:
            for group in state._fsdp_param_groups:
                yield state, group

    def _held(self) -> list[FSDPParamGroup]:
        """Those that UNSHARD gathers."""
        return [group for state, group in self._groups() if _is_sharded(group) and not _is_frugal(state, group)]

    def _prepare(self, group: FSDPParamGroup) -> None:
        """At the beginning of a step, for a group that UNSHARD leaves alone."""
        sharded = _is_sharded(group)
        # The full parameters must exist to carry a hook.
        if not sharded or (_upcasts(group) and not _is_current(group)):
            group.unshard()
            group.wait_for_unshard()
            if sharded:
                group.reshard()
        self._watch(group)

    def _watch(self, group: FSDPParamGroup) -> None:
        if id(group) in self._watched or not _upcasts(group):
            return
        self._watched.add(id(group))
        if not _is_current(group):
            group.wait_for_unshard()
        for parameter in group.fsdp_params:
            full = parameter._unsharded_param
            if full.requires_grad:
                hook = full.register_post_accumulate_grad_hook(partial(_move, parameter))
                self._flags.callback(hook.remove)

    def _interrupted(self) -> bool:
        """Whether an exception stopped a forward or a backward half-way."""
        context = self._root._state_ctx
        if context.iter_forward_root is not None or context.post_backward_final_callback_queued:
            return True
        idle = TrainingState.IDLE
        return any(state._training_state != idle or group._training_state != idle for state, group in self._groups())


def _process_groups(groups: list[FSDPParamGroup]) -> list[dist.ProcessGroup]:
    """The process groups that the reduction of parameter groups goes over, each once."""
    found: dict[dist.ProcessGroup, None] = {}
    for group in groups:
        sharding = [group._reduce_scatter_process_group] if _is_sharded(group) else []
        copies = [group._all_reduce_process_group] if isinstance(group.mesh_info, DDPMeshInfo) else []
        found |= dict.fromkeys(sharding + copies)
    return [process_group for process_group in found if process_group.size() > 1]


def _is_sharded(group: FSDPParamGroup) -> bool:
    return isinstance(group.mesh_info, FSDPMeshInfo)


def _is_frugal(state: FSDPState, group: FSDPParamGroup) -> bool:
    return _is_sharded(group) and group.post_forward_mesh_info is not None and not state._auto_reshard_after_forward


def _is_current(group: FSDPParamGroup) -> bool:
    """Whether the full parameters exist and know which of them are trained; gathering makes it so."""
    return all(
        hasattr(parameter, "_unsharded_param")
        and parameter._unsharded_param.requires_grad == parameter.sharded_param.requires_grad
        for parameter in group.fsdp_params
    )


def _upcasts(group: FSDPParamGroup) -> bool:
    return any(p.reduce_dtype not in (None, p.param_dtype or p.orig_dtype) for p in group.fsdp_params)


def _move(parameter: FSDPParam, _: object) -> None:
    """Move a fresh gradient to the sum in the dtype of the reduction, as FSDP2 does after a full backward."""
    parameter.accumulate_unsharded_grad_if_needed()
    parameter.to_accumulated_grad_if_needed()


def _free(group: FSDPParamGroup) -> None:
    group.wait_for_unshard()  # gathered and never used
    group.reshard()


def _drop_unreduced(group: FSDPParamGroup) -> list[str]:
    """What a step that failed has added up must not leak into the next one; the names of the parameters concerned."""
    names = []
    for parameter in group.fsdp_params:
        full = getattr(parameter, "_unsharded_param", None)
        if full is None or (full.grad is None and parameter.unsharded_accumulated_grad is None):
            continue
        full.grad = parameter.unsharded_accumulated_grad = None
        names.append(parameter._param_fqn or "a parameter")
    return names
