"""The base of all stages that programs drive: one microbatch through one stage.

    output = stage.forward_one_chunk(0, (x,))
    stage.backward_one_chunk(0, loss=loss_fn(output, target))

Programs override these methods, in a subclass or on an object, or call them; the steps of a schedule with such a stage go
through all of them (`penstock.compat._by_hand`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat._backward import grad_of, stage_backward_input, stage_backward_weight, take_grad
from penstock.compat._exchange import Exchange, as_tuple
from penstock.compat._siblings import is_overridden
from penstock.compat._utils import _StageMeta, extract_tensor_metas, validate_tensors_metadata
from penstock.errors import ShapeError, StageError
from penstock.nest import Value, tensors_in
from penstock.parallel import DataParallel, unwrap
from penstock.stage.backward import backward_input, backward_weight, run_backward_full, run_deferred
from penstock.stage.pipeline_stage import Group, accepted_keywords

Grads = tuple[Tensor | None, ...]
_BACKWARDS = (
    *("backward_one_chunk", "backward_weight_one_chunk"),
    *("forward_maybe_with_nosync", "backward_maybe_with_nosync"),
)
"""A program that has one of these of its own must not have weight work hidden from it."""


class _PipelineStageBase(Exchange):
    """The base of all stages. A subclass that calls no constructor sets at least `submod`, `num_stages`, `group_size`,
    `group_rank` and `group`; that is enough to build a schedule and to read its order.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,  # from 0
        num_stages: int,  # of the whole pipeline
        device: torch.device | str,
        group: Group = None,  # a process group, a transport, or None for the default group
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group=group, dw_builder=dw_builder)

    def _prepare_forward_infra(self, *args: Value, **kwargs: Value) -> object:
        raise StageError(f"{type(self).__name__} does not say what it receives; override _prepare_forward_infra")

    def _prepare_backward_infra(self, *args: Value, **kwargs: Value) -> object:
        raise StageError(f"{type(self).__name__} does not say which gradients come; override _prepare_backward_infra")

    _accepted = cached_property[frozenset[str] | None](lambda self: accepted_keywords(unwrap(self.submod)))

    # -- forward

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,  # the microbatch
        args: tuple[Value, ...],
        kwargs: dict[str, Value] | None = None,
        save_forward_output: bool = True,  # in `output_chunks`, on the last stage
    ) -> object:
        """The forward of a microbatch. `args` are the model's own, for the first stage; the others have received theirs."""
        received = () if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        inputs, keywords = self._call_of(received, args, kwargs or {})
        if self._runtime_validate:
            self._validate_stage_tensors("forward inputs", self._stage_meta.inputs, inputs)
        if self.has_backward and self._splits and self.dw_builder is None and not is_overridden(self, *_BACKWARDS):
            output, self._pending[fwd_chunk_id] = run_deferred(self._deferral, self.submod, inputs, keywords)
        else:
            output = self.forward_maybe_with_nosync(*inputs, **keywords)
        outputs = as_tuple(output)
        if self.is_last and save_forward_output:
            kept = pytree.tree_map_only(Tensor, Tensor.detach, output) if self.has_backward else output
            self.output_chunks.append(kept)
        known = set(map(id, received))
        others = [leaf for leaf in pytree.tree_leaves((inputs, keywords)) if id(leaf) not in known]
        self.fwd_cache[fwd_chunk_id] = outputs, [*received, *others]
        if self._runtime_validate and not self.is_last:
            self._validate_fwd_outputs(outputs)
        return output

    def _call_of(
        self, received: tuple[Value, ...], args: tuple[Value, ...], kwargs: dict[str, Value]
    ) -> tuple[tuple[Value, ...], dict[str, Value]]:
        """What the module is called with."""
        taken = {name: value for name, value in kwargs.items() if self._accepted is None or name in self._accepted}
        return tuple(args) if self.is_first else received, taken

    def forward_maybe_with_nosync(self, *args: Value, **kwargs: Value) -> Value:
        """Call the module; within a step its data parallelism is told by the schedule when to reduce."""
        with nullcontext() if self._in_step else self._no_sync():
            return self.submod(*args, **kwargs)

    def _no_sync(self) -> Any:
        return getattr(self.submod, "no_sync", nullcontext)()

    # -- backward

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward of a microbatch: all of it, or what the stage before waits for, and the weights' part later."""
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        grads = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)
        if self._runtime_validate and grads is not None and self._stage_meta.output_grads is not None:
            self._validate_stage_tensors("output gradients", self._stage_meta.output_grads, grads)
        root = loss if self.is_last else outputs
        request: dict[str, Value] = {"stage_output": root, "output_grads": grads, "input_values": inputs}
        if bwd_chunk_id in self._pending:
            request["pending"] = self._pending.pop(bwd_chunk_id)
        if self.dw_builder is None and not full_backward:
            found, self.dw_runner[bwd_chunk_id] = self._backward_input(request, last_backward)
        else:
            found, _ = self.backward_maybe_with_nosync("full", request, last_backward=last_backward)
            if self.dw_builder is not None:
                self.dw_runner[bwd_chunk_id] = self.dw_builder()
                if full_backward:
                    self.dw_runner.pop(bwd_chunk_id)()
        known = self._stage_meta.inputs
        self.bwd_cache[bwd_chunk_id] = found if known is None else found[: len(known)]

    def _backward_input(self, request: dict[str, object], last_backward: bool) -> tuple[Grads, Callable[..., object]]:
        """The gradients of the inputs, and what does the weights' part. The first stage has nothing to hurry for."""
        if self.is_first and "pending" not in request:
            return (), partial(self.backward_maybe_with_nosync, "full", request)
        if isinstance(request["stage_output"], Tensor):
            request["stage_output"] = (request["stage_output"],)
        found, groups = self.backward_maybe_with_nosync("input", request, last_backward=last_backward)
        rest = request if "pending" in request else {"stage_output": request["stage_output"], "param_groups": groups}
        return found, partial(self.backward_maybe_with_nosync, "weight", rest)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weights' part of a backward that was split."""
        if not self.has_backward:
            return
        if bwd_chunk_id not in self.dw_runner:
            raise AssertionError(
                f"stage {self.stage_index}: the weight work of microbatch {bwd_chunk_id} is not there; expected "
                "backward_one_chunk(..., full_backward=False) for it before, and this once"
            )
        runner = self.dw_runner.pop(bwd_chunk_id)
        # What is left of a backward of penstock's is told whether it is the last, a function of the user's is not.
        runner(**({"last_backward": last_backward} if self.dw_builder is None else {}))

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Grads, list[dict[str, object]] | None]:
        """Do the "full", "input" or "weight" part of a backward; the gradients of the inputs come back, and after "input"
        what "weight" needs, unless the forward has put it aside.
        """
        pending = bwd_kwargs.get("pending")
        if backward_type == "weight":
            if pending is not None:
                backward_weight(pending)
            else:
                stage_backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"])
            return (), None
        roots, grads = _roots(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"])
        inputs, groups = bwd_kwargs["input_values"], None
        with nullcontext() if self._in_step or last_backward else self._no_sync():
            if pending is not None:
                leaves = [value for value in inputs if isinstance(value, Tensor) and value.is_leaf]
                backward_input(roots, grads, pending, inputs=leaves)
                if backward_type == "full":
                    backward_weight(pending)
            elif backward_type == "full":
                run_backward_full(roots, grads)
            else:
                _, groups = stage_backward_input(roots, grads, inputs, self.submod.parameters())
        known = self._stage_meta.inputs
        received = () if self.is_first else inputs if known is None else inputs[: len(known)]
        # The others are the model's own arguments, and what a method of the program's own has put there.
        others = inputs[len(received) :]
        return (*map(take_grad, received), *map(grad_of, others)), groups

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients. Within a step there is nothing to divide, since the schedule has scaled the loss."""
        for grad in self._undivided if self._in_step else self._gradients():
            grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients over the data-parallel replicas, once all backwards are done."""
        if self._adapter.reduces:
            self._adapter.reduce_grad()
        if grad_scale_factor == 1:
            return
        if self._in_step and is_overridden(self, "scale_grads"):
            # It is to find the parameters that have the gradients, and not the gathered ones.
            call_on(self.submod.modules(), "reshard")
            self._give_undivided(grad_scale_factor)
        self.scale_grads(grad_scale_factor)

    def _give_undivided(self, grad_scale_factor: int) -> None:
        """A method of a program's own that is to divide gradients finds those of the step undivided, as torch leaves them."""
        if self._undivided:
            return
        before = {id(grad): version for grad, version in self._gradients_before}
        self._undivided = [grad for grad in self._gradients() if before.get(id(grad)) != grad._version]
        for grad in self._undivided:
            grad.mul_(grad_scale_factor)

    def _begin_step(self, adapter: DataParallel) -> None:
        """A schedule drives this stage from here on, until `_end_step`."""
        self.clear_runtime_states()
        self._in_step, self._adapter, self._undivided = True, adapter, []
        dividing = is_overridden(self, "scale_grads", "perform_reduce_grad")
        self._gradients_before = [(grad, grad._version) for grad in self._gradients()] if dividing else []

    def _end_step(self) -> None:
        for name in ("_in_step", "_adapter", "_undivided", "_gradients_before"):
            vars(self).pop(name, None)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.submod.parameters() if parameter.grad is not None]

    # -- checks

    def _validate_fwd_input(self, args: tuple[Value, ...], kwargs: dict[str, Value] | None = None) -> None:
        """The model's own arguments must look as in the first step; what other stages receive has a shape anyway."""
        if self.is_first:
            self._validate_stage_tensors("forward inputs", self._stage_meta.inputs, args)

    def _validate_fwd_outputs(self, outputs: tuple[Value, ...]) -> None:
        self._validate_stage_tensors("forward outputs", self._stage_meta.outputs, outputs)

    def _note(self, args: tuple[Value, ...], output: Value) -> None:
        """After the first forward of penstock's own steps, or the first one after a program has reset them: what it may read."""
        inputs, outputs = (extract_tensor_metas(values, allow_none=True) or () for values in (args, as_tuple(output)))
        self._stage_meta = _StageMeta(inputs, outputs).with_gradients()

    def _validate_seen(self, desc: str, microbatch: int, values: Value) -> None:
        """In penstock's own steps: the tensors of a microbatch must look as they did when they were first looked at."""
        found = extract_tensor_metas(tuple(tensors_in(values))) or ()
        seen = self._seen.setdefault((desc, microbatch), found)
        validate_tensors_metadata(f"stage {self.stage_index}, microbatch {microbatch}, {desc}", seen, found)

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: tuple[Value, ...]) -> None:
        if expected is None:
            raise ShapeError(f"stage {self.stage_index}, {desc}: nothing is known to compare them with")
        found = extract_tensor_metas(actual, allow_none=True) or ()
        validate_tensors_metadata(f"stage {self.stage_index}, {desc}", expected, found)


def _roots(stage_output: Value, output_grads: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs that a backward starts from, and their gradients; a loss starts with 1."""
    if isinstance(stage_output, Tensor):
        return [stage_output], [output_grads]
    outputs = [output for output in stage_output or () if isinstance(output, Tensor)]
    given = [torch.ones_like(output) for output in outputs] if output_grads is None else output_grads
    pairs = [(root, grad) for root, grad in zip(outputs, given, strict=True) if root.requires_grad and grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]


def call_on(modules: Iterable[nn.Module], method: str) -> None:
    """Call a method of those modules that have it."""
    for call in (getattr(module, method, None) for module in modules):
        if callable(call):
            call()
