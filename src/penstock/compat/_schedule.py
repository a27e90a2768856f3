"""Schedules as programs written for torch.distributed.pipelining know them: `_PipelineSchedule` and its kin.

Beside the step of `penstock.Schedule` they have orders that may be set, the parts of a step under the names by which
programs call or override them, and steps through the stages' own methods where a program overrides one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

from torch import Tensor

from penstock.batch import split_target
from penstock.batch.batch import Args, Batch, Kwargs
from penstock.batch.policy import RowPolicy
from penstock.compat._by_hand import HAND, MEET, HandProgram, HandPrograms, is_driven_by_hand
from penstock.compat._hand_stage import PipelineContext
from penstock.compat._orders import ComputationType, leaves_of
from penstock.compat._parts import Parts, gathered_at_the_end
from penstock.compat._siblings import is_overridden, renamed
from penstock.compat._stage_base import _PipelineStageBase, call_on
from penstock.compat._utils import InferenceMode, is_strided
from penstock.compat.stage import PipelineStage
from penstock.errors import PlanError, RunError
from penstock.nest import Value
from penstock.plan import Plan
from penstock.run.binding import FORWARD, TRAIN
from penstock.run.program import CustomFunction, Program
from penstock.run.runner import Outcome, Runner
from penstock.run.setting import ActionKind
from penstock.stage.pipeline_stage import PipelineStage as CoreStage
from penstock.stage.pipeline_stage import place_in

Receives = dict[tuple[int, int], list[Any]]  # by stage and microbatch, what was posted


def _spec(field: str) -> object:
    """How the batch is cut, under torch's name; a program may set it between two steps."""
    return property(
        lambda self: getattr(self.policy, field),
        lambda self, spec: setattr(self, "policy", replace(self.policy, **{field: spec})),
    )


@dataclass(frozen=True)
class TorchPolicy(RowPolicy):
    """Splits and merges by the methods of a schedule that programs override."""

    schedule: Any = field(default=None, repr=False)

    def split_arguments(
        self, count: int, args: Args, kwargs: Kwargs
    ) -> tuple[Sequence[Args], Sequence[dict[str, Value]]]:
        found: tuple[Sequence[Args], Sequence[dict[str, Value]]] = self.schedule._split_inputs(args, dict(kwargs))
        return found

    def merge(self, outputs: Sequence[Value], batch: Batch) -> Value:
        merged = self.schedule._merge_outputs(outputs)
        # Let the last stage show what each microbatch gave: as views of what is returned, where that can be.
        if is_strided(merged) and all(is_strided(one) and one.dim() for one in outputs):
            sizes = [one.size(0) for one in outputs]
            if merged.shape[:1] == (sum(sizes),):
                outputs = list(merged.split(sizes))
        for stage in self.schedule._drivable():
            if stage.is_last:
                stage.output_chunks[:] = outputs
        return merged


class Both:
    """True, of steps with a backward and of those without: equal to either."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bool)

    __hash__ = None  # type: ignore[assignment]  # it is equal to things that are not equal

    def __repr__(self) -> str:
        return "True"


class _PipelineSchedule(Parts):
    """Stages and an order, ready to train, with everything that programs find on torch's schedules."""

    _loss_fn = renamed("loss_fn")
    _backward_requires_autograd, _comp_type_to_function_map = renamed("_needs_autograd"), renamed("_hand_functions")
    _by_hand: bool | None = None  # None: the ranks have not asked one another yet
    _hand_functions = cached_property[dict[ComputationType, Callable[..., object]]](lambda _: {})
    backward_counter = cached_property[Counter[int]](lambda _: Counter())
    fwd_recv_ops = cached_property[Receives](lambda _: {})
    bwd_recv_ops = cached_property[Receives](lambda _: {})
    # Of functions of the program's own.
    unshard_ops = cached_property[dict[int, list[object]]](lambda _: defaultdict(list))
    unsharded_stages = cached_property[set[int]](lambda _: set())
    _args_chunk_spec, _kwargs_chunk_spec, _output_merge_spec = map(_spec, ("args_spec", "kwargs_spec", "output_spec"))

    def __init__(self, *args: Value, **options: Value) -> None:
        super().__init__(*args, **options)
        self._adopt_policy()
        self._tell_stages()

    @classmethod
    def from_plan(cls, *args: Value, **options: Value) -> Self:
        made = super().from_plan(*args, **options)
        made._adopt_policy()
        made._tell_stages()
        return made

    def _adopt_policy(self) -> None:
        given = {one.name: getattr(self.policy, one.name) for one in fields(RowPolicy)}
        self.policy = TorchPolicy(**given, schedule=self)

    def _set_stages(self, stages: list[CoreStage]) -> None:
        """Programs put stages of a class of their own in the place of those that a schedule was made with."""
        self.stages = stages
        vars(self).pop("_ties", None)
        self._forget_plan()

    def _set_number(self, number: int) -> None:
        """Into how many microbatches a batch is cut, from the next step on; every rank sets it."""
        if number != vars(self).get("num_microbatches"):  # which is not there if the constructor was not called
            if self._given_plan is not None:
                raise PlanError(
                    f"_n_microbatches = {number} for a plan of {self.num_microbatches} microbatches that was given, or chosen by "
                    "replan(); expected run_plan(plan) with a plan for that number"
                )
            self.num_microbatches, self._own_order = number, None
            self._forget_plan()

    _stages = property(lambda self: self.stages, _set_stages)
    _n_microbatches = property(lambda self: self.num_microbatches, _set_number)

    @property
    def trains(self) -> bool:
        """Whether `step` differentiates: with a loss it does, unless a program says otherwise."""
        return self.loss_fn is not None if self._backward_wanted is None else self._backward_wanted

    _has_backward = property(lambda self: self.trains, lambda self, wanted: setattr(self, "_backward_wanted", wanted))

    def register_custom_function(
        self, computation_type: ActionKind | ComputationType, custom_function: CustomFunction | Callable[..., object]
    ) -> None:
        """Do actions of a kind with a function of your own, before the first step. A kind in torch's words gets torch's
        kind of function, which drives the stages itself: ``function(action, ctx)``.
        """
        if not isinstance(computation_type, ComputationType):
            super().register_custom_function(computation_type, custom_function)
            return
        known = sorted(kind.name for kind in ComputationType if not kind.startswith(("SEND", "RECV")))
        if computation_type.name not in known:
            raise PlanError(f"a function for {computation_type!r}; expected one of {', '.join(known)}")
        self._hand_functions[computation_type] = custom_function
        for mode in (HAND + TRAIN, HAND + FORWARD):  # these are made again, with the function
            self._bound.pop((mode, self.num_microbatches), None)

    # -- whether a step goes through the stages' own methods

    def _needs_hands(self) -> bool:
        """Whether a program takes part in a step here. Parts of a schedule that are not asked for are called in every step."""
        losses = "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"
        mine = self._hand_functions or is_overridden(self, "_step_microbatches", *losses)
        return bool(mine) or any(map(is_driven_by_hand, self.stages))

    @property
    def _drives_by_hand(self) -> bool:
        return self._by_hand or self._needs_hands()

    def _mode(self, *, train: bool) -> int:
        return super()._mode(train=train) + (HAND if self._drives_by_hand else 0)

    _programs = cached_property[HandPrograms](HandPrograms)  # of this schedule

    @property
    def _bound(self) -> dict[tuple[int, int], Program]:
        """The programs that are bound by now."""
        return self._programs.bound if "_programs" in vars(self) else {}

    def _connect(self, *, train: bool) -> Runner:
        """Also ask one another whether steps go through the stages' own methods: on every rank or on none."""
        if self._by_hand is None:
            self._by_hand = any(
                self._transport.collectives.all_gather("how the stages are driven", self._needs_hands())
            )
        return super()._connect(train=train)

    def _hand_plan(self) -> Plan:
        """What is done by hand, messages and care of parameters included."""
        if self._order_with_comms is None and not self._order and not self._has_own_plan():
            return self._programs.lowered(TRAIN, {})
        return self._plan_of(self.pipeline_order_with_comms)

    # -- a step

    def step(self, *args: Value, **options: Value) -> Value:
        """As `penstock.Schedule.step`; a batch that is cut already may come as lists, as torch takes them after 2.13: `arg_mbs`,
        `kwarg_mbs` and `target_mbs`.
        """
        args, options = self._joined(args, options)
        return super().step(*args, **options)

    def eval(self, *args: Value, **options: Value) -> Value:
        """Likewise, forward only. A `step` of the program's own does it, where there is one."""
        if not is_overridden(self, "step"):
            args, options = self._joined(args, options)
            return super().eval(*args, **options)
        wanted, self._backward_wanted = self._backward_wanted, False
        try:
            return self.step(*args, **options)
        finally:
            self._backward_wanted = wanted

    def prepare(
        self,
        args: Args = (),
        kwargs: Kwargs | None = None,
        target: Value = None,
        *,
        keep_outputs: bool = True,
        **options: Any,
    ) -> Batch:
        """As `penstock.Schedule.prepare`. Every rank has the target, which is not looked at without a loss."""
        given = None if self.loss_fn is None else target
        batch = super().prepare(args, kwargs, given, keep_outputs=keep_outputs, **options)
        if batch.error is not None:
            return batch
        loss_fn, targets = batch.loss_fn, batch.targets
        try:
            if targets is None and target is not None:
                targets = split_target(target, batch.count, target_spec=self.policy.target_spec)
            if loss_fn is not None and is_overridden(self, "_compute_loss"):
                loss_fn = self._own_compute_loss
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
            return replace(batch, error=error)
        return replace(batch, loss_fn=loss_fn, targets=targets, keep_outputs=keep_outputs)

    def _own_compute_loss(self, output: Value, target: Value, **options: Value) -> Tensor:
        return self._compute_loss(output, target, options)

    def run(self, batch: Batch) -> Outcome:
        if self._stands_for_others():
            self._meet(batch)
            return Outcome()
        mine = self._drivable()
        with self._transport.called("step() or eval()"):  # nothing of a step that another thread is in is touched
            for stage in mine:
                if isinstance(stage, PipelineStage):
                    stage._forget_what_changed()
                if stage.is_last:
                    stage.output_chunks.clear()  # what the last step gave must not be alive beside what this one gives
            first = self.stages[0]
            if isinstance(first, PipelineStage) and first._runtime_validate and first.is_first and batch.args:
                first._validate_ahead(batch.args[0], dict(batch.kwargs[0]))  # before anything is told to other ranks
            try:
                outcome = super().run(batch)
            except BaseException:
                for stage in mine:
                    stage.clear_runtime_states()
                raise
            finally:
                self._end_step()
            self._gather_again()
            return outcome

    def _drivable(self) -> list[_PipelineStageBase]:
        """The stages that programs may drive; penstock's own have none of what that takes."""
        return [stage for stage in self.stages if isinstance(stage, _PipelineStageBase)]

    def _begin_step(self, batch: Batch) -> None:
        """Of stages that are driven by hand."""
        self._loss_weights = None if callable(batch.shares) else batch.weights(batch.shares)
        for kept in (self._internal_losses, self.backward_counter, self.unsharded_stages):
            kept.clear()
        self._tell_stages()

    def _end_step(self) -> None:
        self._loss_weights = None
        for kept in (self._internal_losses, self.fwd_recv_ops, self.bwd_recv_ops):
            kept.clear()
        for stage in self._drivable():
            stage._end_step()

    def _stands_for_others(self) -> bool:
        """Whether the stages are made for other ranks than this one: nobody is there to talk with."""
        first = self.stages[0]
        return place_in(first.group) != (first.group_rank, first.group_size)

    def _initialize_stages(self, args: Value, kwargs: Value, target: Value = None, loss_kwargs: Value = None) -> None:
        """Have the stages learn what they receive, for a microbatch like this one; every rank calls it, before a step. In a loop
        of the user's own there is nothing left to do: its step has seen to it.
        """
        if not any(getattr(stage, "_in_step", False) for stage in self.stages):
            targets = None if target is None else [target]
            batch = Batch(self.num_microbatches, args=[tuple(args or ())], kwargs=[dict(kwargs or {})], targets=targets)
            self._meet(replace(batch, loss_kwargs=loss_kwargs or {}))

    _initialize_stage = _initialize_stages

    def _initialize_pp_stages(
        self,
        stages: Sequence[object],
        args: Value,
        kwargs: Value,
        target: Value,
        fwd_initialized: bool,
        bwd_initialized: bool,
        loss_kwargs: Value = None,
    ) -> tuple[bool, bool]:
        """Likewise; what is initialized afterwards."""
        if not fwd_initialized or bwd_initialized != self.trains:
            self._initialize_stages(args, kwargs, target, loss_kwargs)
        return True, self.trains

    def _meet(self, batch: Batch) -> None:
        """What comes before the first microbatch of a step, and no more."""
        if self._stands_for_others():
            context = PipelineContext(self, batch.args, batch.kwargs, batch.targets)
            for stage in self._drivable():  # all of them: those for other ranks are torch's kind
                self._prepare_forward(stage, None, context)
            self._prepare_backward(context, batch.loss_kwargs)
            return
        with self._transport.alone("_initialize_stages()"):
            runner = self._connect(train=self.trains)
            mode = HAND + MEET + (TRAIN if self.trains else FORWARD)
            runner.step(self._programs, mode, batch, self.steps)

    _adjacent_only = False  # whether stages that are driven by hand talk with their neighbours alone
    _backward_wanted: bool | None = None
    _knows_shapes = False  # a program has seen to it that the stages know their shapes

    # -- before the first microbatch: the stages learn what they receive

    def _prepare_forward(self, stage: _PipelineStageBase, handed: Value, context: PipelineContext) -> None:
        args, kwargs = (context.arg_mbs or [()])[0], (context.kwarg_mbs or [{}])[0]
        leaves = leaves_of((self._order_with_comms or self.pipeline_order).values())
        stage._splits = any(leaf.computation_type is ComputationType.BACKWARD_INPUT for leaf in leaves)
        stage._model_args = args
        if not self._knows_shapes:
            given = args if stage.is_first else handed
            stage._prepare_forward_infra(self.num_microbatches, given, kwargs, has_backward=self.trains)

    def _prepare_backward(self, context: PipelineContext, loss_kwargs: Value) -> None:
        received: object = None
        for stage in reversed(self.stages) if self.trains and not self._knows_shapes else ():
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
        known = self._bound.values()
        return {one.setting.grad for one in known if isinstance(one, HandProgram) and one.saved}

    def _ready_with_backward(self) -> bool | Both:
        """Programs compare it with whether the next step has a backward; if not equal, torch's stages learn their shapes anew."""
        ready = self._ready_modes()
        return Both() if len(ready) == 2 else True in ready

    def _set_ready(self, known: bool) -> None:
        """A program that has seen to the shapes itself says so. One that says the contrary has stages that are driven by hand
        learn their shapes again, which they do by themselves when the shape of the input changes.
        """
        self._knows_shapes = known
        if not known:
            for stage in self.stages:
                vars(stage).pop("_seen", None)
            for program in self._bound.values():
                if isinstance(program, HandProgram):
                    program.saved.clear()

    # Whether some steps begin at once: programs ask, since torch's stages run their module once more before others.
    _stages_forward_initialized = property(lambda self: bool(self._ready_modes()), _set_ready)
    _stages_backward_initialized = property(_ready_with_backward, _set_ready)
    _stage_forward_initialized, _stage_backward_initialized = _stages_forward_initialized, _stages_backward_initialized

    def _validate_adjacent_stage_communication(self) -> None:
        """Where a rank has several stages, only neighbours talk by hand: whoever hands over knows the next stage alone."""
        for stage in self._drivable():
            index = stage.stage_index
            # What a program puts there itself, as torch's place of an argument of the model, need not have a source.
            sources = {getattr(info, "source", None) for info in stage.args_recv_info.get(0, ())} - {index - 1}
            targets = {there for readers in stage.act_send_info.values() for there in readers} - {index + 1}
            if far := sorted(there for there in sources | targets if there is not None):
                raise RunError(
                    f"stage {index} exchanges values with {far}, and stages driven by hand support adjacent-stage communication "
                    "only; leave forward_one_chunk and its kin alone, and penstock's own steps send what skips stages too"
                )

    # -- parameters that are sharded

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
