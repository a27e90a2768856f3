"""The parts of a step, each under the name by which programs call or override it: splitting, checking, losses, merging.

And what a schedule does for stages that are driven by hand, around their microbatches: before the first one they learn what
they receive; sharded parameters are gathered and freed as the order says.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from penstock.batch import Microbatches, TensorChunkSpec, batch_size_of, merge_chunks, split_batch
from penstock.compat._by_hand import HandProgram
from penstock.compat._hand_stage import PipelineContext
from penstock.compat._infer import PipelineStage
from penstock.compat._metadata import InferenceMode
from penstock.compat._orders import ComputationType, leaves_of
from penstock.compat._pipeline_order import Orders, gathered_at_the_end
from penstock.compat._stage_base import _PipelineStageBase, call_on
from penstock.errors import RunError, SplitError
from penstock.nest import Value
from penstock.stage.pipeline_stage import PipelineStage as CoreStage


class Both:
    """True, of steps with a backward and of those without: equal to either."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bool)

    __hash__ = None  # type: ignore[assignment]  # it is equal to things that are not equal

    def __repr__(self) -> str:
        return "True"


class Parts(Orders):
    """What a step is made of, and what a schedule does around the microbatches of stages that are driven by hand."""

    _internal_losses = cached_property[list[Tensor | None]](lambda _: [])
    # The share of each microbatch in the batch, while a step runs.
    _loss_weights: Sequence[float | Tensor] | None = None

    def _step_microbatches(
        self,
        arg_mbs: list[Value] | None = None,
        kwarg_mbs: list[Value] | None = None,
        target_mbs: list[Value] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Value] | None = None,
    ) -> Value:
        """One step over a batch that is cut already. A subclass that overrides it drives the stages itself."""
        lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        rest = {"losses": losses, "return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
        args, options = self._joined((), {**lists, **rest})
        return super().step(*args, **options)  # a step of the program's own may call this

    def _joined(self, args: tuple[Value, ...], options: dict[str, Value]) -> tuple[tuple[Value, ...], dict[str, Value]]:
        """What `step` takes for a batch that is cut already, and given as lists."""
        arg_mbs, kwarg_mbs, target_mbs = (options.pop(name, None) for name in ("arg_mbs", "kwarg_mbs", "target_mbs"))
        if arg_mbs is not None or kwarg_mbs is not None or target_mbs is not None:
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, options.get("losses"))
            calls = Microbatches([(tuple(one), dict(kwargs)) for one, kwargs in zip(arg_mbs, kwarg_mbs, strict=True)])
            args = (calls,) if any(one or kwargs for one, kwargs in calls) else ()
            options["target"] = None if target_mbs is None else Microbatches(target_mbs)
        return args, options

    def _split_inputs(
        self, args: tuple[Value, ...], kwargs: dict[str, Value] | None = None
    ) -> tuple[list[tuple[Value, ...]], list[dict[str, Value]]]:
        """The arguments of each microbatch."""
        if not args and not kwargs:
            return [()] * self.num_microbatches, [{}] * self.num_microbatches
        specs = {"args_spec": self._specs.args, "kwargs_spec": self._row_specs(args, kwargs)}
        return split_batch(args, kwargs, self.num_microbatches, **specs)

    def _row_specs(self, args: tuple[Value, ...], kwargs: Mapping[str, Value] | None) -> object:
        """The specs for keyword arguments: a tensor with a row for each microbatch, and not for each sample, is told so."""
        specs, size = self._specs.kwargs, self.num_microbatches
        if not kwargs or size == 1 or not (specs is None or isinstance(specs, Mapping)):
            return specs
        rows = [
            name
            for name, value in kwargs.items()
            if isinstance(value, Tensor) and value.dim() and value.size(0) == size and name not in (specs or {})
        ]
        if not rows or batch_size_of(args, kwargs, args_spec=self._specs.args, kwargs_spec=specs) in (None, size):
            return specs
        warnings.warn(
            f"keyword argument {', '.join(rows)} of step() has {size} rows, one for each microbatch, which gets its own. To hand "
            f"it to every microbatch whole, write kwargs_chunk_spec={{{rows[0]!r}: Replicate()}}",
            stacklevel=4,
        )
        return {**(specs or {}), **dict.fromkeys(rows, TensorChunkSpec(0))}

    def _merge_outputs(self, output_chunks: list[Value]) -> Value:
        return merge_chunks(output_chunks, self._specs.output)

    def _check_inputs(
        self,
        arg_mbs: list[Value] | None = None,
        kwarg_mbs: list[Value] | None = None,
        target_mbs: list[Value] | None = None,
        losses: list[Tensor] | None = None,
    ) -> tuple[list[Value], list[Value]]:
        """Each list must be one, of one entry a microbatch."""
        size = self.num_microbatches
        for name, given in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if given is not None and not isinstance(given, list):
                raise TypeError(f"{name} must be a list, got {type(given).__name__}")
            if given is not None and len(given) != size:
                raise SplitError(f"{len(given)} {name} for {size} microbatches; Expecting {size} {name}")
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list, got {type(losses).__name__}")
        return [()] * size if arg_mbs is None else arg_mbs, [{}] * size if kwarg_mbs is None else kwarg_mbs

    def _compute_loss(self, output: Value, target: Value, loss_kwargs: Mapping[str, Value] | None = None) -> Tensor:
        assert self.loss_fn is not None, "only asked for with a loss"
        return self.loss_fn(output, target, **(loss_kwargs or {}))

    def _should_compute_loss(self, stage: CoreStage) -> bool:
        return bool(stage.is_last and self.loss_fn is not None)

    def _maybe_compute_loss(
        self,
        stage: CoreStage,
        output: Value,
        target_mbs: Value,
        mb_index: int,
        loss_kwargs: Mapping[str, Value] | None = None,
    ) -> None:
        """On the last stage, with a loss: compute and keep it."""
        if self._should_compute_loss(stage) and target_mbs is not None:
            missing = mb_index + 1 - len(self._internal_losses)
            self._internal_losses.extend([None] * missing)
            self._internal_losses[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage: CoreStage, mb_index: int) -> Tensor | None:
        """On the last stage: what its backward starts from, the loss by its weight in the batch."""
        if not self._should_compute_loss(stage):
            return None
        kept = self._internal_losses
        loss = kept[mb_index] if 0 <= mb_index < len(kept) else None
        if loss is None:
            there = [microbatch for microbatch, one in enumerate(kept) if one is not None]
            raise RunError(
                f"the loss of microbatch {mb_index} is not there; there are those of the microbatches {there}"
            )
        return loss if self._loss_weights is None else loss * self._loss_weights[mb_index]

    def _update_losses(self, stages: CoreStage | Sequence[CoreStage], losses: list[Tensor] | None) -> None:
        """Give the losses of the step to the user's list."""
        many = stages if isinstance(stages, Sequence) else [stages]
        if losses is not None and any(stage.is_last for stage in many):
            kept = [loss for loss in self._internal_losses if loss is not None]
            if kept and len(kept) != self.num_microbatches:
                raise RunError(f"{len(kept)} losses of {self.num_microbatches} microbatches; expected one each")
            losses[:] = [loss.detach().clone() for loss in kept]
        self._internal_losses.clear()

    _adjacent_only = False  # whether stages that are driven by hand talk with their neighbours alone
    _backward_wanted: bool | None = None
    _knows_shapes = False  # a program has seen to it that the stages know their shapes
    _drives_by_hand: bool  # whether steps go through the stages' own methods
    unsharded_stages = cached_property[set[int]](lambda _: set())

    @property
    def _has_backward(self) -> bool:
        """Whether `step` differentiates: with a loss it does, unless a program says otherwise."""
        return self.loss_fn is not None if self._backward_wanted is None else self._backward_wanted

    @_has_backward.setter
    def _has_backward(self, wanted: bool) -> None:
        self._backward_wanted = wanted

    # -- before the first microbatch: the stages learn what they receive

    def _prepare_forward(self, stage: _PipelineStageBase, handed: Value, context: PipelineContext) -> None:
        args, kwargs = (context.arg_mbs or [()])[0], (context.kwarg_mbs or [{}])[0]
        leaves = leaves_of((self._order_with_comms or self.pipeline_order).values())
        halves = (leaf for leaf in leaves if leaf.computation_type is ComputationType.BACKWARD_INPUT)
        stage._splits = any(half.stage_index == stage.stage_index for half in halves)
        stage._model_args = args
        if not self._knows_shapes:
            given = args if stage.is_first else handed
            stage._prepare_forward_infra(self.num_microbatches, given, kwargs, has_backward=self._has_backward)

    def _prepare_backward(self, context: PipelineContext, loss_kwargs: Value) -> None:
        received: object = None
        for stage in reversed(self.stages) if self._has_backward and not self._knows_shapes else ():
            received = stage._prepare_backward_infra(  # type: ignore[attr-defined]
                self.num_microbatches,
                loss_fn=self.loss_fn,
                target=None if context.target_mbs is None else context.target_mbs[0],
                received_grad_meta=received,
                loss_kwargs=loss_kwargs,
            )
        if self._adjacent_only:
            self._validate_adjacent_stage_communication()

    def _warmup_p2p(self, stages: Sequence[object], has_backward: bool, p2p_done: bool) -> None:
        """Before stages that are driven by hand learn what they receive: whether their user has said it all. Programs put a
        vote of their own in its place. Connections need no warming up: they are there before the first step.
        """
        for stage in stages:
            if isinstance(stage, PipelineStage):
                dynamic = InferenceMode.needs_dynamic(stage._user_meta, has_backward)
                stage._inference_mode = InferenceMode.DYNAMIC if dynamic else InferenceMode.STATIC

    def _ready_modes(self) -> set[bool]:
        """With and without a backward: the steps that begin at once, without asking stages first what their values look like.
        Penstock's own always do.
        """
        if self._knows_shapes or not self._drives_by_hand:
            return {True, False}
        known = vars(self).get("_programs", {}).values()
        return {one.setting.grad for one in known if isinstance(one, HandProgram) and one.saved}

    @property
    def _stages_forward_initialized(self) -> bool:
        """Whether some steps begin at once: programs ask, since torch's stages run their module once more before others. A
        program that has seen to that itself sets it; one that sets it to False has stages that are driven by hand learn their
        shapes again, which they do by themselves when the shape of the input changes.
        """
        return bool(self._ready_modes())

    @_stages_forward_initialized.setter
    def _stages_forward_initialized(self, known: bool) -> None:
        self._knows_shapes = known
        if not known:
            for stage in self.stages:
                vars(stage).pop("_seen", None)
            for program in vars(self).get("_programs", {}).values():
                if isinstance(program, HandProgram):
                    program.saved.clear()

    @property
    def _stages_backward_initialized(self) -> bool | Both:
        """Programs compare it with whether the next step has a backward; if not equal, torch's stages learn their shapes anew."""
        ready = self._ready_modes()
        return Both() if len(ready) == 2 else True in ready

    @_stages_backward_initialized.setter
    def _stages_backward_initialized(self, known: bool) -> None:
        self._stages_forward_initialized = known

    _stage_forward_initialized, _stage_backward_initialized = _stages_forward_initialized, _stages_backward_initialized

    def _validate_adjacent_stage_communication(self) -> None:
        """Where a rank has several stages, only neighbours talk by hand: whoever hands over knows the next stage alone."""
        for stage in self.stages:
            index = stage.stage_index
            received = stage.args_recv_info.get(0, ())  # type: ignore[attr-defined]
            sources = {info.source for info in received if getattr(info, "source", None) is not None}
            sent = stage.act_send_info.values()  # type: ignore[attr-defined]
            targets = {there for places in sent for there in places if there is not None}
            far = sorted((sources - {index - 1}) | (targets - {index + 1}))
            if far:
                raise RunError(
                    f"stage {index} exchanges values with {far}, and stages driven by hand support adjacent-stage communication "
                    "only; leave forward_one_chunk and its kin alone, and penstock's own steps send what skips stages too"
                )

    # -- parameters that are sharded

    def _unshard(self, stage: _PipelineStageBase) -> None:
        if stage._adapter.sharded:
            stage._adapter.unshard()
            self.unsharded_stages.add(stage.stage_index)

    def _reshard(self, stage: _PipelineStageBase) -> None:
        if stage._adapter.sharded:
            stage._adapter.reshard()
            self.unsharded_stages.discard(stage.stage_index)

    def _assert_unsharded(self, stage: _PipelineStageBase) -> None:
        """A function that computes by itself asks here whether the parameters of its stage are gathered."""
        index = stage.stage_index
        if stage._adapter.sharded and index not in self.unsharded_stages:
            raise AssertionError(f"stage {index} is sharded; expected {index}UNSHARD before its parameters are used")

    def _gather_again(self) -> None:
        """After a step, which ends with everything sharded: gather what the order leaves gathered."""
        freed = (ComputationType.RESHARD, ComputationType.REDUCE_GRAD)  # the reduction ends with freeing them
        left = gathered_at_the_end((self._order_with_comms or {}).get(self.rank, ()), freed)
        for stage in self.stages:
            call_on(stage.submod.modules() if stage.stage_index in left else (), "unshard")
