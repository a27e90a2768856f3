"""Schedule: stages and a plan, ready to train. The classes of `penstock.run.classes` are names for it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from typing import ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from penstock.backward.offload_targets import offload_target
from penstock.batch.batch import Args, Batch, Kwargs, Rows, precise_on
from penstock.batch.policy import RowPolicy, StepPolicy
from penstock.checks import check_types
from penstock.comm.transport import Transport
from penstock.errors import OutOfMemory, PlanError, RunError, SplitError, StageError
from penstock.lower import InTurn, ReceivePolicy, recompute_rank
from penstock.nest import Value
from penstock.observe.live_memory import MemoryWatch
from penstock.observe.observer import StepObserver
from penstock.observe.recording import Recording
from penstock.plan import Op, Overlap, Placement, Plan, load
from penstock.plan.actions import MICROBATCH
from penstock.run.binding import FORWARD, TRAIN, Programs
from penstock.run.call_arguments import shapes_of
from penstock.run.checksums import Comparison
from penstock.run.feed import Feed
from penstock.run.last_stage import OwnLoss
from penstock.run.meeting import facts_of, meet, transport_of
from penstock.run.planning import Place, Sparing, agreed_plan, check_flags, check_sparing, placed, plan_of_recipe
from penstock.run.preamble import Preambles
from penstock.run.program import ActionContext, CustomFunction
from penstock.run.rng import MicrobatchRng
from penstock.run.runner import Outcome, Runner
from penstock.run.setting import ActionKind, Binding
from penstock.run.ties import Holders, Tied, Ties, holders_of
from penstock.simulate import Costs
from penstock.stage.pipeline_stage import PipelineStage

Observer = TypeVar("Observer", bound=StepObserver)


class Schedule:
    """Stages and a plan, ready to train.

        schedule = Schedule.from_plan(load("plan.csv"), stages, loss_fn=loss_fn)
        schedule.step(batch, target=labels)

    Common parameters:

    `n_microbatches`     into how many microbatches a batch is cut.
    `loss_fn`            called as ``loss_fn(output, target, **loss_kwargs)`` for each microbatch on the last stage.
    `scale_grads`        True: each microbatch's loss counts by its share of the batch (1/n when it divides evenly), so a
                         loss that is a mean gives the gradient of the whole batch's mean. False: as it is (sums).
    `args_chunk_spec`, `kwargs_chunk_spec`, `target_chunk_spec`, `output_merge_spec`  see `penstock.batch`.
    `policy`             a `StepPolicy` in place of the five options before this one.
    `rng`                "per-microbatch": random numbers keyed by `seed`, stage, microbatch and step.
    `dynamic`            True: shapes may change from step to step for reasons other than the input's shape.
    `recompute`          stages whose forward is run again before the backward instead of being held: True for all, a list of
                         stages, or ``{stage: [microbatches]}``. `penstock.recompute` does the same with a plan.
    `offload`            likewise, stages of which what the forward saved is moved away and back; to the memory of the host,
                         or, with `offload_to="folder"`, to files there. "host" and "disk" say so for all stages.
    `ties`               parameters that several hand-made stages share: ``[tie([(0, "embed.weight"), (3, "head.weight")])]``;
                         the same on every rank. A captured model brings its own.
    """

    recipe: ClassVar[str | None] = None  # the name of the schedule in penstock.schedules
    _needs_autograd = True

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Value = None,
        kwargs_chunk_spec: Value = None,
        output_merge_spec: Value = None,
        scale_grads: bool = True,
        *,
        target_chunk_spec: Value = None,
        plan: Plan | None = None,
        receives: ReceivePolicy | None = None,
        rng: Literal["per-microbatch"] | None = None,
        seed: int = 0,
        dynamic: bool = False,
        recompute: Sparing = False,
        offload: Sparing = False,
        offload_to: Place = None,
        ties: Iterable[Tied | Holders] = (),
        policy: StepPolicy | None = None,
        transport: Transport | None = None,
        observers: Sequence[StepObserver] = (),
        copies_batch: bool = False,
        comparison: Comparison | None = None,
        scope: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`observers` see all steps. `copies_batch`: tensors of a batch in host memory are copied to the device of the stages,
        microbatch by microbatch. `comparison`: ranks compare their arguments in some steps. `scope`: entered for each step."""
        check_types("Schedule", StageError, n_microbatches=(n_microbatches, int), seed=(seed, int))
        check_types("Schedule", StageError, loss_fn=(loss_fn, Callable | None))
        try:
            self.stages = sorted(stages, key=lambda stage: stage.stage_index)
        except (TypeError, AttributeError):
            check_types("Schedule", StageError, stages=(stages, Sequence[PipelineStage]))
            raise
        if not self.stages:
            raise StageError("a schedule without stages; expected the stages of this rank")
        if not 1 <= n_microbatches <= MICROBATCH:
            raise PlanError(f"n_microbatches={n_microbatches}; expected 1 to {MICROBATCH:,} microbatches")
        self.num_microbatches = n_microbatches
        routes = getattr(self.stages[0], "routes", None)
        own_loss = OwnLoss(routes.loss_of) if routes is not None and routes.has_loss else None
        self.loss_fn = loss_fn or own_loss  # a captured model that returns its own loss needs no loss_fn
        self.scale_grads = scale_grads
        self.policy: StepPolicy = policy or RowPolicy(
            args_chunk_spec, kwargs_chunk_spec, target_chunk_spec, output_merge_spec, mean=scale_grads
        )
        self.steps = 0  # training steps done: a part of the key of random numbers
        self._copies_batch, self._comparison, self._scope = copies_batch, comparison, scope
        self._given_plan = plan
        check_sparing(recompute, offload, offload_to)
        self._holds_less = (recompute, offload)
        self._binding = Binding(
            receives,
            MicrobatchRng(seed, self.stages[0].device) if rng == "per-microbatch" else None,
            offload_target(offload_to),
        )
        self._dynamic = dynamic
        check_flags(self, "scale_grads", "_dynamic")
        self._tied = holders_of(ties)
        if transport is not None:
            self._transport = transport
        self._runner: Runner | None = None
        self._observers = list(observers)  # they go on when the plan changes

    @classmethod
    def from_plan(
        cls, plan: Plan | str | PathLike[str], stages: PipelineStage | Sequence[PipelineStage], **options: Value
    ) -> Self:
        """A schedule that runs this plan, or plan file, compute-only or lowered. Options as in the constructor."""
        check_types("Schedule.from_plan", StageError, stages=(stages, PipelineStage | Iterable))
        if not isinstance(plan, Plan):
            plan = load(plan)
        many = [stages] if isinstance(stages, PipelineStage) else list(stages)
        made = cls.__new__(cls)
        Schedule.__init__(made, many, plan.num_microbatches, plan=plan, **options)
        return made

    # -- the plan

    @cached_property
    def plan(self) -> Plan:
        """What is computed, and in which order. `lowered_plan` is what is run."""
        return placed(self.make_plan(), self.stages, *self._holds_less)

    def make_plan(self) -> Plan:
        """The plan of compute actions; a subclass may build its own."""
        if self._given_plan is not None:
            return self._given_plan
        if self.recipe is None:
            raise PlanError(
                f"{type(self).__name__} has no plan; use Schedule.from_plan(plan, stages), or override make_plan"
            )
        return plan_of_recipe(self.recipe, self.stages[0], self.num_microbatches)

    @property
    def placement(self) -> Placement:
        return self.plan.placement

    def lowered_plan(self, *, forward_only: bool = False) -> Plan:
        """The very plan that is run, messages and all."""
        mode = FORWARD if forward_only else TRAIN
        bound = (mode, self.num_microbatches) in self._programs.bound
        with nullcontext() if bound else self._transport.called("lowered_plan()"):
            return self._programs.get(mode).plan

    def replan(
        self, costs: Costs, *, gain: float = 0.05, search: Callable[[Plan], Iterable[Plan]] | None = None
    ) -> bool:
        """Between two steps: take another plan on all ranks at once, if these costs say that it saves that share of a step.

            with schedule.record() as recording:
                schedule.step(batch, target=labels)
            schedule.replan(measured_costs([recording.timeline], known))

        Every rank calls it; the first one decides, by its costs. The stages stay where they are, no rank holds more than
        before, and the same numbers come out of the training. `search` may give plans to consider beside the known ones.
        Whether the plan is another one comes back.
        """
        with self._transport.called("replan()"):
            with self._transport.alone("replan()"):
                found = agreed_plan(self.plan, costs, self._transport, gain=gain, search=search)
            if found is not None:
                self.run_plan(found)
        return found is not None

    def run_plan(self, plan: Plan) -> None:
        """Go on under another plan for the same stages; all ranks call it, between two steps. One that does not fit is refused.

        schedule.run_plan(penstock.recompute(schedule.plan))
        """
        if not isinstance(plan, Plan):
            raise RunError(f"run_plan(plan={plan!r:.80}); expected a Plan. penstock.plan.load(file) reads one")
        with self._transport.called("run_plan()"):
            before = dict(vars(self))
            self._given_plan, self.num_microbatches = plan, plan.num_microbatches
            self._runner = None  # with all that was bound for the plan before
            for name in ("plan", "_programs", "_ties"):
                vars(self).pop(name, None)
            try:
                self._programs.get(self._mode(train=self.trains))  # lowered, proved and bound by now
            except BaseException:
                vars(self).clear()
                vars(self).update(before)
                raise

    def register_custom_function(self, computation_type: ActionKind, custom_function: CustomFunction) -> None:
        """Do actions of a kind (an `Op`, or `Overlap` for pairs) with a function of your own: ``function(action, context)``.
        Before the first step.
        """
        call = "register_custom_function"
        check_types(call, RunError, computation_type=(computation_type, Op | type[Overlap]))
        check_types(call, RunError, custom_function=(custom_function, Callable))
        if "_programs" in vars(self) and self._programs.bound:
            raise RunError("register_custom_function after the first step; the plan is bound by then. Call it before")
        self._binding.custom[computation_type] = lambda program, action: partial(
            custom_function, action, ActionContext(self, program)
        )

    # -- steps

    def step(
        self,
        *args: Value,
        target: Value = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Value] | None = None,
        **kwargs: Value,
    ) -> Value:
        """One training step over a whole batch: cut into microbatches, forward and backward; gradients add up in `.grad`.

        Every rank calls it. The rank of the first stage gives the model's arguments, that of the last stage `target`;
        giving them everywhere is fine. Keyword arguments go to the stages of this rank that take them. `losses`, a
        list, is filled with each microbatch's loss on the last stage's rank; the merged outputs are returned there.

        Without a `loss_fn` there is nothing to differentiate, and the step is an evaluation.
        """
        batch = self.prepare(args, kwargs, target, loss_kwargs=loss_kwargs, keep_outputs=return_outputs)
        outcome = self.run(batch)
        if losses is not None and self._has_last:
            losses[:] = outcome.losses
        return self.merge(outcome, batch)

    def eval(
        self,
        *args: Value,
        target: Value = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Value] | None = None,
        **kwargs: Value,
    ) -> Value:
        """The same forward only, without gradients; any batch size. Modules stay in the mode that they are in."""
        batch = self.prepare(args, kwargs, target, train=False, loss_kwargs=loss_kwargs, keep_outputs=return_outputs)
        outcome = self.run(batch)
        if losses is not None and self._has_last:
            losses[:] = outcome.losses
        return self.merge(outcome, batch)

    @property
    def trains(self) -> bool:
        """True if `step` differentiates."""
        return self.loss_fn is not None

    def prepare(
        self,
        args: Args = (),
        kwargs: Kwargs | None = None,
        target: Value = None,
        *,
        train: bool = True,
        count: int | None = None,
        loss_kwargs: Kwargs | None = None,
        keep_outputs: bool = True,
        loss_factor: float = 1.0,
    ) -> Batch:
        """Split a batch into microbatches, without a message. If that fails, `run` raises the error on all ranks.

            batch = schedule.prepare((x,), target=y)
            output = schedule.merge(schedule.run(batch), batch)

        `count`: into how many microbatches; None: as the policy says, which is the number of the plan unless it has few rows.
        `loss_factor` multiplies the losses before their backward, and not the losses that are reported: 1/4 in each of four
        steps that are accumulated.
        """
        batch = Batch(self.num_microbatches, train=train and self.trains)
        try:
            if count is None:
                count = self.policy.count(args, kwargs or {}, batch.count)
            if train and target is not None and self.loss_fn is None:
                raise RunError(
                    "step() with a target and without a loss: nothing would be differentiated. Give the schedule a "
                    "loss_fn=function, or call eval() for the outputs alone"
                )
            batch = Batch(
                min(count, batch.count),
                train=batch.train and self.plan.has_backward,
                keep_outputs=keep_outputs and self._has_last,
                loss_fn=self.loss_fn,
                loss_kwargs=loss_kwargs or {},
            )
            if batch.train and self._needs_autograd and not torch.is_grad_enabled():
                raise RunError("step() under torch.no_grad(): nothing could be differentiated. Call eval() instead")
            return self._filled(batch, args, kwargs or {}, target, loss_factor)
        except BaseException as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
            return replace(batch, error=error)

    def _filled(self, batch: Batch, args: Args, kwargs: Kwargs, target: Value, loss_factor: float) -> Batch:
        """The batch with its microbatches, and with the weights of their losses."""
        policy, first, device = self.policy, self._has_first, self.stages[0].device
        scale: float | Tensor = 1.0
        if batch.train:
            scale = policy.scale(device)
        if isinstance(scale, Tensor):  # the weight of a loss is rounded once, to the dtype of the loss
            scale = scale.to(precise_on(device))
        if loss_factor != 1.0:
            scale = scale * loss_factor
        if first and not args and not kwargs:
            raise RunError(
                "rank of the first stage: step() without arguments; expected the model's input, step(x, ...)"
            )
        rows = self._rows(batch, args, kwargs, target)
        computes, own = self._has_last and batch.loss_fn is not None, isinstance(batch.loss_fn, OwnLoss)
        if computes and batch.train and target is None and not own:
            raise RunError("rank of the last stage: there is a loss_fn and no target; write step(..., target=labels)")
        named = self._named(args, kwargs, target)
        if own or not computes:
            target = None  # not read here
        split = policy.split(batch, args, kwargs, target)
        if batch.loss_fn is not None and (differs := rows.differs_from(rows)):
            raise SplitError(f"{differs}. Give a target for the rows of the input, or target_chunk_spec")
        targets = split.targets
        if computes and own:
            targets = [None] * batch.count
        if split.row_order is not None:  # the sizes of the groups are a part of the shapes
            args, kwargs = (split.args, split.kwargs), {}
        batch = replace(
            batch,
            args=split.args,
            kwargs=split.kwargs,
            targets=targets,
            scale=scale,
            row_order=split.row_order,
            rows=rows,
            shape_key=first and shapes_of(args, kwargs),
            copies=self._copies(),
            given=named,
        )
        return replace(batch, shares=policy.weigh(batch)) if computes else batch

    def _rows(self, batch: Batch, args: Args, kwargs: Kwargs, target: Value) -> Rows:
        """Rows to compare: one microbatch is handed on whole, whatever its rows are, and a target is read at the ends alone."""
        if not self._has_first or batch.count == 1:
            kwargs = {}
        if not self._has_first and not self._has_last:
            target = None
        return self.policy.rows(args, kwargs, target)

    def _copies(self) -> Feed | None:
        device = self.stages[0].device
        if not self._copies_batch or device.type == "cpu":
            return None
        return Feed(device, self._copy_stream)

    def _named(self, args: Args, kwargs: Kwargs, target: Value) -> Kwargs:
        """Arguments that must be the same on all ranks; keyword arguments of stages made by hand are each rank's own."""
        if self._comparison is None:
            return {}
        named = {f"args[{place}]": value for place, value in enumerate(args)} | {"target": target}
        if self.stages[0].routes is not None:
            named |= kwargs
        return named

    def run(self, batch: Batch) -> Outcome:
        """Run one step of a prepared batch: it succeeds on all ranks, or raises on all ranks."""
        with self._transport.alone("step() or eval()"), self._scope():
            runner = self._connect(train=batch.train)
            mode = self._mode(train=batch.train)
            try:
                outcome = runner.step(self._programs, mode, batch, self.steps)
            except OutOfMemory as error:
                error.remedy = recompute_rank(self.plan, error.rank)  # the same on every rank, without a message
                raise
            self.steps += batch.train
            return outcome

    def merge(self, outcome: Outcome, batch: Batch) -> Value:
        """Return the outputs of a step as one, on the rank of the last stage and if they were kept; else None."""
        return self.policy.merge(outcome.outputs, batch) if outcome.outputs else None

    def _mode(self, *, train: bool) -> int:
        return TRAIN if train and self.plan.has_backward else FORWARD

    @cached_property
    def _copy_stream(self) -> torch.Stream:
        return torch.Stream(device=self.stages[0].device)

    @property
    def _has_first(self) -> bool:
        return any(stage.is_first for stage in self.stages)

    @property
    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Measure the steps inside; afterwards `recording.timeline` is that of the last one, of all ranks.

        with schedule.record() as recording:
            schedule.step(batch, target=labels)
        print(recording.timeline.bubble_makespan)
        """
        with self.watch() as recording:
            yield recording
        with self._transport.alone("the end of record()"):
            recording.finish()

    def watch(self) -> AbstractContextManager[Recording]:
        """Time the actions of this rank in the steps inside; no rank is asked or waited for.

        with schedule.watch() as recording:
            schedule.step(batch, target=labels)
        print(recording.busy, recording.span)
        """
        return self._connected(Recording)

    def watch_memory(self) -> AbstractContextManager[MemoryWatch]:
        """Count the bytes that this rank holds in the steps inside; no rank is asked or waited for.

        with schedule.watch_memory() as memory:
            schedule.step(batch, target=labels)
        print(memory.peak)
        """
        return self._connected(MemoryWatch)

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[Observer]:
        """Have an observer see the steps inside; others may observe the same steps.

        with schedule.observe(MyObserver()) as observer:
            schedule.step(batch, target=labels)
        """
        self._observers.append(observer)
        try:
            yield observer
        finally:
            self._observers.remove(observer)

    @contextmanager
    def _connected(self, kind: Callable[[Transport], Observer]) -> Iterator[Observer]:
        """Observe steps after the ranks have met, so that the first step inside is like those after it."""
        with self._transport.called("observing steps"):
            self._connect(train=self.trains)
        with self.observe(kind(self._transport)) as observer:
            yield observer

    # -- before the first step

    @cached_property
    def _transport(self) -> Transport:
        transport = transport_of(self.stages[0].group, self.stages[0].device, self.stages[0])
        if isinstance(self._binding.receives, InTurn):
            transport.arrange(self._binding.receives.queues)
        return transport

    @cached_property
    def _programs(self) -> Programs:
        return Programs(self.plan, self.stages, self._transport, self._binding, self._ties)

    @cached_property
    def _ties(self) -> Ties:
        """The parameters that several stages hold."""
        return Ties(self.stages, self._tied, self.plan.placement, self._transport)

    @property
    def _options_told(self) -> dict[str, str]:
        """The options by which ranks send and draw."""
        rng, receives = self._binding.rng, self._binding.receives
        return {
            "dynamic": str(self._dynamic),
            "rng": "none" if rng is None else f"per-microbatch, seed={rng.seed}",
            "receives": "default" if receives is None else str(receives),
        }

    def _connect(self, *, train: bool) -> Runner:
        """Before the first step the ranks meet."""
        if self._runner is None:

            def look(facts: dict[str, str]) -> bool:
                facts["schedule"] = self.plan.name or type(self).__name__
                facts["communicators"] = self._transport.queues
                facts |= self._options_told
                facts |= facts_of(self.plan, self.stages, self._ties, loss=self.loss_fn is not None)
                return self._programs.get(self._mode(train=train)).compiles

            try:
                compiles = meet(self._transport, self.stages, look)
            except Exception:
                vars(self).pop("_programs", None)  # bound anew, should it be tried again
                raise
            self._programs.compile_ahead = compiles
            self._transport.connect({*self._programs.get(self._mode(train=train)).channels, *self._ties.peers})
            self._ties.meet()
            preambles = Preambles(self._transport, self.plan.placement)
            self._runner = Runner(
                self._transport,
                preambles,
                dynamic=self._dynamic,
                observers=self._observers,
                comparison=self._comparison,
            )
        return self._runner
