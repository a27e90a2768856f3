"""`torch.distributed.pipelining.stage`: PipelineStage as programs drive it.

Shapes are given by the user, or found by a run on zeros, and passed down the stages. penstock's own steps need none of this:
their messages describe themselves. A program that posts receives by itself has to know beforehand what will arrive. So its
stages run their modules once more, as torch's do: on zeros, the first one on the first microbatch. Random state and buffers
are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat._exchange import as_tuple
from penstock.compat._siblings import found_in
from penstock.compat._stage_base import _PipelineStageBase
from penstock.compat._utils import (
    Metas,
    RecvInfo,
    _StageBackwardMeta,
    _StageForwardMeta,
    _StageMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    validate_and_normalize_to_tuple,
    validate_tensors_metadata,
)
from penstock.errors import ShapeError
from penstock.nest import Value
from penstock.parallel import unwrap
from penstock.stage.buffers import remember
from penstock.stage.dtensors import MeshGetter
from penstock.stage.pipeline_stage import Group

__getattr__ = found_in(__name__, "._IR", "._exchange", "._utils")
__all__ = ["PipelineStage", "build_stage"]  # noqa: F822  which is beside the pipe


class PipelineStage(_PipelineStageBase):
    """One stage of a pipeline, with everything that programs find on torch's; see `penstock.PipelineStage`.

    stage = PipelineStage(module, stage_index=0, num_stages=2, device=torch.device("cpu"))
    """

    _inference_mode: object = None  # what the schedule has decided before the first step

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,  # from 0
        num_stages: int,  # of the whole pipeline
        device: torch.device | str,
        input_args: Value = None,
        output_args: Value = None,
        output_grads: object = None,
        input_grads: object = None,
        group: Group = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: MeshGetter | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        self.input_args, self.output_args = input_args, output_args
        self.get_mesh = get_mesh

        def metas(value: Value, gaps: bool = False) -> Metas | None:
            return extract_tensor_metas(validate_and_normalize_to_tuple(value, gaps), allow_none=gaps)

        gradients = metas(input_grads, True), metas(output_grads, True)
        self._user_meta = _StageMeta(metas(input_args), metas(output_args), *gradients)
        self._said = self._user_meta.inputs, self._user_meta.outputs

    def _forget_what_changed(self) -> None:
        """Shapes that a program has reset in `_user_meta` are no longer those of `input_args` and `output_args`."""
        inputs, outputs = self._said
        if self._user_meta.inputs is not inputs:
            self.input_args = None
        if self._user_meta.outputs is not outputs:
            self.output_args = None

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Value, kwargs: dict[str, Value] | None = None, has_backward: bool = False
    ) -> object:
        """Learn the shapes of inputs and outputs: `args` are the model's on the first stage, elsewhere what is known of the
        outputs of the stage before. What is known of this stage's outputs comes back.
        """
        self.chunks = num_microbatches
        self._forward_metadata_inference(args, kwargs, has_backward)
        self._setup_forward_recv_info(num_microbatches, has_backward)
        self._setup_forward_send_info()
        return self._stage_meta.outputs

    def _forward_metadata_inference(
        self, args: Value, kwargs: dict[str, Value] | None = None, has_backward: bool = False
    ) -> _StageForwardMeta:
        """What `_prepare_forward_infra` does first: find out what comes in and goes out. Programs put something around it."""
        user = self._user_meta
        example = as_tuple(() if args is None else args) if self.is_first else None
        found: Metas | None = args.forward_metas if isinstance(args, _StageForwardMeta) else args
        if self.is_first:
            found = extract_tensor_metas(example, allow_none=True)
        elif self._heard:
            sources = self._sources(len(self._heard.get(self.stage_index - 1) or ()))
            found = tuple((self._heard[source] or ())[place] for source, place in sources)
        if user.inputs is not None and found:
            validate_tensors_metadata(f"stage {self.stage_index}, input_args and what it gets", user.inputs, found)
        inputs = found if found or user.inputs is None else user.inputs
        self._mesh_cache.update_from_tensors(example or ())
        outputs = self._with_gradients(inputs) if has_backward else user.outputs
        self._stage_meta = _StageMeta(inputs, outputs, user.input_grads, user.output_grads)
        if user.outputs is None:
            self._configure_outputs_meta(self._shape_inference(example, kwargs))
        return _StageForwardMeta(self._stage_meta.outputs or ())

    def _with_gradients(self, inputs: Metas | None) -> Metas | None:
        """The outputs that the user gave. Shapes of which none requires a gradient (`torch.empty(..., device="meta")`) say
        nothing of gradients: an output then has one if the module has something to train, or an input that requires one.
        """
        user = self._user_meta
        silent = not any(meta.requires_grad for metas in (user.inputs, user.outputs) for meta in metas or () if meta)
        if user.outputs is None or not silent or user.has_dtensors() or user.input_grads or user.output_grads:
            return user.outputs
        trains = any(parameter.requires_grad for parameter in self.submod.parameters())
        trains = trains or any(meta.requires_grad for meta in inputs or () if meta)
        return tuple(meta and replace(meta, requires_grad=trains and meta.differentiable) for meta in user.outputs)

    def _prepare_backward_infra(self, num_microbatches: int, *given: Value, **options: Value) -> object:
        """Know which gradients come and go: those of values that require one."""
        found = self._backward_metadata_inference(*given, **options)
        self._setup_backward_recv_info(num_microbatches)
        return found

    def _backward_metadata_inference(self, *_: Value, **__: Value) -> _StageBackwardMeta:
        """A gradient looks like its value, unless the user has said otherwise, whatever the loss is and the stages after give."""
        self._stage_meta = self._stage_meta.with_gradients()
        return _StageBackwardMeta(self._stage_meta.input_grads or ())

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        """Say for each microbatch where its inputs come from. Programs let several share what they arrive in."""
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = self._create_act_recv_info()

    def _setup_forward_send_info(self) -> None:
        self.act_send_info = self._create_act_send_info()

    def _create_act_recv_info(self) -> tuple[RecvInfo, ...]:
        """Where the inputs of a microbatch come from."""
        metas = self._stage_meta.inputs or ()
        if self.is_first:
            return tuple(RecvInfo(f"root_{k}", tensor_meta=meta, is_root_arg=True) for k, meta in enumerate(metas))
        name = f"recv_for_{self.stage_index}_from"
        sources = zip(self._sources(len(metas)), metas, strict=True)
        return tuple(RecvInfo(f"{name}_{stage}_{place}", stage, None, meta) for (stage, place), meta in sources)

    def _create_act_send_info(self) -> dict[int, list[int | None]]:
        """By output: the stages that it goes to."""
        after = None if self.is_last else self.stage_index + 1
        return {place: [after] for place in range(len(self._stage_meta.outputs or ()))}

    def _is_same_rank(self, other_stage: int) -> bool:
        return self.stage_index_to_group_rank[other_stage] == self.group_rank

    # -- shapes

    def _shape_inference(self, args: tuple[Value, ...] | None, kwargs: dict[str, Value] | None = None) -> Metas:
        """What the module would return: for these arguments of the model, and for the inputs that are known."""
        arrived = tuple(self._to_tensor(meta) for meta in self._stage_meta.inputs or ())
        given = args if args is not None else self._model_args or arrived
        outputs = self._tried(*self._call_of(() if self.is_first else arrived, given, kwargs or {}))
        self._mesh_cache.update_from_tensors(outputs)
        return extract_tensor_metas(outputs, allow_none=True) or ()

    def _validate_ahead(self, args: tuple[Value, ...], kwargs: dict[str, Value]) -> None:
        """On the first stage: try out the first microbatch, if it is known what it should look like."""
        if self._stage_meta.outputs is not None:
            self._validate_fwd_input(args)
            self._validate_fwd_outputs(self._tried(*self._call_of((), args, kwargs)))

    def _tried(self, args: tuple[Value, ...], kwargs: dict[str, Value]) -> tuple[Value, ...]:
        """What the module returns, without its graph. Its random state and its buffers are put back."""
        with ExitStack() as after, torch.enable_grad():
            after.callback(remember(self.submod, ()))
            output = self._compute_outputs(*args, module=unwrap(self.submod), **kwargs)
        return as_tuple(pytree.tree_map_only(Tensor, self._to_tensor, output))

    def _compute_outputs(self, *args: Value, module: nn.Module, **kwargs: Value) -> Value:
        """Call the module to see what it returns. A subclass may call it in a way of its own."""
        return module(*args, **kwargs)

    def _configure_outputs_meta(self, outputs_meta: Sequence[Any]) -> None:
        """Set what the module returns: metadata, or tensors that look alike."""
        known = [extract_tensor_meta(meta) if isinstance(meta, Tensor) else meta for meta in outputs_meta]
        self._stage_meta.outputs = tuple(known)

    def get_outputs_meta(self) -> tuple[Tensor, ...]:
        """What the module returns, as tensors on the meta device."""
        outputs = self._stage_meta.outputs
        if outputs is None:
            raise ShapeError(f"the outputs of stage {self.stage_index} are not known; expected output_args, or a step")
        return tuple(meta.to_tensor("meta") for meta in outputs if meta is not None)
