"""The names by which programs written for torch.distributed.pipelining read and change a schedule.

    schedule.pipeline_order                     # {0: [0F0, 0F1, ...], 1: [...]}
    schedule._prepare_schedule_with_comms(order)
    schedule._load_csv("plan.csv", format="compute_comms")

None of it is on the way of penstock's own steps. `HandDriven` steps read and write it.
"""

from __future__ import annotations

import csv
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from penstock.batch import (
    Microbatches,
    TensorChunkSpec,
    batch_size_of,
    merge_chunks,
    sizes_of,
    split_batch,
    split_target,
    weights,
)
from penstock.errors import IncompleteError, PlanError, RunError, SplitError
from penstock.lower import JustInTime
from penstock.lower.in_turn import defer_receives, messages_in_turn
from penstock.lower.reduce import reduce_grad
from penstock.lower.shards import unshard_reshard
from penstock.plan import Plan, check
from penstock.plan.vocabulary import ComputationType, NamedAction, Order, of_code, order_of, plan_of, to_code
from penstock.run.by_hand import HandDriven, PipelineContext, forward_part, stepping
from penstock.schedules import get_schedule
from penstock.simulate.lockstep import in_lockstep, with_bubbles
from penstock.stage.stage import PipelineStage, is_driven_by_hand

Format = Literal["compute_only", "compute_comms"]
OrderDict = dict[int, list[NamedAction | None]]
CUSTOM_KINDS = frozenset(ComputationType) - {
    ComputationType.SEND_F,
    ComputationType.RECV_F,
    ComputationType.SEND_B,
    ComputationType.RECV_B,
}


class LegacySchedule:
    """Mixed into `Schedule`."""

    _stages: list[Any]
    _n_microbatches: int
    _num_stages: int
    _loss_fn: Callable[..., Tensor] | None
    scale_grads: bool
    rank: int
    pp_group_size: int
    _args_chunk_spec: Any
    _kwargs_chunk_spec: Any
    _target_chunk_spec: Any
    _output_merge_spec: Any
    _receives: Any
    _given_plan: Plan | None
    recipe: ClassVar[str | None]

    def _init_legacy(self) -> None:
        self._order: OrderDict = {}  # set or filled by a program; empty: the schedule's own
        self._own_order: OrderDict | None = None  # the schedule's own, once somebody has asked
        self._order_with_comms: OrderDict | None = None  # set by a program
        self._mapping: dict[int, int] | None = None
        self._defer_pp_recv = False
        self._backward_wanted: bool | None = None
        self._backward_requires_autograd = True
        self._by_hand: bool | None = None
        self._leaves_unsharded = False
        self._hand_functions: dict[ComputationType, Callable[..., object]] = {}
        self._initialized: bool | None = (
            None  # for which kind of step the stages know their shapes: with backward or not
        )
        self._loss_weights: list[float] | None = None
        self._internal_losses: list[Any] = []
        self.backward_counter: Counter[int] = Counter()
        self.fwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.bwd_recv_ops: dict[tuple[int, int], list[Any]] = {}
        self.unshard_ops: dict[int, list[Any]] = {}
        self.unsharded_stages: set[int] = set()

    def _forget_plan(self) -> None:
        """The order has changed: what was derived from it is made again."""
        self._plan: Plan | None = None
        self._programs: dict[int, Any] = {}
        self._by_hand = None
        self._initialized = None

    def make_plan(self) -> Plan:
        raise NotImplementedError

    # -- orders

    @property
    def pipeline_order(self) -> OrderDict:
        """What each rank computes, in which order. May be set, or filled rank by rank, before the first step."""
        if self._order or not self._has_own_plan():
            return self._order
        if self._own_order is None:
            self._own_order = order_of(self.make_plan().codes)
        return self._own_order

    @pipeline_order.setter
    def pipeline_order(self, order: OrderDict) -> None:
        self._order = order
        self._order_with_comms = None
        self._forget_plan()

    def _has_own_plan(self) -> bool:
        return self.recipe is not None or self._given_plan is not None or self._overrides_order()

    def _overrides_order(self) -> bool:
        return type(self)._get_pipeline_order is not LegacySchedule._get_pipeline_order

    def _get_pipeline_order(self) -> OrderDict | None:
        """A subclass may give its order here."""
        return self.pipeline_order or None

    def _order_plan(self) -> Plan | None:
        """The plan that a program has set; None: the schedule makes its own."""
        size, stages = self._n_microbatches, self._num_stages
        if self._order_with_comms is not None:
            plan = plan_of(self._order_with_comms, num_microbatches=size, num_stages=stages)
            self._leaves_unsharded = _leaves_unsharded(plan)
            return plan
        order = self._order or (self._get_pipeline_order() if self._overrides_order() else None)
        return None if not order else plan_of(order, num_microbatches=size, num_stages=stages)

    @property
    def pipeline_order_with_comms(self) -> OrderDict:
        """The same with messages and care of parameters. If it is set, it is run as it is."""
        if self._order_with_comms is None:
            return self._lowered_order()
        return self._order_with_comms

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: OrderDict | None) -> None:
        self._order_with_comms = order
        self._leaves_unsharded = False
        self._forget_plan()

    def _lowered_order(self) -> OrderDict:
        order = self.pipeline_order
        mapping = self.stage_index_to_group_rank
        rows: dict[int, Sequence[int | None]] = {}
        for rank, actions in order.items():
            codes = unshard_reshard([to_code(action) for action in actions if action is not None])
            rows[rank] = reduce_grad(codes, self._n_microbatches)
        lowered = messages_in_turn(rows, mapping.__getitem__, self._num_stages)
        if self._defer_pp_recv:
            lowered = defer_receives(lowered, mapping.__getitem__)
        return {rank: [of_code(code) for code in codes] for rank, codes in lowered.items()}

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """Which rank holds which stage."""
        if self._mapping is None:
            self._mapping = dict(enumerate(self._ranks_ahead()))
        return self._mapping

    @stage_index_to_group_rank.setter
    def stage_index_to_group_rank(self, mapping: Mapping[int, int]) -> None:
        self._mapping = dict(mapping)

    def _ranks_ahead(self) -> Sequence[int]:
        """Where the stages are, as far as it is known without a plan. A schedule made for other sizes says so here."""
        if self._given_plan is not None:
            return self._given_plan.placement.ranks
        if self.recipe is None or self._num_stages % self.pp_group_size:
            return [stage % self.pp_group_size for stage in range(self._num_stages)]
        recipe = get_schedule(self.recipe)
        per_rank = self._num_stages // self.pp_group_size
        return recipe.place(recipe.sizes(self.pp_group_size, self._n_microbatches, per_rank)).ranks

    def _tell_stages(self) -> None:
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Check an order and take the placement of the stages from it."""
        self._mapping = validate_order(actions, self.pp_group_size, self._num_stages, self._n_microbatches)
        self._tell_stages()

    def _prepare_schedule_with_comms(self, actions: OrderDict, format: Format = "compute_only") -> None:  # noqa: A002
        """Run these actions: as they are, or, if they are computations only, with messages added."""
        if format not in ("compute_only", "compute_comms"):
            raise NotImplementedError(f"format={format!r}; expected 'compute_only' or 'compute_comms'")
        for rank, row in actions.items():
            for at, action in enumerate(row):
                if format == "compute_only" and action is not None and not action.is_compute_op:
                    raise PlanError(
                        f"rank {rank}, position {at}: {action} is no computation; give compute_only orders without messages, "
                        "or write format='compute_comms'"
                    )
                if format == "compute_comms" and action is None:
                    raise IncompleteError(
                        f"rank {rank}, position {at} is idle; a compute_comms order has no idle slots"
                    )
        self._validate_and_set_stage_mapping(actions)
        if format == "compute_comms":
            self.pipeline_order_with_comms = {rank: list(row) for rank, row in actions.items()}
        else:
            self.pipeline_order = actions

    def _load_csv(self, filename: Any, format: Format = "compute_only") -> None:  # noqa: A002
        """Run the order in a file: one row a rank, one action a cell, blank cells are idle."""
        with Path(filename).open(newline="", encoding="utf-8") as file:
            rows = {rank: [NamedAction.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}
        self._prepare_schedule_with_comms(rows, format)

    def _dump_csv(self, filename: Any, format: Format = "compute_comms") -> None:  # noqa: A002
        """Write the order to a file that `_load_csv` reads."""
        if format not in ("compute_only", "compute_comms"):
            raise NotImplementedError(f"format={format!r}; expected 'compute_only' or 'compute_comms'")
        order = self.pipeline_order if format == "compute_only" else self.pipeline_order_with_comms
        with Path(filename).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([order[rank] for rank in sorted(order)])

    def _simulate(self) -> OrderDict:
        """The order with its messages, slot by slot."""
        return in_lockstep(self.pipeline_order_with_comms, self.stage_index_to_group_rank.__getitem__, self._num_stages)

    def _add_bubbles_to_actions(self, num_stages_global: int) -> OrderDict:
        """The order with None in the slots in which a rank waits."""
        return with_bubbles(self.pipeline_order, num_stages_global)

    # -- by hand

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
        self._loss_weights = self._hand_weights(targets, arg_mbs) if self.scale_grads else None
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

    def _hand_weights(self, targets: Any, arg_mbs: Any) -> list[float]:
        """The share of each microbatch in the batch."""
        sizes = sizes_of(targets) if targets is not None else sizes_of(arg_mbs)
        if sizes is None or not sum(sizes):
            return [1 / self._n_microbatches] * self._n_microbatches
        return [float(weight) for weight in weights(sizes)]

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

    # -- the parts of a step

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """One step over a batch that is cut already. A subclass that overrides it drives the stages itself."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        calls = Microbatches([(tuple(args), dict(kwargs)) for args, kwargs in zip(arg_mbs, kwarg_mbs, strict=True)])
        empty = not any(args or kwargs for args, kwargs in calls)
        return self.step(  # type: ignore[attr-defined]
            *(() if empty else (calls,)),
            target=None if target_mbs is None else Microbatches(target_mbs),
            losses=losses,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
        )

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """The arguments of each microbatch."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        return split_batch(
            args,
            kwargs,
            self._n_microbatches,
            args_spec=self._args_chunk_spec,
            kwargs_spec=self._row_specs(args, kwargs),
        )

    def _row_specs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        """The specs for keyword arguments: a tensor with a row for each microbatch, and not for each sample, is told so."""
        specs, size = self._kwargs_chunk_spec, self._n_microbatches
        if not kwargs or size == 1 or not (specs is None or isinstance(specs, Mapping)):
            return specs
        rows = [
            name
            for name, value in kwargs.items()
            if isinstance(value, Tensor) and value.dim() and value.size(0) == size and name not in (specs or {})
        ]
        if not rows or batch_size_of(args, kwargs, args_spec=self._args_chunk_spec, kwargs_spec=specs) in (None, size):
            return specs
        warnings.warn(
            f"keyword argument {', '.join(rows)} of step() has {size} rows, one for each microbatch, which gets its own. To hand "
            f"it to every microbatch whole, write kwargs_chunk_spec={{{rows[0]!r}: Replicate()}}",
            stacklevel=4,
        )
        return {**(specs or {}), **dict.fromkeys(rows, TensorChunkSpec(0))}

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return merge_chunks(output_chunks, self._output_merge_spec)

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Each list must be one, of one entry a microbatch."""
        size = self._n_microbatches
        for name, given in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs), ("target_mbs", target_mbs)):
            if given is not None and not isinstance(given, list):
                raise TypeError(f"{name} must be a list, got {type(given).__name__}")
            if given is not None and len(given) != size:
                raise SplitError(f"{len(given)} {name} for {size} microbatches; Expecting {size} {name}")
        if losses is not None and not isinstance(losses, list):
            raise TypeError(f"losses must be a list, got {type(losses).__name__}")
        return [()] * size if arg_mbs is None else arg_mbs, [{}] * size if kwarg_mbs is None else kwarg_mbs

    def _compute_loss(self, output: Any, target: Any, loss_kwargs: Mapping[str, Any] | None = None) -> Tensor:
        assert self._loss_fn is not None, "only asked for with a loss"
        return self._loss_fn(output, target, **(loss_kwargs or {}))

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """On the last stage, with a loss: compute and keep it."""
        if stage.is_last and self._loss_fn is not None and target_mbs is not None:
            missing = mb_index + 1 - len(self._internal_losses)
            self._internal_losses.extend([None] * missing)
            self._internal_losses[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        """On the last stage: what its backward starts from, the loss by its weight in the batch."""
        if not stage.is_last or self._loss_fn is None:
            return None
        kept = self._internal_losses
        loss: Tensor | None = kept[mb_index] if 0 <= mb_index < len(kept) else None
        if loss is None:
            there = [microbatch for microbatch, one in enumerate(kept) if one is not None]
            raise RunError(
                f"the loss of microbatch {mb_index} is not there; there are those of the microbatches {there}"
            )
        return loss if self._loss_weights is None else loss * self._loss_weights[mb_index]

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Give the losses of the step to the user's list."""
        many = stages if isinstance(stages, (list, tuple)) else [stages]
        if losses is not None and any(stage.is_last for stage in many):
            kept = [loss for loss in self._internal_losses if loss is not None]
            if kept and len(kept) != self._n_microbatches:
                raise RunError(f"{len(kept)} losses of {self._n_microbatches} microbatches; expected one each")
            losses[:] = [loss.detach().clone() for loss in kept]
        self._internal_losses.clear()

    def register_hand_function(self, kind: ComputationType, function: Callable[..., object]) -> None:
        """Do actions of a kind with a function that drives the stages itself: ``function(action, context)``."""
        if kind not in CUSTOM_KINDS:
            raise PlanError(
                f"a function for {kind!r}; expected one of {', '.join(sorted(k.name for k in CUSTOM_KINDS))}"
            )
        self._hand_functions[kind] = function
        self._by_hand = None


def defers(defer_pp_recv: bool) -> dict[str, Any]:
    """The receive policy that stands for torch's option."""
    return {"receives": JustInTime()} if defer_pp_recv else {}


def validate_order(order: Order, num_ranks: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    """Prove an order complete and free of deadlocks; the rank of each stage."""
    if sorted(order) != list(range(num_ranks)):
        raise IncompleteError(f"an order for the ranks {sorted(order)}; expected the ranks 0 to {num_ranks - 1}")
    try:
        plan = plan_of(order, num_microbatches=num_microbatches, num_stages=num_stages)
        check(plan)
    except AssertionError:
        raise
    except PlanError as error:
        raise IncompleteError(str(error)) from error
    if not plan.has_backward:
        raise IncompleteError("an order without a backward; expected a B, or an I and a W, for every F")
    return dict(enumerate(plan.placement.ranks))


def _leaves_unsharded(plan: Plan) -> bool:
    """Whether some stage is still gathered when the order ends."""
    gathered: set[int] = set()
    for row in plan.codes:
        for code in row:
            action = of_code(code)
            if action.computation_type is ComputationType.UNSHARD:
                gathered.add(action.stage_index)
            elif action.computation_type is ComputationType.RESHARD:
                gathered.discard(action.stage_index)
    return bool(gathered)
