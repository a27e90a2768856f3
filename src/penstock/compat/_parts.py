"""What programs written for torch.distributed.pipelining read, set, call or override of a schedule, by its names.

schedule.pipeline_order                     # {0: [0F0, 0F1, ...], 1: [...]}: what each rank does
schedule._prepare_schedule_with_comms(order)
schedule._load_csv("plan.csv", format="compute_comms")

Beside orders these are the parts of a step: splitting, checking, losses, merging.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

from torch import Tensor

from penstock.batch import Microbatches, TensorChunkSpec, batch_size_of, merge_chunks, split_batch
from penstock.batch.policy import RowPolicy
from penstock.compat import _orders as passes
from penstock.compat._orders import ComputationType, NamedAction, Order, OrderDict, leaves_of, named, plan_of
from penstock.compat._siblings import is_overridden
from penstock.compat._utils import generate_stage_to_rank_mapping
from penstock.errors import IncompleteError, PlanError, RunError, SplitError
from penstock.nest import Value
from penstock.plan import Plan
from penstock.run.schedule import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage as CoreStage

Format = Literal["compute_only", "compute_comms"]
Cut: TypeAlias = "list[Value] | None"  # one entry a microbatch
LossOptions: TypeAlias = "Mapping[str, Value] | None"  # what the loss function takes beside output and target


class Parts(Schedule):
    """The order of a schedule, its own or what a program has set, and what a step is made of."""

    _defer_pp_recv = False
    _order = cached_property[OrderDict](lambda _: {})  # set or filled by a program; empty: the schedule's own
    _own_order: OrderDict | None = None  # the schedule's own, once somebody has asked
    _order_with_comms: OrderDict | None = None  # set by a program
    _given_plan: Plan | None = None
    policy: RowPolicy  # set by `_PipelineSchedule`

    rank = cached_property[int](lambda self: self.stages[0].group_rank)
    pp_group_size = cached_property[int](lambda self: self.stages[0].group_size)
    n_local_stages = cached_property[int](lambda self: len(self.stages))  # on each rank
    _num_stages = cached_property[int](lambda self: self.stages[0].num_stages)

    def _forget_plan(self) -> None:
        """The order has changed: what was derived from it is made again."""
        for name in ("plan", "_programs", "_by_hand"):
            vars(self).pop(name, None)

    def run_plan(self, plan: Plan) -> None:
        """Go on under another plan, which takes the place of an order that was set, or that a subclass makes."""
        with self._transport.called("run_plan()"):
            before = dict(vars(self))
            for name in ("_order", "_own_order", "_order_with_comms", "stage_index_to_group_rank"):
                vars(self).pop(name, None)
            try:
                super().run_plan(plan)  # held against the stages, which an order that was set would hide
            except BaseException:
                vars(self).update(before)
                raise
            self._forget_plan()
            self._tell_stages()

    def make_plan(self) -> Plan:
        """That of the order which a program has set, or which a subclass makes, or else the schedule's own."""
        order: Order | None = self._order_with_comms or self._order
        makes = not order and self._given_plan is None
        if makes and is_overridden(self, "_get_pipeline_order"):
            order = self._get_pipeline_order()
        if makes and not order and is_overridden(self, "_calculate_single_rank_operations"):
            order = {rank: self._calculate_single_rank_operations(rank) for rank in range(self.pp_group_size)}
        if not order and is_overridden(self, "_step_microbatches") and not self._has_own_plan():
            # Nothing is said of the order: any that has these messages will do.
            return self._made("gpipe" if self.n_local_stages == 1 else "loopedbfs")
        return self._plan_of(order) if order else super().make_plan()

    def _made(self, recipe: str) -> Plan:
        return get_schedule(recipe)(self.pp_group_size, self.num_microbatches, stages_per_rank=self.n_local_stages)

    @property
    def pipeline_order(self) -> OrderDict:
        """What each rank computes, in which order. May be set, or filled rank by rank, before the first step."""
        if self._order or not self._has_own_plan():
            return self._order
        if self._own_order is None:
            plan = self.make_plan() if self._order_with_comms is None else super().make_plan()
            self._own_order = dict(enumerate(map(named, plan.codes)))
        return self._own_order

    @pipeline_order.setter
    def pipeline_order(self, order: OrderDict) -> None:
        self._order = order
        self._order_with_comms = None
        self._forget_plan()

    def _has_own_plan(self) -> bool:
        own = self.recipe is not None or self._given_plan is not None
        return own or is_overridden(self, "_get_pipeline_order", "_calculate_single_rank_operations")

    def _get_pipeline_order(self) -> OrderDict | None:
        """A subclass may give its order here."""
        if self._order or (self.recipe is None and self._given_plan is None):
            return self._order or None
        return dict(enumerate(map(named, super().make_plan().codes)))

    def _calculate_single_rank_operations(self, rank: int) -> list[NamedAction | None]:
        """A subclass may give the order of each rank here.

        Programs that only want to look make the object without its constructor and set the sizes on it.
        """
        plan = super().make_plan() if "_binding" in vars(self) else self._made(self.recipe or "")
        return named(plan.codes[rank])

    def _plan_of(self, order: Order) -> Plan:
        """The plan of an order. A plan frees in the end what it has gathered; an order need not say so."""
        kind = ComputationType.RESHARD
        rows = {
            rank: [*row, *(NamedAction(stage, kind) for stage in sorted(gathered_at_the_end(row, (kind,))))]
            for rank, row in order.items()
        }
        return plan_of(rows, num_microbatches=self.num_microbatches, num_stages=self._num_stages)

    @property
    def pipeline_order_with_comms(self) -> OrderDict:
        """The same with messages and care of parameters. If it is set, it is run as it is."""
        if self._order_with_comms is not None:
            return self._order_with_comms
        rank_of = self.stage_index_to_group_rank.__getitem__
        cared = {
            rank: passes.add_reduce_grad(passes.add_unshard_reshard(row), self.num_microbatches)
            for rank, row in self.pipeline_order.items()
        }
        lowered = passes.add_send_recv(cared, rank_of, self._num_stages)
        return passes.defer_recv_ops(lowered, rank_of) if self._defer_pp_recv else lowered

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: OrderDict | None) -> None:
        self._order_with_comms = order
        self._forget_plan()

    @cached_property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """Which rank holds which stage, as far as it is known without a plan. A program that knows better sets it."""
        if self._given_plan is None and (self.recipe is None or self._num_stages % self.pp_group_size):
            return generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages)
        return dict(enumerate(super().make_plan().placement.ranks))

    def _tell_stages(self) -> None:
        for stage in self.stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank  # type: ignore[attr-defined]

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Check an order and take the placement of the stages from it."""
        sizes = self.pp_group_size, self._num_stages, self.num_microbatches
        self.stage_index_to_group_rank = passes.validate_schedule(actions, *sizes)
        self._tell_stages()

    def _prepare_schedule_with_comms(self, actions: OrderDict, format: Format = "compute_only") -> None:  # noqa: A002
        """Run these actions: as they are, or, if they are computations only, with messages added."""
        _check_format(format)
        for rank, row in actions.items():
            for at, action in enumerate(row):
                where = f"rank {rank}, position {at}"
                if format == "compute_only" and action is not None and not action.is_compute_op:
                    raise PlanError(
                        f"{where}: {action} is no computation; give compute_only orders without messages, or write "
                        "format='compute_comms'"
                    )
                if format == "compute_comms" and action is None:
                    raise IncompleteError(f"{where} is idle; a compute_comms order has no idle slots")
        self._validate_and_set_stage_mapping(actions)
        if format == "compute_comms":
            self.pipeline_order_with_comms = {rank: list(row) for rank, row in actions.items()}
        else:
            self.pipeline_order = actions

    def _load_csv(self, filename: str | PathLike[str], format: Format = "compute_only") -> None:  # noqa: A002
        """Run the order in a file: one row a rank, one action a cell, blank cells are idle."""
        with Path(filename).open(newline="", encoding="utf-8") as file:
            rows = {rank: [NamedAction.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}
        self._prepare_schedule_with_comms(rows, format)

    def _dump_csv(self, filename: str | PathLike[str], format: Format = "compute_only") -> None:  # noqa: A002
        """Write the order to a file that `_load_csv` reads."""
        _check_format(format)
        order = self.pipeline_order if format == "compute_only" else self.pipeline_order_with_comms
        with Path(filename).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([order[rank] for rank in sorted(order)])

    def _simulate(self) -> OrderDict:
        """The order with its messages, slot by slot."""
        rank_of = self.stage_index_to_group_rank.__getitem__
        return passes.simulate_comms_compute(self.pipeline_order_with_comms, rank_of, self._num_stages)

    # -- the parts of a step

    _internal_losses = cached_property[list[Tensor | None]](lambda _: [])
    # The share of each microbatch in the batch, while a step runs.
    _loss_weights: Sequence[float | Tensor] | None = None

    def _step_microbatches(
        self,
        arg_mbs: Cut = None,
        kwarg_mbs: Cut = None,
        target_mbs: Cut = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: LossOptions = None,
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
        specs = {"args_spec": self.policy.args_spec, "kwargs_spec": self._row_specs(args, kwargs)}
        return split_batch(args, kwargs, self.num_microbatches, **specs)

    def _row_specs(self, args: tuple[Value, ...], kwargs: Mapping[str, Value] | None) -> object:
        """The specs for keyword arguments: a tensor with a row for each microbatch, and not for each sample, is told so."""
        specs, size = self.policy.kwargs_spec, self.num_microbatches
        if not kwargs or size == 1 or not (specs is None or isinstance(specs, Mapping)):
            return specs
        rows = [
            name
            for name, value in kwargs.items()
            if isinstance(value, Tensor) and value.dim() and value.size(0) == size and name not in (specs or {})
        ]
        if not rows or batch_size_of(args, kwargs, args_spec=self.policy.args_spec, kwargs_spec=specs) in (None, size):
            return specs
        warnings.warn(
            f"keyword argument {', '.join(rows)} of step() has {size} rows, one for each microbatch, which gets its own. To hand "
            f"it to every microbatch whole, write kwargs_chunk_spec={{{rows[0]!r}: Replicate()}}",
            stacklevel=4,
        )
        return {**(specs or {}), **dict.fromkeys(rows, TensorChunkSpec(0))}

    def _merge_outputs(self, output_chunks: list[Value]) -> Value:
        return merge_chunks(output_chunks, self.policy.output_spec)

    def _check_inputs(
        self, arg_mbs: Cut = None, kwarg_mbs: Cut = None, target_mbs: Cut = None, losses: list[Tensor] | None = None
    ) -> tuple[list[Value], list[Value]]:
        """Each list must be one, of one entry a microbatch."""
        size = self.num_microbatches
        lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs, "losses": losses}
        for name, given in lists.items():
            if given is not None and not isinstance(given, list):
                raise TypeError(f"{name} must be a list, got {type(given).__name__}")
            if given is not None and name != "losses" and len(given) != size:
                raise SplitError(f"{len(given)} {name} for {size} microbatches; Expecting {size} {name}")
        return [()] * size if arg_mbs is None else arg_mbs, [{}] * size if kwarg_mbs is None else kwarg_mbs

    def _compute_loss(self, output: Value, target: Value, loss_kwargs: LossOptions = None) -> Tensor:
        assert self.loss_fn is not None, "only asked for with a loss"
        return self.loss_fn(output, target, **(loss_kwargs or {}))

    def _should_compute_loss(self, stage: CoreStage) -> bool:
        return bool(stage.is_last and self.loss_fn is not None)

    def _maybe_compute_loss(
        self, stage: CoreStage, output: Value, target_mbs: Value, mb_index: int, loss_kwargs: LossOptions = None
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
            raise RunError(f"the loss of microbatch {mb_index} is not there; there are those of microbatches {there}")
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


def _check_format(format: str) -> None:  # noqa: A002  torch's word
    if format not in ("compute_only", "compute_comms"):
        raise NotImplementedError(f"format={format!r}; expected 'compute_only' or 'compute_comms'")


def gathered_at_the_end(row: Sequence[NamedAction | None], freed: Sequence[ComputationType]) -> set[int]:
    """The stages of a row that are gathered and, by actions of the kinds in `freed`, not freed again."""
    kinds = (ComputationType.UNSHARD, *freed)
    last = {leaf.stage_index: leaf.computation_type for leaf in leaves_of([row]) if leaf.computation_type in kinds}
    return {stage for stage, kind in last.items() if kind is ComputationType.UNSHARD}
