"""Schedule: stages and a plan, ready to train. The classes of `penstock.run.classes` are names for it, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from os import PathLike
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from penstock import __version__
from penstock.batch import merge_chunks, split_batch, split_target
from penstock.comm.distributed import DistributedTransport
from penstock.comm.local import LocalWorld
from penstock.comm.transport import Transport
from penstock.errors import DeadlockError, PlanError, RanksDisagree, RunError, StageError
from penstock.lower import Ahead, Early, ReceivePolicy, add_reduce_grad, add_unshard_reshard, lower
from penstock.parallel import adapt
from penstock.plan import Op, Overlap, Placement, Plan, StageGraph, check, dumps, load
from penstock.plan.vocabulary import ComputationType
from penstock.run.context import ActionContext, CustomFunction
from penstock.run.inputs import shapes_of, shares
from penstock.run.legacy import LegacySchedule
from penstock.run.program import Program, Setting
from penstock.run.record import Recorder, Recording
from penstock.run.rng import MicrobatchRng
from penstock.run.runner import Runner
from penstock.run.stage_run import StepInputs
from penstock.run.ties import Ties, declared
from penstock.schedules import get_schedule
from penstock.stage.loss import OwnLoss
from penstock.stage.stage import PipelineStage, place_in

TRAIN, FORWARD = 0, 1


class Schedule(LegacySchedule):
    """Stages and a plan, ready to train.

        schedule = Schedule.from_plan(load("plan.csv"), stages, loss_fn=loss_fn)
        schedule.step(batch, target=labels)

    Common parameters:

    `n_microbatches`     into how many microbatches a batch is cut.
    `loss_fn`            called as ``loss_fn(output, target, **loss_kwargs)`` for each microbatch on the last stage.
    `scale_grads`        True: each microbatch's loss counts by its share of the batch (1/n when it divides evenly), so a
                         loss that is a mean gives the gradient of the whole batch's mean. False: as it is (sums).
    `args_chunk_spec`, `kwargs_chunk_spec`, `target_chunk_spec`, `output_merge_spec`  see `penstock.batch`.
    `rng`                "per-microbatch": random numbers keyed by `seed`, stage, microbatch and step.
    `dynamic`            True: shapes may change from step to step for reasons other than the input's shape.
    `ties`               parameters that several hand-made stages share: ``[tie([(0, "embed.weight"), (3, "head.weight")])]``;
                         the same on every rank. A captured model brings its own.
    """

    recipe: ClassVar[str | None] = None  # the name of the schedule in penstock.schedules

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        target_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        plan: Plan | None = None,
        receives: ReceivePolicy | None = None,
        rng: Literal["per-microbatch"] | None = None,
        seed: int = 0,
        dynamic: bool = False,
        ties: Iterable[Any] = (),
    ) -> None:
        if not stages:
            raise StageError("a schedule without stages; expected the stages of this rank")
        if n_microbatches < 1:
            raise PlanError(f"n_microbatches={n_microbatches}; expected at least 1 of the microbatches")
        self._stages = sorted(stages, key=lambda stage: getattr(stage, "stage_index", 0))
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn or _own_loss(self._stages[0])
        self._args_chunk_spec, self._kwargs_chunk_spec = args_chunk_spec, kwargs_chunk_spec
        self._target_chunk_spec, self._output_merge_spec = target_chunk_spec, output_merge_spec
        self.scale_grads = scale_grads
        self.rank, self.pp_group_size = stages[0].group_rank, stages[0].group_size
        self._num_stages = stages[0].num_stages
        self._given_plan = plan
        self._receives = receives
        self._rng = MicrobatchRng(seed) if rng == "per-microbatch" else None
        self._dynamic = dynamic
        self._tied = [getattr(tie, "holders", tie) for tie in ties]
        self._ties: Ties | None = None
        self._custom: dict[Any, CustomFunction] = {}
        self._programs: dict[int, Program] = {}
        self._plan: Plan | None = None
        self._runner: Runner | None = None
        self._steps = 0
        self._init_legacy()
        self._tell_stages()

    @classmethod
    def from_plan(
        cls, plan: Plan | str | PathLike[str], stages: PipelineStage | Sequence[PipelineStage], **options: Any
    ) -> Self:
        """A schedule that runs this plan, or plan file, compute-only or lowered. Options as in the constructor."""
        if not isinstance(plan, Plan):
            plan = load(plan)
        many = [stages] if isinstance(stages, PipelineStage) else list(stages)
        made = cls.__new__(cls)
        Schedule.__init__(made, many, plan.num_microbatches, plan=plan, **options)
        return made

    # -- the plan

    @property
    def plan(self) -> Plan:
        """What is computed, and in which order. `lowered_plan` is what is run."""
        if self._plan is None:
            self._plan = self._place(self.make_plan())
        return self._plan

    def make_plan(self) -> Plan:
        """The plan of compute actions; a subclass may build its own."""
        ordered = self._order_plan()
        if ordered is not None:
            return ordered
        if self._given_plan is not None:
            return self._given_plan
        if self.recipe is None:
            raise PlanError(
                f"{type(self).__name__} has no plan; use Schedule.from_plan(plan, stages), or override make_plan"
            )
        recipe = get_schedule(self.recipe)
        per_rank, rest = divmod(self._num_stages, self.pp_group_size)
        if rest:
            raise PlanError(
                f"{self._num_stages} stages over {self.pp_group_size} ranks; {self.recipe} needs the same number on every rank"
            )
        return recipe(self.pp_group_size, self._n_microbatches, stages_per_rank=per_rank)

    def _place(self, plan: Plan) -> Plan:
        """The plan for the graph of these stages, checked against where they are."""
        routes = getattr(self._stages[0], "routes", None)
        if routes is not None:
            plan = plan.with_graph(StageGraph.of(plan.num_stages, routes.edges))
        if plan.num_stages != self._num_stages or plan.num_ranks != self.pp_group_size:
            raise PlanError(
                f"the plan is for {plan.num_stages} stages on {plan.num_ranks} ranks, but there are {self._num_stages} stages "
                f"on {self.pp_group_size} ranks"
            )
        here = tuple(sorted(stage.stage_index for stage in self._stages))
        if here != plan.placement.stages_of(self.rank):
            raise PlanError(
                f"rank {self.rank} holds stages {list(here)}, but {plan.name or 'the plan'} places "
                f"{list(plan.placement.stages_of(self.rank))} there; make the stages for those"
            )
        return plan

    @property
    def placement(self) -> Placement:
        return self.plan.placement

    def lowered_plan(self, *, forward_only: bool = False) -> Plan:
        """The very plan that is run, messages and all."""
        return self._program(FORWARD if forward_only else TRAIN).plan

    def _lower(self, mode: int, adapters: Mapping[int, Any]) -> Plan:
        plan = self.plan if mode == TRAIN else self.plan.forward_only()
        shards = any(adapter.sharded for adapter in adapters.values()) and not plan.has(Op.UNSHARD)
        reduce = (
            mode == TRAIN and any(adapter.reduces for adapter in adapters.values()) and not plan.has(Op.REDUCE_GRAD)
        )
        if plan.is_lowered:
            plan = add_unshard_reshard(plan) if shards else plan
            return add_reduce_grad(plan) if reduce else plan
        default: ReceivePolicy = Early() if mode == TRAIN else Ahead(2)
        return lower(plan, receives=self._receives or default, shards=shards, reduce=reduce)

    def _program(self, mode: int) -> Program:
        program = self._programs.get(mode)
        if program is None:
            adapters = {stage.stage_index: adapt(stage.submod) for stage in self._stages}
            plan = self._lower(mode, adapters)
            check(plan)
            try:
                check(plan, sends="blocking")
                reap = True
            except DeadlockError:
                reap = False  # it runs, since sends are asynchronous; only nothing may wait for one before the end
            setting = Setting(
                plan, grad=mode == TRAIN, reap=reap, adapters=adapters, custom=self._custom, rng=self._rng
            )
            program = Program(setting, self._stages, self._transport, context=partial(ActionContext, self))
            self._programs[mode] = program
        return program

    def _current(self, mode: int) -> Program:
        """The program, for the modules that the stages hold now; what is known of messages stays."""
        program = self._program(mode)
        if any(run.module is not run.stage.submod for run in program.runs.values()):
            del self._programs[mode]
            program, old = self._program(mode), program
            program.saved = old.saved
        return program

    def _ask_everybody(self, answer: bytes) -> Sequence[bytes]:
        return self._transport.gather("how the stages are driven", answer)

    @cached_property
    def _transport(self) -> Transport:
        return transport_of(self._stages[0].group, self._stages[0].device)

    def _connect(self, mode: int | None = None) -> Runner:
        """Before the first step: find out whether all ranks are about to run the same, and can."""
        if self._runner is None:
            problem: Exception | None = None
            facts: dict[str, str] = {}
            try:
                self._ties = self._shared()
                facts = self._facts()
                self._program(self._mode if mode is None else mode)
            except Exception as error:  # noqa: BLE001  the other ranks wait for this one, and must hear of it
                problem = error
            facts["can run it"] = "yes" if problem is None else f"{type(problem).__name__}: {problem}"
            try:
                self._transport.agree("the first step of a schedule", facts)
            except RanksDisagree:
                if problem is None:
                    raise
            if problem is not None:
                self._programs.clear()
                raise problem
            assert self._ties is not None, "made above"
            self._ties.meet()
            self._transport.connect(self._program(self._mode if mode is None else mode).channels)
            self._runner = Runner(self._transport, dynamic=self._dynamic)
        return self._runner

    def _facts(self) -> dict[str, str]:
        """What must be the same on every rank."""
        routes = getattr(self._stages[0], "routes", None)
        return {
            "schedule": self.plan.name or type(self).__name__,
            "plan": hashlib.sha256(dumps(self.plan).encode()).hexdigest()[:16],
            "microbatches": str(self._n_microbatches),
            "wires": "those of a chain" if routes is None else routes.wires,
            "placement": str(self.plan.placement.ranks),
            "loss": "with loss" if self._loss_fn is not None else "without loss",
            "tied parameters": ", ".join(group.name for group in self._ties.known) if self._ties else "",
            "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "penstock": __version__,
            "torch": torch.__version__,
        }

    @property
    def _mode(self) -> int:
        """What `step` does."""
        return TRAIN if self._has_backward and self.plan.has_backward else FORWARD

    def register_custom_function(
        self, computation_type: Op | type[Overlap] | ComputationType, custom_function: Callable[..., object]
    ) -> None:
        """Do actions of a kind with a function of your own: ``function(action, context)``. Before the first step.

        A kind in torch's words (`ComputationType`) gets torch's kind of function, which drives the stages itself.
        """
        if isinstance(computation_type, ComputationType):
            self.register_hand_function(computation_type, custom_function)
            return
        if self._programs:
            raise RunError("register_custom_function after the first step; the plan is bound by then. Call it before")
        self._custom[computation_type] = custom_function

    # -- steps

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One training step over a whole batch: cut into microbatches, forward and backward; gradients add up in `.grad`.

        Every rank calls it. The rank of the first stage gives the model's arguments, that of the last stage `target`;
        giving them everywhere is fine. Keyword arguments go to the stages of this rank that take them. `losses`, a
        list, is filled with each microbatch's loss on the last stage's rank; the merged outputs are returned there.

        Without a `loss_fn` there is nothing to differentiate, and the step is an evaluation.
        """
        if self._goes_by_hand(self._ask_everybody):
            return self._run_by_hand(
                args, kwargs, target=target, losses=losses, keep=return_outputs, loss_kwargs=loss_kwargs
            )
        return self._run(None, args, kwargs, target=target, losses=losses, keep=return_outputs, loss_kwargs=loss_kwargs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The same forward only, without gradients; any batch size. Modules stay in the mode that they are in."""
        if self._goes_by_hand(self._ask_everybody):
            return self._run_by_hand(
                args, kwargs, target=target, losses=losses, keep=return_outputs, loss_kwargs=loss_kwargs, backward=False
            )
        return self._run(
            FORWARD, args, kwargs, target=target, losses=losses, keep=return_outputs, loss_kwargs=loss_kwargs
        )

    def _run(
        self,
        mode: int | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        target: Any,
        losses: list[Tensor] | None,
        keep: bool,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> Any:
        runner = self._connect(mode)
        mode = self._mode if mode is None else mode
        grad_enabled = torch.is_grad_enabled()

        if self._rng is not None:
            self._rng.step = self._steps
        program = self._current(mode)
        adapters = program.setting.adapters.values()
        ties = self._ties if mode == TRAIN else None

        def prepare() -> tuple[StepInputs, Any]:
            """What can go wrong here goes wrong before anything is sent, and the other ranks hear of it."""
            if mode == TRAIN and not grad_enabled:
                raise RunError("step() under torch.no_grad(): nothing could be differentiated. Call eval() instead")
            for adapter in adapters:
                adapter.begin()
            if ties is not None:
                ties.begin()
            return self._prepare(mode, args, kwargs, target=target, keep=keep, loss_kwargs=loss_kwargs)

        self._forget_chunks()
        failed = True
        try:
            outcome = runner.step(self._program, mode, prepare)
            failed = False
        finally:
            if failed and ties is not None:
                ties.restore()
            for adapter in adapters:
                adapter.end(failed=failed)
        if ties is not None:
            ties.finish()
        self._steps += mode == TRAIN
        if losses is not None and self._has_last:
            losses[:] = outcome.losses
        if not keep or not self._has_last:
            return None
        merged = merge_chunks(outcome.outputs, self._output_merge_spec)
        self._keep_chunks(outcome.outputs, merged)
        return merged

    def _shared(self) -> Ties:
        """The parameters that several stages hold."""
        routes = getattr(self._stages[0], "routes", None)
        found = [*self._tied, *(declared(self._stages) if routes is None else routes.ties)]
        groups = list(dict.fromkeys(tuple(map(tuple, holders)) for holders in found))
        stages = {stage.stage_index: stage for stage in self._stages}
        return Ties(groups, stages, self.plan.placement, self._transport)

    @property
    def _has_first(self) -> bool:
        return any(stage.is_first for stage in self._stages)

    @property
    def _has_last(self) -> bool:
        return any(stage.is_last for stage in self._stages)

    def _prepare(
        self,
        mode: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        target: Any,
        keep: bool,
        loss_kwargs: Mapping[str, Any] | None,
    ) -> tuple[StepInputs, Any]:
        """Cut what this rank's stages read into microbatches, and say what tells this shape of input from others."""
        inputs = StepInputs(loss_kwargs=loss_kwargs or {}, keep_outputs=keep, loss_fn=self._loss_fn)
        size = self._n_microbatches
        captured = self._stages[0].routes is not None
        if self._has_first and not args and not kwargs:
            raise RunError(
                "rank of the first stage: step() without arguments; expected the model's input, step(x, ...)"
            )
        if args or kwargs:
            given = args if self._has_first or captured else ()
            inputs.args, inputs.kwargs = split_batch(
                given or args, kwargs, size, args_spec=self._args_chunk_spec, kwargs_spec=self._row_specs(args, kwargs)
            )
        if self._has_last and self._loss_fn is not None:
            if isinstance(self._loss_fn, OwnLoss):
                inputs.targets = [None] * size
            elif target is not None:
                inputs.targets = split_target(target, size, target_spec=self._target_chunk_spec)
            elif mode == TRAIN:
                raise RunError(
                    "rank of the last stage: there is a loss_fn and no target; write step(..., target=labels)"
                )
            inputs.weights = self._weights(inputs)
        return inputs, (shapes_of(args, kwargs), self._program(mode).frozen()) if self._has_first else None

    def _weights(self, inputs: StepInputs) -> list[float] | None:
        """What the loss of each microbatch is multiplied by before its backward; None: nothing. May be overridden."""
        return shares(inputs, self._n_microbatches) if self.scale_grads else None

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Measure the steps inside; afterwards `recording.timeline` is that of the last one, of all ranks.

        with schedule.record() as recording:
            schedule.step(batch, target=labels)
        print(recording.timeline.bubble_makespan)
        """
        runner = self._connect()
        recorder = Recorder(runner.transport)
        runner.recorder = recorder
        recording = Recording()
        try:
            yield recording
        finally:
            runner.recorder = None
        recording.finish(recorder, runner.transport)


def _own_loss(stage: PipelineStage) -> OwnLoss | None:
    """A captured model that returns its own loss needs no loss_fn."""
    routes = getattr(stage, "routes", None)
    return OwnLoss(routes.loss_of) if routes is not None and routes.has_loss else None


def transport_of(group: Any, device: torch.device) -> Transport:
    """The transport of a stage's group: one that was handed over, the process group's, or one rank alone."""
    if isinstance(group, Transport):
        return group
    if place_in(group)[1] == 1:
        return LocalWorld(1).transports[0]
    return DistributedTransport.of(group, device=device)
