"""Pipeline: one call that captures, profiles, balances, places, checks and connects; then `step`, the same on every rank."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Unpack

from torch import Tensor, nn
from torch.distributed.checkpoint.staging import AsyncStager

from penstock.balance import Profile
from penstock.batch.batch import Batch
from penstock.batch.policy import RowPolicy
from penstock.capture import Pipe
from penstock.checkpoint.lineage import Lineage
from penstock.checks import check_types
from penstock.errors import PenstockError, RunError, StageError
from penstock.front import norm
from penstock.front.build import assemble, cut
from penstock.front.choice import Built, Choice
from penstock.front.companions import Companions, RandomNumbers
from penstock.front.dimensions import whole_loss
from penstock.front.evaluate import count_of_evaluation
from penstock.front.loading import load_into, take_weights
from penstock.front.loss_weights import LossWeights
from penstock.front.memory_view import Memory, MemoryKeeper
from penstock.front.names import stage_tensors
from penstock.front.option_types import PipelineOptions
from penstock.front.own_stages import OwnStages, one_call
from penstock.front.pipeline_options import Request, check_named, sorted_options
from penstock.front.publish import Origin
from penstock.front.replan import Replanner, calibrated, check_rounds, recut
from penstock.front.saving import Saving, prepare, save
from penstock.front.sharing import Sharing, parameters_of
from penstock.front.spread import Result, Telling, Where, check_where, deliver
from penstock.nest import Value
from penstock.observe.garbage import Garbage
from penstock.observe.live_memory import MemoryWatch
from penstock.observe.recording import Recording
from penstock.plan import Plan
from penstock.run.checksums import Comparison
from penstock.run.compiled_costs import compiled_costs
from penstock.run.lookout import Lookout
from penstock.run.runner import Outcome
from penstock.run.schedule import Schedule
from penstock.schedules import Recipe
from penstock.simulate import Costs, Timeline
from penstock.stage.dtensors import whole_tensor


class Pipeline(OwnStages):
    """A model in stages over all ranks, ready to train.

        pipe = penstock.Pipeline(model, example=(tokens,), loss_fn=loss, schedule="auto", microbatches=8)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for tokens, labels in loader:
            result = pipe.step(tokens, target=labels)
            pipe.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()
            print(result.loss)

    Every rank makes the same call with the same model. In a process without torch.distributed there is one rank.

    `example`        what `step` will be called with: a tuple of a batch's arguments; sizes count, values hardly.
    `loss_fn`        ``loss_fn(output, target)``; a model that returns its own loss (`labels=`) needs none.
    `schedule`       "auto": the fastest by simulation with measured costs; "search": one made for these costs, if that is
                     faster; or a name, a recipe, a plan.
    `microbatches`   into how many a batch is cut.

    The other options are in four groups, whose fields say what each is (docs/guides/options.md has the table):

    - of the model: `example_kwargs`, `example_target`, `weights`, `init`;
    - of the cut: `stages` (a number, or the `PipelineStage`s of this rank), `num_stages`, `placement`, `memory_limit`,
      `optimizer`, `optimizer_bytes`, `profile`, `split_spec`, `split_policy`, `dynamic_shapes`, `output_loss_value_spec`,
      `multi_use_param_spec`, `compile`;
    - of the ranks: `group`, `mesh`, `parallelize`, `data_parallel`, `device`;
    - of the steps: `loss_scale`, `loss_weight`, `share_loss`, `run_folder`, `group_rows`, `replan`,
      `collect_every`, and those of a `Schedule`:
      `scale_grads`, `seed`, `rng`, `recompute`, `offload`, `offload_to`, `ties`, `dynamic`, `receives`,
      `args_chunk_spec`, `kwargs_chunk_spec`, `target_chunk_spec`, `output_merge_spec`.
    """

    schedule: Schedule  # the one beneath: `schedule.record()`, `schedule.lowered_plan()`, ...

    def __init__(
        self,
        model: nn.Module | None = None,
        example: Sequence[Value] = (),
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        schedule: str | Plan | Recipe = "auto",
        microbatches: int = 8,
        **options: Unpack[PipelineOptions],
    ) -> None:
        of_model, of_cut, of_ranks, of_steps = sorted_options(options)
        check_named(example, loss_fn, schedule, microbatches)
        # Without the model, whose memory is the user's.
        request = Request(nn.Module(), tuple(example), loss_fn, schedule, microbatches, of_model, of_cut, of_steps)
        given = parameters_of(not of_cut.made and model)
        built, ends = assemble(model, request, of_ranks)
        super().__init__(built, ends, Origin() if model is None or of_cut.made else Origin.of(model), of_steps.ties)
        self._request = replace(request, of_model=replace(of_model, weights=None))
        self._of_steps = of_steps
        self._policy = self._make_policy()
        self.schedule = Schedule.from_plan(
            self._built.plan,
            self._built.stages,
            **of_steps.of_schedule(whole_loss(loss_fn, of_ranks.parallelize, captured=not of_cut.made)),
            policy=self._policy,
            transport=ends.transport,  # one rank alone would get one of its own: two calls could not see each other
            observers=[Garbage(of_steps.collect_every)] if of_steps.collect_every is not None else [],
            copies_batch=True,
            comparison=Comparison(),
            scope=_implicit_replication if ends.beside else nullcontext,
        )
        self._telling = Telling(self._ends, self._built.plan.placement)
        if of_steps.run_folder is not None:
            self._look_out(Path(of_steps.run_folder))
        modules = [stage.submod for stage in self._built.stages]
        state = of_cut.optimizer_bytes if self._built.choice is None else self._built.choice.optimizer_bytes
        self._memory = MemoryKeeper(modules, self._ends, of_cut.memory_limit, state)
        known = Costs.unit(self.plan) if self._built.choice is None else self._built.choice.costs
        self._replanner = None if of_steps.replan is None else Replanner(of_steps.replan, known)
        self._saving: Saving | None = None  # a checkpoint that is being written
        self._lineage = Lineage.new()  # of the last checkpoint
        if of_cut.made and of_model.weights is not None:
            take_weights(self.tensors, self._ends, of_model.weights)
        own = stage_tensors(self._built, self._ends, self._ties, self._prefixes)
        self._sharing = Sharing(given, own.all_parameters(), self.transport)

    @property
    def plan(self) -> Plan:
        return self.schedule.plan

    # -- steps

    def step(
        self,
        *args: Value,
        target: Value = None,
        outputs: Where = None,
        loss_kwargs: Mapping[str, Value] | None = None,
        loss_factor: float = 1.0,
        **kwargs: Value,
    ) -> Result:
        """One training step over a batch; gradients add up in `.grad`. The same call on every rank.

        `outputs` says where the model's outputs are wanted: "last" (the rank of the last stage), "all", or a rank.
        `loss_factor` multiplies the loss before the backward, and not the loss that is reported: 1/4 in each of four steps
        whose gradients are accumulated.
        """
        with self.transport.called("step()"):
            problem = self._refusal("step", outputs, target, loss_kwargs, loss_factor)
            schedule, keep = self.schedule, outputs is not None
            factor = loss_factor if problem is None else 1.0
            batch = schedule.prepare(
                args, kwargs, target, loss_kwargs=loss_kwargs, keep_outputs=keep, loss_factor=factor
            )
            with self._watched(batch, (args, kwargs)):
                outcome = schedule.run(batch if problem is None else replace(batch, error=problem))
            self._tidy_up()
            return self._result(outcome, batch, schedule.merge(outcome, batch), outputs)

    @one_call
    def evaluate(
        self,
        *args: object,
        target: object = None,
        outputs: Where = None,
        loss_kwargs: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> Result:
        """The loss of a batch, without gradients and in evaluation mode; any batch size.

        loss = pipe.evaluate(tokens, target=labels).loss
        """
        problem = self._refusal("evaluate", outputs, target, loss_kwargs)
        options = {"target": target, "loss_kwargs": loss_kwargs, "keep_outputs": outputs is not None}
        return self._result(*self._evaluated(args, kwargs, problem, options), outputs)

    @one_call
    def predict(self, *args: Value, outputs: Where = "all", **kwargs: Value) -> Value:
        """The model's output for a batch, in evaluation mode, on every rank (or where `outputs` says).

        scores = pipe.predict(tokens)
        """
        problem = self._refusal("predict", outputs, None, None)
        _, _, value = self._evaluated(args, kwargs, problem, {"keep_outputs": outputs is not None})
        return deliver(self._ends, value, outputs, last=self._last_rank)

    def record(self) -> AbstractContextManager[Recording]:
        """Measure the steps inside; afterwards `recording.timeline` is that of the last one."""
        return self.schedule.record()

    @one_call
    def calibrate(self, *args: Value, target: Value = None, rounds: int = 12, **kwargs: Value) -> Choice:
        """Measure what the stages cost while all ranks are at work, with a few steps over a batch; all ranks call it.

            pipe.calibrate(tokens, target=labels)
            print(pipe.choice.predicted)

        From then on `timeline`, `choice` and `explain` go by these costs. Gradients, buffers and random numbers are afterwards
        what they were; an optimizer that works inside the backward is not held back.
        """
        known = self._chosen("calibrate() on stages made by hand: nothing is predicted of them; pass a model instead")
        self._ends.ready("calibrate()", partial(check_rounds, rounds), lambda: {"rounds": rounds})
        replanner, self._replanner = self._replanner, None  # these steps are none of its own
        try:
            call = partial(self.step, *args, target=target, **kwargs)
            choice = calibrated(known, self.schedule, self._ends, call, rounds=rounds)
        finally:
            self._replanner = replanner
        self._built = replace(self._built, choice=choice)
        return choice

    @one_call
    def recut(self, timelines: Sequence[Timeline], *, gain: float = 0.05) -> Profile | None:
        """What to cut the model by from now on, if a rank has become slower than the others: all ranks call it.

            profile = pipe.recut(timelines)                   # of pipe.record(), a few steps far apart
            if profile is not None:
                pipe.save("run/checkpoint", optimizer=optimizer)
                pipe = Pipeline(model, (tokens,), profile=profile, ...)
                optimizer = ...
                pipe.load("run/checkpoint", optimizer=optimizer)

        None: no other cut would make a step shorter by that share. The losses go on as they would have. `penstock train --recut`
        does this at its checkpoints.
        """
        known = self._chosen("recut() on stages made by hand: penstock does not know what they are cut from")
        return recut(known, timelines, self._ends, gain=gain)

    @contextmanager
    def watch_memory(self) -> Iterator[MemoryWatch]:
        """Count the bytes that the steps inside hold, action by action; `memory()` then has those of the last one.

        with pipe.watch_memory():
            pipe.step(tokens, target=labels)
        print(pipe.memory())
        """
        with self.schedule.watch_memory() as watch:
            yield watch
        self._memory.keep(watch)

    @one_call
    def memory(self) -> Memory:
        """What each rank holds, planned and measured, in bytes, and what it consists of. All ranks call it.

        print(pipe.memory())
        """
        choice = self._built.choice
        if choice is not None:
            choice = replace(choice, calibrated=compiled_costs(self.schedule, choice.costs))
        return self._memory.value(self.schedule.lowered_plan(), choice)

    @one_call
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> float:
        """Scale the gradients of all stages so that their common norm is at most `max_norm`; the norm before comes back.

        Each parameter counts once, however many stages and replicas hold it: the norm is that of the unsplit model.
        """

        def look() -> norm.Local:
            check_types("clip_grad_norm_", RunError, error_if_nonfinite=(error_if_nonfinite, bool | int))
            counted = [p.grad for _, p in self.tensors.counted() if p.grad is not None]
            return norm.local_norm(counted, max_norm, norm_type, self._ends.device)

        def given() -> dict[str, object]:
            return {"max_norm": float(max_norm), "norm_type": float(norm_type), "strict": bool(error_if_nonfinite)}

        local = self._ends.ready("clip_grad_norm_()", look, given)
        total = norm.total_norm(local, self._ends, scaler=self._of_steps.loss_scale)
        if error_if_nonfinite and not total < float("inf"):
            raise RunError(f"the norm of the gradients is {total}; look for overflow, or pass error_if_nonfinite=False")
        norm.shrink(self._gradients(), max_norm / (total + 1e-6))
        return total

    # -- checkpoints

    @one_call
    def save(
        self,
        folder: str | Path,
        *,
        optimizer: object = None,
        scheduler: object = None,
        data: object = None,
        extra: Mapping[str, object] | None = None,
        keep: int = 1,
        wait: bool = True,
        stager: AsyncStager | None = None,
    ) -> Saving | None:
        """Write a checkpoint: all ranks call it. It is there whole, or the one before it still is.

            pipe.save("run/checkpoint", optimizer=optimizer, scheduler=scheduler, extra={"epoch": 3}, keep=3)

        `scheduler` and `data` have state_dict() and load_state_dict(); `extra` is anything that JSON can hold. `keep`
        checkpoints stay: the newest in `folder`, older ones beside it. With wait=False the writing goes on beside the
        next steps, and a `Saving` comes back; `stager`, one of torch.distributed.checkpoint's, then makes the copy.
        """
        began = time.perf_counter()

        def look() -> Path:
            check_types("save", RunError, extra=(extra, Mapping | None))
            check_types("save", RunError, folder=(folder, str | PathLike), keep=(keep, int), wait=(wait, bool | int))
            if wait and stager is not None:
                raise RunError("save(stager=...) with wait=True: nothing is copied then; write save(..., wait=False)")
            return Path(folder)

        folder = self._ends.ready("save()", look, lambda: {"wait": bool(wait)})
        companions = replace(self._companions(optimizer, scheduler, data), extra=extra or {})
        order = prepare(folder, self.tensors, self._ends, companions, keep=keep)
        self._lineage = self._lineage if order.claim is None else order.claim.lineage
        self._saving = None if wait else Saving(order, self._ends, began, stager)
        if wait:
            save(order, self._ends)
        return self._saving

    @one_call
    def load(
        self,
        folder: str | Path,
        *,
        optimizer: object = None,
        scheduler: object = None,
        data: object = None,
        or_older: bool = False,
    ) -> dict[str, Value]:
        """Read a checkpoint that any number of ranks and stages wrote; what `save` was given as `extra` comes back.

            extra = pipe.load("run/checkpoint", optimizer=optimizer, scheduler=scheduler)

        All ranks check what they need, agree on what it is, and only then change anything: if one cannot, all raise.
        With or_older=True the newest whole one of those that `keep` has left is taken, and a warning says so.
        """
        companions = self._companions(optimizer, scheduler, data)
        loaded, lineage = load_into(folder, self.tensors, self._ends, companions, or_older=or_older)
        self._sharing.renew()
        self._lineage = lineage.gone_on()
        self.schedule.steps = loaded.step
        return dict(loaded.extra)

    def whole(self, model: nn.Module) -> Pipe:
        """A model of the same kind cut at the same places, all stages in this process: to compare with."""
        check_types("whole", RunError, model=(model, nn.Module))
        known = self._chosen("stages made by hand: penstock does not know the whole model")
        return cut(replace(self._request, model=model), known)

    @one_call
    def run_plan(self, plan: Plan) -> None:
        """Go on under another plan for the same stages; all ranks call it, between two steps.

        pipe.run_plan(penstock.recompute(pipe.plan))
        """
        before = self.schedule.plan

        def change() -> Built:
            built = self._built.with_plan(plan, calibrated=None)
            self.schedule.run_plan(plan)  # if it does not fit the stages, all is as it was
            return built

        try:
            self._built = self._ends.ready("run_plan()", change)
        except PenstockError:
            if self.num_ranks > 1:  # it may fit on some: all go back, and meet again before the next step
                self.schedule.run_plan(before)
            raise

    # -- inside

    def _chosen(self, otherwise: str) -> Choice:
        if self._built.choice is None:
            raise StageError(otherwise)
        return self._built.choice

    def _companions(self, optimizer: Value, scheduler: object, data: object) -> Companions:
        """What goes through a checkpoint with the model, once the one before is written: that renames what is read or written."""
        if self._saving is not None and not self._saving.told:
            self._saving.wait()
        numbers = RandomNumbers(self._ends.device)
        made = Companions(numbers, optimizer, scheduler, data, self._of_steps.loss_scale, self.schedule.steps)
        return replace(made, lineage=self._lineage)

    def _look_out(self, folder: Path) -> None:
        """Write where this rank is into the folder of the run, as long as the pipeline lives."""

        def start() -> None:
            place = folder / f"replica-{self.replica}" if self.replica else folder
            weakref.finalize(self, Lookout(self.transport, place).close)

        self.ranks.together(f"writing to the folder of the run, {folder}", start)

    def _make_policy(self) -> RowPolicy:
        """How batches are split, weighed and merged; asked once, when the stages are made."""
        steps = self._of_steps
        weights = LossWeights(self._request.loss_fn, steps.loss_weight, by_dimension_0=steps.cuts_rows)
        return RowPolicy(
            steps.args_chunk_spec,
            steps.kwargs_chunk_spec,
            steps.target_chunk_spec,
            steps.output_merge_spec,
            mean=steps.scale_grads,
            fewer=steps.few_rows,
            group_by=steps.group_rows,
            weight_of=weights.shares,
            scaler=steps.loss_scale,
            gather=whole_tensor if self._ends.beside else None,
        )

    @contextmanager
    def _watched(self, batch: Batch, arguments: object) -> Iterator[None]:
        """Measure and count a step, where that is wanted; one of few rows says nothing of the plan."""
        with ExitStack() as watching:
            schedule = self.schedule
            if batch.count == schedule.num_microbatches:
                if self._replanner is not None:
                    watching.enter_context(self._replanner.around(schedule))
                watching.enter_context(self._memory.around(schedule, arguments, self._built.choice))
            yield

    def _tidy_up(self) -> None:
        """After a step, on all ranks alike: take note of another plan."""
        if self._replanner is not None and self._replanner.has_changed:
            plan = self.schedule.plan
            why = f"{plan.name or 'a plan'}: measured steps spoke for it"
            self._built = self._built.with_plan(plan, calibrated=self._replanner.costs, why=why)

    def _refusal(
        self, name: str, outputs: object, target: object, loss_kwargs: object, loss_factor: object = 1.0
    ) -> RunError | None:
        """What cannot be in this call. It is raised where the other ranks hear of it: they may have been given something else."""
        try:
            check_where(outputs, self.num_ranks)
            if not isinstance(loss_factor, int | float):
                raise RunError(f"loss_factor is a {type(loss_factor).__name__}; expected a number")
            if name != "predict":
                check_loss(self.schedule, name, target, loss_kwargs)
        except RunError as error:
            return error
        return self._sharing.refusal(f"{name}()")

    def _evaluated(
        self,
        args: tuple[Value, ...],
        kwargs: Mapping[str, Value],
        problem: RunError | None,
        options: Mapping[str, Value],
    ) -> tuple[Outcome, Batch, Value]:
        """Run a batch forward in evaluation mode; return its losses and its merged outputs."""
        schedule, count = self.schedule, count_of_evaluation(self._ends, self._policy, args, kwargs, problem)

        def evaluate() -> tuple[Outcome, Batch, Value]:
            batch = schedule.prepare(args, kwargs, train=False, count=count or schedule.num_microbatches, **options)
            outcome = schedule.run(batch)
            return outcome, batch, schedule.merge(outcome, batch)

        with self._evaluating():
            return self._ends.together("evaluate() or predict()", evaluate)

    def _result(self, outcome: Outcome, batch: Batch, value: object, outputs: Where) -> Result:
        """What the caller gets, once all ranks know the losses and whether gradients overflowed on any of them.

        They must all know of an overflow, or some ranks' scalers would step and some not.
        """
        scaled = batch.train and self._of_steps.loss_scale is not None
        overflow = norm.overflow(self._gradients(), self._ends.device) if scaled else None
        shares = self._of_steps.share_loss and batch.loss_fn is not None
        read, loss, overflown = self._telling.tell(outcome, batch, shares=shares, overflow=overflow)
        if overflown is not None:
            norm.spoil_if(overflown, self._gradients())
        return Result(read, deliver(self._ends, value, outputs, last=self._last_rank), loss)


def check_loss(schedule: Schedule, name: str, target: object, loss_kwargs: object) -> None:
    """Raise if the arguments of a call that computes a loss cannot be right."""
    if loss_kwargs is not None and not isinstance(loss_kwargs, Mapping):
        raise RunError(f"loss_kwargs is a {type(loss_kwargs).__name__}; expected a dictionary of arguments of the loss")
    if schedule.loss_fn is None and (target is not None or name == "step"):
        raise RunError(
            f"{name}() {'with a target ' if target is not None else ''}without a loss: nothing could be differentiated or "
            "reported. Give Pipeline(..., loss_fn=function), or call predict() for the outputs alone"
        )


def _implicit_replication() -> AbstractContextManager[object]:
    """Plain tensors that meet DTensors (a mask, a target) are the same on all ranks."""
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()
