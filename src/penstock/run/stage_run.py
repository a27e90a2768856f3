"""StageRun: one stage at work: its forward and its backward, microbatch by microbatch, between its boxes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from torch import Tensor

from penstock.backward.compile_ahead import is_left_over
from penstock.backward.compile_stage import CompiledStage
from penstock.backward.engine_protocol import BackwardEngine, MicrobatchPass, Output, Run, Seeds
from penstock.backward.engines import Engines
from penstock.backward.full import FullEngine, ManualEngine
from penstock.backward.module_state import ModuleState
from penstock.backward.offload import Offloaded
from penstock.backward.offload_targets import HostMemory
from penstock.backward.recompute import Recomputed
from penstock.backward.split import SplitEngine
from penstock.batch.batch import NO_BATCH, Batch, Weights
from penstock.errors import StageError
from penstock.nest import Value, tensors_in
from penstock.parallel import unwrap
from penstock.plan import Op
from penstock.run.boxes import Inbox, Outbox
from penstock.run.call_arguments import CallArguments, check_given
from penstock.run.last_stage import LastStage
from penstock.run.setting import Setting
from penstock.stage.backward import Deferral, can_split
from penstock.stage.boundary import Spec, flatten
from penstock.stage.buffers import buffer_tables, copied_out
from penstock.stage.pipeline_stage import PipelineStage

_log = logging.getLogger("penstock")


class StageRun:
    """One stage of this rank, in one mode: training, with an engine for each microbatch, or forward only."""

    returned: Callable[[int, tuple[Value, ...], Value], None] | None = None  # called with what the module returned

    def __init__(
        self,
        stage: PipelineStage,
        setting: Setting,
        *,
        inboxes: Sequence[Inbox],
        outboxes: Sequence[Outbox],
        chosen: Sequence[tuple[Op, int | None]],  # its actions I, R and O, and their microbatches
    ) -> None:
        num_microbatches, grad, rng = setting.plan.num_microbatches, setting.grad, setting.rng
        self.stage = stage
        self.module = stage.submod
        self.inboxes = inboxes
        self.outboxes = outboxes
        self.grad = grad
        self.rng = rng
        self.inputs = NO_BATCH
        self.number = 0  # of the training step, by which random numbers are keyed
        self.local = [inbox for inbox in inboxes if inbox.channel is None]  # from stages of this rank
        # Without what data parallelism has put around it, unless that is what is compiled.
        self.inner = unwrap(self.module) if self.module._compiled_call_impl is None else self.module
        self.split = frozenset(m for op, m in chosen if op is Op.I and grad and stage.dw_builder is None)
        deferral = Deferral(self.inner) if self.split else None
        self.splitting = None if deferral is None else SplitEngine(deferral)
        parts = CompiledStage(self.inner, deferral)
        self.compiled = parts or None  # what torch.compile has compiled
        self.engines = self._engines(setting).select(chosen, num_microbatches) if grad else []
        self.stepped = [
            engine for engine in set(self.engines) if type(engine) is not FullEngine
        ]  # do something around steps
        self.passes: list[MicrobatchPass | None] = [None] * num_microbatches
        self.last = LastStage(num_microbatches, grad=grad) if stage.is_last else None
        self.given = CallArguments(stage, inboxes, num_microbatches)
        self.given.eager = not parts
        # In the first step the module gets copies, which show whether it changes its inputs in place. For what is compiled
        # they would count as other inputs: there the first forward shows it by an error.
        self.given.copies = self.looking = grad and bool(inboxes) and not parts
        self.tries = grad and bool(inboxes) and not self.looking
        self.changes: bool | None = None  # whether a forward of the first step has changed its input in place
        self.arguments = self.given.of
        self.checks_input = False  # only in cold steps
        self.rehearsed = False  # whether it was run without data in this step
        self.buffers = buffer_tables(self.module)
        if self.splitting is not None and not can_split(self.module):
            warnings.warn(
                f"stage {stage.stage_index} is scripted: its backward cannot be taken apart, so the input slot does all of "
                "it and the weight slot what is left. The gradients are right; the bubble is that of a full backward",
                stacklevel=2,
            )

    def _engines(self, setting: Setting) -> Engines:
        """How engines of this stage are made."""
        stage, module = self.stage, self.module
        state = ModuleState(module, device=stage.device, keyed=self.rng is not None)
        target = setting.elsewhere or HostMemory()

        def full() -> BackwardEngine:
            if stage.dw_builder is not None:
                return ManualEngine(stage.dw_builder)
            return FullEngine()

        return Engines(
            full=full,
            split=lambda: self.splitting or full(),
            recomputed=lambda inner: Recomputed(inner, state, stage=stage.stage_index),
            offloaded=lambda inner: Offloaded(
                inner, module, target, lambda: (self.inputs.targets, self.inputs.loss_kwargs)
            ),
        )

    # -- the actions

    def forward(self, microbatch: int) -> None:
        """F."""
        args, kwargs = self.arguments(microbatch)
        if self.checks_input:
            check_given(self.stage, args, microbatch=microbatch, name="input_args")
        run = partial(self.call, microbatch)
        if self.compiled is not None:
            run = partial(self.call_compiled, microbatch)
        if self.tries:
            run = partial(self.call_trying, run, microbatch)
        given = [(one, one._version) for one in tensors_in((args, kwargs)) if one.requires_grad] if self.looking else []
        try:
            with nullcontext() if self.rng is None else self.rng.at(self.stage.stage_index, microbatch, self.number):
                if self.grad:
                    self.passes[microbatch], output = self.engines[microbatch].forward(run, args, kwargs)
                else:
                    output = run(args, kwargs)
        except RuntimeError as error:
            if self.given.copies or not self.inboxes or not _changes_a_leaf(error):
                raise
            # It may have drawn random numbers by then, and changed buffers and other inputs, of all of which there is no copy.
            self.given.copies = True
            raise StageError(
                f"stage {self.stage.stage_index} changes its input in place for microbatch {microbatch}, and did not in the "
                "first step; it may have changed more by then, so it is not run again. From the next step on it is given "
                "copies: call step again, or write x = x.clone() first in its forward"
            ) from error
        if self.looking:  # the first step shows whether forwards change their inputs in place
            self.changes = bool(self.changes) or any(one._version != version for one, version in given)
        for outbox, (tensors, spec) in zip(self.outboxes, output.messages, strict=True):
            outbox.keep(microbatch, tensors, spec)
        if not self.grad:
            for inbox in self.inboxes:
                inbox.read(microbatch)

    def call(self, microbatch: int, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Output:
        """The module, and on the last stage the loss."""
        if microbatch in self.split:
            value = self.splitting.call(self.module, args, kwargs)  # type: ignore[union-attr]  # there is one
        else:
            value = self.module(*args, **kwargs)
        if self.returned is not None:
            self.returned(microbatch, args, value)
        if self.rehearsed and is_left_over(value, (args, kwargs)):
            _log.warning(
                "stage %d gave NaN for microbatch %d, whose input has none. If it keeps something outside of its modules, in a "
                "global dictionary perhaps, that follows from an input: the run on placeholders, which finds shapes before "
                "stages are compiled, has left NaN there. Keep it in an attribute of a module",
                self.stage.stage_index,
                microbatch,
            )
        if self.buffers:
            value = copied_out(value, self.buffers)
        if self.stage.output_args is not None:
            check_given(self.stage, value, microbatch=microbatch, name="output_args")
        if self.last is not None:
            loss = self.last.finish(microbatch, value, self.inputs)
            if not self.inputs.keep_outputs:
                value = None
            if loss is None:
                return Output(value)
            return Output(value, (loss,))
        roots: list[Tensor] = []
        messages: list[tuple[list[Tensor], Spec]] = []
        for outbox in self.outboxes:
            part = value
            if outbox.select is not None:
                part = outbox.chosen(value)
            tensors, spec = flatten(part)
            roots += tensors
            messages.append((tensors, spec))
        return Output(None, roots, messages)

    def call_compiled(self, microbatch: int, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Output:
        """The same where torch.compile has compiled something."""
        assert self.compiled is not None, "asked before"
        split = microbatch in self.split
        with self.compiled.running(split=split):
            output = self.call(microbatch, args, kwargs)
        if split and self.compiled.looking:
            self.compiled.look(output.roots)
        return output

    def call_trying(self, run: Run, microbatch: int, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Output:
        """The first forward of a compiled stage: if it changes its input in place, it is run again with copies."""
        state = ModuleState(self.module, device=self.stage.device)
        state.begin_step(self.inputs.loss_fn)
        before = state.snapshot()
        self.tries = False
        try:
            return run(args, kwargs)
        except RuntimeError as error:
            if self.given.copies or not _changes_a_leaf(error):
                raise
        self.given.copies = True
        before.put_back()
        return run(*self.arguments(microbatch))

    def recompute(self, microbatch: int) -> None:
        """R."""
        args, kwargs = self.arguments(microbatch)
        with nullcontext() if self.rng is None else self.rng.at(self.stage.stage_index, microbatch, self.number):
            self.of(microbatch).recompute(args, kwargs)

    def offload(self, microbatch: int) -> None:
        """O."""
        self.of(microbatch).offload()

    def load(self, microbatch: int) -> None:
        """L."""
        self.of(microbatch).load()

    def backward(self, microbatch: int) -> None:
        """B."""
        found, self.passes[microbatch] = self.passes[microbatch], None
        assert found is not None, "the check has found its F"
        found.backward(self.seeds(microbatch))
        for inbox in self.local:
            inbox.read(microbatch)

    def backward_input(self, microbatch: int) -> None:
        """I."""
        seeds = self.seeds(microbatch)
        with nullcontext() if self.compiled is None else self.compiled.running(split=True):
            self.of(microbatch).backward_input(seeds)
        for inbox in self.local:
            inbox.read(microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        found, self.passes[microbatch] = self.passes[microbatch], None
        assert found is not None, "the check has found its I"
        found.backward_weight()

    def of(self, microbatch: int) -> MicrobatchPass:
        """Return the pass of a microbatch whose forward has run."""
        found = self.passes[microbatch]
        if found is None:
            raise StageError(f"stage {self.stage.stage_index} has run no forward of microbatch {microbatch}")
        return found

    def seeds(self, microbatch: int) -> Seeds:
        """Return the gradients from which the backward starts: those of sent tensors, or that of the loss."""
        seeds: list[tuple[int, Tensor]] = []
        if self.last is not None and (grad := self.last.seed(microbatch)) is not None:
            seeds.append((0, grad))
        place = 0
        for outbox in self.outboxes:
            for grad in outbox.gradients(microbatch):
                if grad is not None:
                    seeds.append((place, grad))
                place += 1
        return seeds

    # -- around a step

    def begin(self, inputs: Batch, number: int, *, uneven: bool) -> None:
        """`uneven`: input and target of the batch have different numbers of rows."""
        self.inputs, self.number = inputs, number
        self.given.begin(inputs)
        if self.last is not None:
            self.last.begin(inputs, uneven=uneven)
        for engine in self.stepped:
            engine.begin_step(inputs.loss_fn)
        if self.compiled is not None:
            self.compiled.begin_step()

    def results(self) -> tuple[list[Tensor], list[Value], Weights | None]:
        """Return losses and outputs of the step by microbatch, and the shares of the losses."""
        return ([], [], None) if self.last is None else self.last.results(self.inputs)

    def left_over(self) -> list[str]:
        index = self.stage.stage_index
        found = [f"the backward of stage {index}, microbatch {m}" for m, one in enumerate(self.passes) if one]
        if self.last is not None:
            found += [f"loss of microbatch {m}" for m, shape in enumerate(self.last.shapes) if shape is not None]
        return found

    def clear(self) -> None:
        """After a step, or a part of one."""
        if self.looking and self.changes is not None and all(one is None for one in self.passes):
            self.given.copies, self.looking = self.changes, False
        self.passes[:] = [None] * len(self.passes)
        if self.last is not None:
            self.last.clear()
        self.inputs = NO_BATCH
        self.rehearsed = False
        self.given.begin(self.inputs)
        if self.compiled is not None:
            self.compiled.end_step(len(self.split))
        for engine in self.stepped:
            engine.end_step()


def _changes_a_leaf(error: RuntimeError) -> bool:
    """Whether autograd refuses to have an input changed in place."""
    return "leaf Variable that requires grad" in str(error)
