"""PipelineStage as programs drive it: shapes given by the user, or found with fake tensors, and passed down the stages.

penstock's own steps need none of this: their messages describe themselves. A program that posts receives by itself has
to know beforehand what will arrive. The model is not run: fake tensors have shapes and no numbers. Only where a module
does not take them (sharded parameters, custom kernels) it is run, on zeros, its random state and buffers put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat._exchange import RecvInfo, as_tuple
from penstock.compat._metadata import (
    InferenceMode,
    Metas,
    _derive_grad_metas,
    _StageForwardMeta,
    _StageMeta,
    extract_tensor_metas,
    validate_and_normalize_to_tuple,
    validate_tensors_metadata,
)
from penstock.compat._stage_base import _PipelineStageBase
from penstock.errors import ShapeError
from penstock.stage.forward import remember


class PipelineStage(_PipelineStageBase):
    """One stage of a pipeline, with everything that programs find on torch's; see `penstock.PipelineStage`.

    stage = PipelineStage(module, stage_index=0, num_stages=2, device=torch.device("cpu"))
    """

    _inference_mode: InferenceMode | None = None
    _model_args: tuple[Any, ...] = ()  # the model's arguments, for stages that read some of them

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,  # from 0
        num_stages: int,  # of the whole pipeline
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: Any = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        self.input_args, self.output_args = input_args, output_args
        self.get_mesh = get_mesh
        self._user_meta = _StageMeta(
            extract_tensor_metas(validate_and_normalize_to_tuple(input_args)),
            extract_tensor_metas(validate_and_normalize_to_tuple(output_args)),
            extract_tensor_metas(validate_and_normalize_to_tuple(input_grads, True), allow_none=True),
            extract_tensor_metas(validate_and_normalize_to_tuple(output_grads, True), allow_none=True),
        )
        self._said = self._user_meta.inputs, self._user_meta.outputs

    def _forget_what_changed(self) -> None:
        """Shapes that a program has reset in `_user_meta` are no longer those of `input_args` and `output_args`."""
        inputs, outputs = self._said
        if self._user_meta.inputs is not inputs:
            self.input_args = None
        if self._user_meta.outputs is not outputs:
            self.output_args = None

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        """Learn the shapes of inputs and outputs: `args` are the model's on the first stage, elsewhere what is known of the
        outputs of the stage before. What is known of this stage's outputs comes back.
        """
        self.chunks = num_microbatches
        user = self._user_meta
        self._inference_mode = InferenceMode("dynamic" if InferenceMode.needs_dynamic(user, has_backward) else "static")
        found: Metas | None = args.forward_metas if isinstance(args, _StageForwardMeta) else args
        if self.is_first:
            found = extract_tensor_metas(as_tuple(args if args is not None else ()), allow_none=True)
        if user.inputs is not None and found:
            validate_tensors_metadata(f"stage {self.stage_index}, input_args and what it gets", user.inputs, found)
        inputs = found if found or user.inputs is None else user.inputs
        self._mesh_cache.update_from_tensors(as_tuple(args) if self.is_first else ())
        self._stage_meta = _StageMeta(inputs, user.outputs, user.input_grads, user.output_grads)
        if user.outputs is None:
            example = as_tuple(args) if self.is_first else None
            self._configure_outputs_meta(self._shape_inference(example, kwargs))
        self._setup_forward_info(num_microbatches)
        return self._stage_meta.outputs

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Any = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Know which gradients come and go: those of values that require one."""
        self.chunks = num_microbatches
        known = self._stage_meta
        if known.output_grads is None:
            known.output_grads = _derive_grad_metas(known.outputs or ())
        if known.input_grads is None and known.inputs is not None:
            known.input_grads = _derive_grad_metas(known.inputs)
        for microbatch in range(num_microbatches):
            self.grad_recv_info[microbatch] = self._create_grad_recv_info(self.act_send_info)
        self.grad_send_info = None

    def _setup_forward_info(self, num_microbatches: int) -> None:
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = self._create_act_recv_info()
        self.act_send_info.clear()
        self.act_send_info.update(self._create_act_send_info())

    def _create_act_recv_info(self) -> tuple[RecvInfo, ...]:
        """Where the inputs of a microbatch come from."""
        metas = self._stage_meta.inputs or ()
        if self.is_first:
            return tuple(
                RecvInfo(f"root_{place}", None, None, meta, is_root_arg=True) for place, meta in enumerate(metas)
            )
        before = self.stage_index - 1
        return tuple(
            RecvInfo(f"recv_for_{self.stage_index}_from_{before}_{place}", before, None, meta)
            for place, meta in enumerate(metas)
        )

    def _create_act_send_info(self) -> dict[int, list[int | None]]:
        """By output: the stages that it goes to."""
        after = None if self.is_last else self.stage_index + 1
        return {place: [after] for place in range(len(self._stage_meta.outputs or ()))}

    def _is_same_rank(self, other_stage: int) -> bool:
        return self.stage_index_to_group_rank[other_stage] == self.group_rank

    # -- shapes

    def _shape_inference(self, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None = None) -> Metas:
        """What the module would return: for these arguments, or for the inputs that are known."""
        metas = self._stage_meta.inputs or ()
        given = args if args is not None else tuple(self._example(meta) for meta in metas)
        return self._metas_of_call(given, self._keywords(kwargs or {}))

    def _outputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What the module returns for the model's arguments; on the first stage."""
        called, keywords = self._call_of((), args, kwargs)
        return as_tuple(self.submod(*called, **keywords))

    def _metas_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Metas:
        outputs = as_tuple(_try(self.submod, args, kwargs, grad=True))
        self._mesh_cache.update_from_tensors(outputs)
        return extract_tensor_metas(outputs, allow_none=True) or ()

    def _configure_outputs_meta(self, outputs_meta: Sequence[Any]) -> None:
        """Set what the module returns: metadata, or tensors that look alike."""
        self._stage_meta.outputs = tuple(
            extract_tensor_metas((meta,))[0] if isinstance(meta, Tensor) else meta  # type: ignore[index]
            for meta in outputs_meta
        )

    def get_outputs_meta(self) -> tuple[Tensor, ...]:
        """What the module returns, as tensors on the meta device."""
        outputs = self._stage_meta.outputs
        if outputs is None:
            raise ShapeError(
                f"the outputs of stage {self.stage_index} are not known yet; expected output_args, or a step"
            )
        return tuple(meta.to_tensor("meta") for meta in outputs if meta is not None)


def _try(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad: bool) -> Any:
    """What the module returns, without a trace: with fake tensors, or on zeros."""
    inner = getattr(module, "_orig_mod", module)
    while hasattr(inner, "no_sync") and isinstance(getattr(inner, "module", None), torch.nn.Module):
        inner = inner.module
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    plain = all(
        type(t) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        for t in (*inner.parameters(), *inner.buffers(), *tensors)
    )
    if plain:
        try:
            return _fake(inner, args, kwargs, grad=grad)
        except Exception:  # noqa: BLE001  custom kernels, values that decide: whatever fake tensors cannot do
            pass
    with untouched(module), torch.set_grad_enabled(grad):
        return pytree.tree_map_only(Tensor, _without_graph, module(*args, **kwargs))


def _fake(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad: bool) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state: dict[str, Tensor] = {
        name: mode.from_tensor(value) for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    given = pytree.tree_map_only(
        Tensor, lambda t: mode.from_tensor(t.detach().requires_grad_(t.requires_grad)), (args, kwargs)
    )
    with mode, torch.set_grad_enabled(grad):
        output = functional_call(module, state, *given)
    return pytree.tree_map_only(
        Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta", requires_grad=t.requires_grad),
        output,
    )


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Put the random state and the buffers back."""
    rewind = remember(module, ())
    try:
        yield
    finally:
        rewind()
