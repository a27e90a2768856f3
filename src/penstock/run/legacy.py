"""Steps by hand: whether a schedule's steps go through its stages' own methods, and such a step from its split to its end.

None of it is on the way of penstock's own steps. `HandDriven` does the actions.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.batch import split_target
from penstock.errors import PlanError, RunError
from penstock.plan.vocabulary import ComputationType, NamedAction
from penstock.run.by_hand import HandDriven, PipelineContext, forward_part, stepping
from penstock.run.parts import Parts
from penstock.run.stage_run import StepInputs
from penstock.stage.stage import PipelineStage, is_driven_by_hand

CUSTOM_KINDS = frozenset(ComputationType) - {
    ComputationType.SEND_F,
    ComputationType.RECV_F,
    ComputationType.SEND_B,
    ComputationType.RECV_B,
}


class LegacySchedule(Parts):
    """Mixed into `Schedule`: all that programs written for torch.distributed.pipelining find there."""

    scale_grads: bool
    _target_chunk_spec: Any

    def _init_legacy(self) -> None:
        self._init_orders()
        self._init_parts()
        self._backward_wanted: bool | None = None
        self._backward_requires_autograd = True
        self._by_hand: bool | None = None
        self._hand_functions: dict[ComputationType, Callable[..., object]] = {}
        self._initialized: bool | None = None  # the stages know their shapes: True with, False without backward
        self.backward_counter: Counter[int] = Counter()
        self.fwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.bwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.unshard_ops: dict[int, list[Any]] = {}
        self.unsharded_stages: set[int] = set()

    def _forget_plan(self) -> None:
        super()._forget_plan()
        self._by_hand = None
        self._initialized = None

    @property
    def _has_backward(self) -> bool:
        """Whether `step` differentiates: with a loss it does, unless a program says otherwise."""
        return self._loss_fn is not None if self._backward_wanted is None else self._backward_wanted

    @_has_backward.setter
    def _has_backward(self, wanted: bool) -> None:
        self._backward_wanted = wanted

    @property
    def _grad_scale_factor(self) -> int:
        return self._n_microbatches if self.scale_grads else 1

    def _needs_hands(self) -> bool:
        """Whether this rank's steps have to go through the stages' own methods."""
        if self._hand_functions or self._steps_itself() or any(map(is_driven_by_hand, self._stages)):
            return True
        if self._order_with_comms is not None:
            self._order_plan()
        return self._leaves_unsharded

    def _steps_itself(self) -> bool:
        return type(self)._step_microbatches is not LegacySchedule._step_microbatches

    def _goes_by_hand(self, gather: Callable[[bytes], Sequence[bytes]]) -> bool:
        """Whether steps go through the stages' own methods: on every rank or on none, so the ranks ask one another once."""
        if self._by_hand is None:
            mine = self._needs_hands()
            together = all(isinstance(stage, PipelineStage) for stage in self._stages)
            answers = gather(b"by hand" if mine else b"bound") if together else [b"by hand"]
            self._by_hand = b"by hand" in answers
        return self._by_hand

    def _run_by_hand(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        target: Any,
        losses: Any,
        keep: bool,
        loss_kwargs: Any,
        backward: bool = True,
    ) -> Any:
        """A step or an evaluation through the stages' own methods."""
        if not backward:
            wanted, self._backward_wanted = self._backward_wanted, False
            try:
                return self._run_by_hand(args, kwargs, target=target, losses=losses, keep=keep, loss_kwargs=loss_kwargs)
            finally:
                self._backward_wanted = wanted
        if self._has_backward and self._backward_requires_autograd and not torch.is_grad_enabled():
            raise RunError("step() under torch.no_grad(): nothing could be differentiated. Call eval() instead")
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
        targets = None
        if target is not None:
            targets = split_target(target, self._n_microbatches, target_spec=self._target_chunk_spec)
        self._loss_weights = self._weights(StepInputs(arg_mbs, kwarg_mbs, targets))
        self._tell_stages()
        self._internal_losses.clear()
        try:
            with stepping(self._stages), torch.set_grad_enabled(self._has_backward and torch.is_grad_enabled()):
                self._hand_microbatches(arg_mbs, kwarg_mbs, targets, losses=losses, keep=keep, loss_kwargs=loss_kwargs)
        except BaseException:
            for stage in self._stages:
                stage.clear_runtime_states()
            raise
        finally:
            self._loss_weights = None
            self._internal_losses.clear()
            self.fwd_recv_ops.clear()
            self.bwd_recv_ops.clear()
        self._gather_again()
        outputs: list[Any] = next((stage.output_chunks for stage in self._stages if stage.is_last), [])
        return self._merge_outputs(outputs) if keep and outputs else None

    def _weights(self, inputs: StepInputs) -> list[float] | None:
        raise NotImplementedError

    def _forget_chunks(self) -> None:
        """What the last step gave must not be alive beside what this one gives."""
        for stage in self._stages:
            if stage.is_last:
                stage.output_chunks.clear()

    def _keep_chunks(self, outputs: list[Any], merged: Any) -> None:
        """Let the last stage show what each microbatch gave: as views of what was returned, where that can be."""
        if isinstance(merged, Tensor) and all(isinstance(one, Tensor) and one.dim() for one in outputs):
            sizes = [one.size(0) for one in outputs]
            if sum(sizes) == merged.size(0) and merged.dim():
                outputs = list(merged.split(sizes))
        for stage in self._stages:
            if stage.is_last:
                stage.output_chunks[:] = outputs

    def _hand_microbatches(
        self, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, *, losses: Any, keep: bool, loss_kwargs: Any
    ) -> None:
        if self._steps_itself():
            given = {"losses": losses, "return_outputs": keep, "loss_kwargs": loss_kwargs}
            known = inspect.signature(self._step_microbatches).parameters
            self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **{k: v for k, v in given.items() if k in known})
            return
        self._initialize_stages(arg_mbs[0], kwarg_mbs[0], None if target_mbs is None else target_mbs[0], loss_kwargs)
        actions = [action for action in self.pipeline_order_with_comms.get(self.rank, ()) if action is not None]
        if not self._has_backward:
            actions = forward_part(actions)
        context = PipelineContext(self, arg_mbs, kwarg_mbs, target_mbs, losses)
        HandDriven(self, context, keep=keep, loss_kwargs=loss_kwargs).run(actions)
        self._update_losses(self._stages, losses)

    def _initialize_stages(self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None) -> None:
        """Before the first microbatch: the stages learn what they receive, from the first stage to the last."""
        if self._initialized is not None and (self._initialized or not self._has_backward):
            return
        split = {leaf.stage_index for leaf in self._leaves() if leaf.computation_type is ComputationType.BACKWARD_INPUT}
        handed: Any = None
        for stage in self._stages:
            stage._splits = stage.stage_index in split
            stage._model_args = args
            given = args if stage.is_first else handed
            handed = stage._prepare_forward_infra(self._n_microbatches, given, kwargs, has_backward=self._has_backward)
        if self._has_backward:
            received: Any = None
            for stage in reversed(self._stages):
                received = stage._prepare_backward_infra(
                    self._n_microbatches,
                    loss_fn=self._loss_fn,
                    target=target,
                    received_grad_meta=received,
                    loss_kwargs=loss_kwargs,
                )
        self._initialized = self._has_backward
        self._validate_adjacent_stage_communication()

    _initialize_stage = _initialize_stages

    @property
    def _stages_forward_initialized(self) -> bool:
        """Whether stages that are driven by hand know their shapes; a program that sets it to False has them learn again.
        Other steps follow the shapes by themselves.
        """
        return self._initialized is not None

    @_stages_forward_initialized.setter
    def _stages_forward_initialized(self, known: bool) -> None:
        if not known:
            self._initialized = None

    @property
    def _stages_backward_initialized(self) -> bool:
        return self._initialized is True

    @_stages_backward_initialized.setter
    def _stages_backward_initialized(self, known: bool) -> None:
        if not known:
            self._initialized = None

    _stage_forward_initialized, _stage_backward_initialized = _stages_forward_initialized, _stages_backward_initialized

    def _leaves(self) -> list[NamedAction]:
        rows = (self._order_with_comms or self.pipeline_order).values()
        return [leaf for row in rows for action in row if action is not None for leaf in action.leaves]

    def _validate_adjacent_stage_communication(self) -> None:
        """By hand only neighbours talk: an order has no word for a message that skips a stage."""
        for stage in self._stages:
            index = stage.stage_index
            sources = {
                info.source for info in stage.args_recv_info.get(0, ()) if getattr(info, "source", None) is not None
            }
            targets = {there for places in stage.act_send_info.values() for there in places if there is not None}
            far = sorted((sources - {index - 1}) | (targets - {index + 1}))
            if far:
                raise RunError(
                    f"stage {index} exchanges values with {far}, and stages driven by hand support adjacent-stage communication "
                    "only; leave forward_one_chunk and its kin alone, and penstock's own steps send what skips stages too"
                )

    def _unshard(self, stage: Any) -> None:
        if stage._adapter is not None and stage._adapter.sharded:
            stage._adapter.unshard()
            self.unsharded_stages.add(stage.stage_index)

    def _reshard(self, stage: Any) -> None:
        if stage._adapter is not None and stage._adapter.sharded:
            stage._adapter.reshard()
            self.unsharded_stages.discard(stage.stage_index)

    def _assert_unsharded(self, stage: Any) -> None:
        """A function that computes by itself asks here whether the parameters of its stage are gathered."""
        index = stage.stage_index
        if stage._adapter is not None and stage._adapter.sharded and index not in self.unsharded_stages:
            raise AssertionError(f"stage {index} is sharded; expected {index}UNSHARD before its parameters are used")

    def _gather_again(self) -> None:
        """Parameters that the order leaves gathered are gathered when the step is over, as it says."""
        for stage in self._stages:
            if stage.stage_index in self.unsharded_stages:
                for module in stage.submod.modules():
                    if hasattr(module, "unshard"):
                        module.unshard()
        self.unsharded_stages.clear()

    def register_hand_function(self, kind: ComputationType, function: Callable[..., object]) -> None:
        """Do actions of a kind with a function that drives the stages itself: ``function(action, context)``."""
        if kind not in CUSTOM_KINDS:
            raise PlanError(
                f"a function for {kind!r}; expected one of {', '.join(sorted(k.name for k in CUSTOM_KINDS))}"
            )
        self._hand_functions[kind] = function
        self._by_hand = None
