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
from penstock.batch.batch import NO_BATCH, Batch, Weights
from penstock.errors import StageError
from penstock.nest import Value, tensors_in
from penstock.parallel import Unwrapped, unwrap
from penstock.plan import Op
from penstock.run.boxes import Inbox, Outbox
from penstock.run.call_arguments import CallArguments, check_given
from penstock.run.last_stage import LastStage
from penstock.run.setting import Setting
from penstock.stage.backward import (
    Deferral,
    ManualWeight,
    Pending,
    backward_input,
    backward_weight,
    can_split,
    run_deferred,
)
from penstock.stage.buffers import buffer_tables, copied_out, remember
from penstock.stage.elsewhere import HostMemory
from penstock.stage.engine import run_engine
from penstock.stage.offload import Saved, saving
from penstock.stage.pipeline_stage import PipelineStage
from penstock.stage.recompute import Repeats

_log = logging.getLogger("penstock")

ModuleCall = Callable[[int, tuple[Value, ...], dict[str, Value]], Value]
"""Calls the module for a microbatch, with its arguments."""


class StageRun:
    """One stage of this rank, in one mode: training with a full or a split backward, or forward only."""

    def __init__(
        self,
        stage: PipelineStage,
        setting: Setting,
        *,
        inboxes: Sequence[Inbox],
        outboxes: Sequence[Outbox],
        chosen: Sequence[tuple[Op, int | None]],  # its actions of these kinds, and their microbatches
    ) -> None:
        num_microbatches, grad, rng = setting.plan.num_microbatches, setting.grad, setting.rng
        split, repeated, moved = (frozenset(m for op, m in chosen if op is kind) for kind in (Op.I, Op.R, Op.O))
        self.stage = stage
        self.module = stage.submod
        self.inboxes = inboxes
        self.outboxes = outboxes
        self.grad = grad
        self.rng = rng
        self.split = split  # the microbatches whose backward comes in two parts
        self.inputs = NO_BATCH
        self.number = 0  # of the training step, by which random numbers are keyed
        self.alone: list[Inbox] = []
        self.manual = stage.dw_builder if grad else None
        # Without what data parallelism has put around it, unless that is what is compiled.
        self.inner = unwrap(self.module) if self.module._compiled_call_impl is None else self.module
        self.deferral = Deferral(self.inner) if split and self.manual is None else None
        parts = CompiledStage(self.inner, self.deferral)
        self.compiled = parts or None  # what torch.compile has compiled
        # What I leaves for W.
        self.pending: list[Pending | ManualWeight | None] = [None] * num_microbatches
        self.repeated = repeated  # the microbatches whose forward is run again before the backward
        self.repeats: Repeats | None = None
        if repeated:
            stops = self.manual is None and isinstance(setting.adapters.get(stage.stage_index), Unwrapped | None)
            self.repeats = Repeats(
                self.module, num_microbatches, device=stage.device, keyed=rng is not None, stops=stops
            )
        self.moved = moved  # those of which what the forward saved is moved away and back
        self.elsewhere = setting.elsewhere or HostMemory()
        self.saved: list[Saved | None] = [None] * num_microbatches
        for outbox in outboxes:
            outbox.repeated = repeated
            if outbox.inbox is not None:
                outbox.inbox.repeated = repeated
        self.last = LastStage(num_microbatches, grad=grad) if stage.is_last else None
        self.given = CallArguments(stage, inboxes, num_microbatches)
        self.given.eager = not parts
        self.arguments = self.given.of
        self.proved = not grad or not inboxes  # whether a forward has shown that it leaves its inputs alone
        self.checks_input = False  # only in cold steps
        self.rehearsed = False  # whether it was run without data in this step
        self.buffers = buffer_tables(self.module)
        if split and self.manual is None and not can_split(self.module):
            warnings.warn(
                f"stage {stage.stage_index} is scripted: its backward cannot be taken apart, so the input slot does all of "
                "it and the weight slot what is left. The gradients are right; the bubble is that of a full backward",
                stacklevel=2,
            )

    # -- the actions

    def forward(self, microbatch: int) -> None:
        """F."""
        args, kwargs = self.arguments(microbatch)
        if self.checks_input:
            check_given(self.stage, args, microbatch=microbatch, name="input_args")
        call = self.call if self.proved else self.first_call
        if microbatch in self.repeated:
            call = partial(self.call_first, call)
        elif microbatch in self.moved:
            call = partial(self.call_saving, call)
        try:
            if self.rng is None:
                output = call(microbatch, args, kwargs)
            else:
                with self.rng.at(self.stage.stage_index, microbatch, self.number):
                    output = call(microbatch, args, kwargs)
        except RuntimeError as error:
            if self.given.copies or not self.inboxes or not _changes_a_leaf(error):
                raise
            # It may have drawn random numbers by then, and changed buffers and other inputs, of all of which there is no copy.
            self.given.copies = True
            raise StageError(
                f"stage {self.stage.stage_index} changes its input in place for microbatch {microbatch}, and did not before, or "
                "not first of all; it may have changed more by then, so it is not run again. From the next step on it is given "
                "copies: call step again, or write x = x.clone() first in its forward"
            ) from error
        for outbox in self.outboxes:
            outbox.keep(microbatch, output)
        if not self.grad:
            for inbox in self.inboxes:
                inbox.read(microbatch)

    def recompute(self, microbatch: int) -> None:
        """R."""
        args, kwargs = self.arguments(microbatch)
        with nullcontext() if self.rng is None else self.rng.at(self.stage.stage_index, microbatch, self.number):
            run = partial(self.call, microbatch, args, kwargs)
            output = self.repeats.again(microbatch, run)  # type: ignore[union-attr]
        for outbox in self.outboxes:
            outbox.keep_again(microbatch, output)

    def offload(self, microbatch: int) -> None:
        """O."""
        self.saved[microbatch].offload(self.elsewhere)  # type: ignore[union-attr]

    def load(self, microbatch: int) -> None:
        """L."""
        saved, self.saved[microbatch] = self.saved[microbatch], None
        saved.load()  # type: ignore[union-attr]

    def first_call(self, microbatch: int, args: tuple[object, ...], kwargs: dict[str, object]) -> Value:
        """The first forward shows whether the module changes its input in place, which autograd refuses for a leaf.

        It then runs again, from the same random state and the same buffers, and gets copies from then on.
        """
        rewind = remember(self.module, args)
        others = [(one, one._version) for one in tensors_in((args, kwargs)) if not one.requires_grad]
        try:
            output = self.call(microbatch, args, kwargs)
        except RuntimeError as error:
            changed = any(one._version != version for one, version in others)
            if self.given.copies or changed or not _changes_a_leaf(error):
                raise
            self.given.copies = True
            rewind()
            output = self.call(microbatch, *self.arguments(microbatch))
        self.proved = True
        return output

    def call_first(
        self, call: ModuleCall, microbatch: int, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Value:
        """The first of two runs: unless its graph stays, it is dropped at once, and so is whatever waits for its backward."""
        repeats = self.repeats
        assert repeats is not None, "the plan has an R of this microbatch"
        # What a compiled graph saves is its own business; what waits for W is not autograd's.
        whole = self.compiled is not None or microbatch in self.split
        last = self.last
        loss = (lambda: None) if last is None else partial(last.losses.__getitem__, microbatch)
        output = repeats.first(microbatch, partial(call, microbatch), (args, kwargs), whole=whole, loss=loss)
        if repeats.stays(microbatch):
            return output
        self.pending[microbatch] = None
        if last is not None:
            last.losses[microbatch] = None
        return output

    def call_saving(
        self, call: ModuleCall, microbatch: int, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A run of which what autograd saves can be moved away."""
        given = self.inputs
        target = given.targets[microbatch] if given.targets is not None else None
        inputs = tensors_in((args, kwargs, target, given.loss_kwargs))
        with saving(self.module, inputs, threshold=self.elsewhere.threshold) as saved:
            output = call(microbatch, args, kwargs)
        if self.outboxes or given.keep_outputs:  # else nobody holds it
            saved.leave(tensors_in(output))
        self.saved[microbatch] = saved
        return output

    def call(self, microbatch: int, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
        """The module, and on the last stage the loss."""
        split = microbatch in self.split
        if self.compiled is None:
            return self.call_once(microbatch, args, kwargs)
        with self.compiled.running(split=split):
            output = self.call_once(microbatch, args, kwargs)
        if split and self.compiled.looking:
            loss = None if self.last is None else self.last.losses[microbatch]
            self.compiled.look(tensors_in((output, loss)))
        return output

    def call_once(self, microbatch: int, args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
        if microbatch not in self.split:
            output = self.module(*args, **kwargs)
        elif self.deferral is not None:
            output, self.pending[microbatch] = run_deferred(self.deferral, self.module, args, kwargs)
        else:
            output = self.module(*args, **kwargs)
            self.pending[microbatch] = ManualWeight(self.manual)  # type: ignore[arg-type]
        if self.rehearsed and is_left_over(output, (args, kwargs)):
            _log.warning(
                "stage %d gave NaN for microbatch %d, whose input has none. If it keeps something outside of its modules, in a "
                "global dictionary perhaps, that follows from an input: the run on placeholders, which finds shapes before "
                "stages are compiled, has left NaN there. Keep it in an attribute of a module",
                self.stage.stage_index,
                microbatch,
            )
        if self.buffers:
            output = copied_out(output, self.buffers)
        if self.stage.output_args is not None:
            check_given(self.stage, output, microbatch=microbatch, name="output_args")
        if self.last is not None:
            self.last.finish(microbatch, output, self.inputs)
        return output

    def backward(self, microbatch: int) -> None:
        """B."""
        roots, grads = self.seeds(microbatch)
        if roots:
            run_engine(tuple(roots), tuple(grads))
        if self.manual is not None:  # weight work made by hand, in the same breath
            weight = ManualWeight(self.manual)
            weight.build()
            weight.run()
        if self.alone:
            self.let_go(microbatch)

    def backward_input(self, microbatch: int) -> None:
        """I."""
        roots, grads = self.seeds(microbatch)
        pending = self.pending[microbatch]
        assert pending is not None, "the check has found its F"
        leaves = [leaf for inbox in self.inboxes for leaf in inbox.arrived[microbatch] or ()]
        with nullcontext() if self.compiled is None else self.compiled.running(split=True):
            backward_input(roots, grads, pending, inputs=leaves)
        del leaves
        if self.alone:
            self.let_go(microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """W."""
        pending, self.pending[microbatch] = self.pending[microbatch], None
        assert pending is not None, "the check has found its I"
        backward_weight(pending)

    # -- their parts

    def let_go(self, microbatch: int) -> None:
        """After the backward: what a stage of this rank gave that is run again itself, and so does not hold its output."""
        for inbox in self.alone:
            if microbatch in inbox.repeated:
                inbox.read(microbatch)

    def seeds(self, microbatch: int) -> tuple[list[Tensor], list[Tensor]]:
        """What the backward starts from: outputs that have a gradient, and it; on the last stage the loss."""
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        for outbox in self.outboxes:
            found = outbox.gradients(microbatch)
            for tensor, grad in zip(outbox.tensors[microbatch] or (), found, strict=True):
                if grad is not None and tensor.requires_grad:
                    roots.append(tensor)
                    grads.append(grad)
            outbox.tensors[microbatch] = outbox.specs[microbatch] = None
        if self.last is not None and (seed := self.last.seed(microbatch)):
            roots.append(seed[0])
            grads.append(seed[1])
        return roots, grads

    # -- around a step

    def begin(self, inputs: Batch, number: int, *, uneven: bool) -> None:
        """`uneven`: input and target of the batch have different numbers of rows."""
        self.inputs, self.number = inputs, number
        self.given.begin(inputs)
        if self.last is not None:
            self.last.begin(inputs, uneven=uneven)
        self.alone = [inbox for inbox in self.inboxes if inbox.repeated]  # whose values nobody but this stage may hold
        if self.repeats is not None:
            self.repeats.begin(inputs.loss_fn if self.last is not None else None)
        if self.compiled is not None:
            self.compiled.begin_step()

    def results(self) -> tuple[list[Tensor], list[Value], Weights | None]:
        """Return losses and outputs of the step by microbatch, and the shares of the losses."""
        return ([], [], None) if self.last is None else self.last.results(self.inputs)

    def left_over(self) -> list[str]:
        index = self.stage.stage_index
        found = [f"weight work of stage {index}, microbatch {m}" for m, work in enumerate(self.pending) if work]
        if self.last is not None:
            found += [f"loss of microbatch {m}" for m, loss in enumerate(self.last.losses) if loss is not None]
        found += [f"saved tensors of stage {index}, microbatch {m}" for m, s in enumerate(self.saved) if s is not None]
        if self.repeats is not None:
            found += [f"a forward of stage {index} to be run again, microbatch {m}" for m in self.repeats.left_over()]
        return found

    def clear(self) -> None:
        size = len(self.pending)
        self.pending[:] = [None] * size
        self.saved[:] = [None] * size
        if self.repeats is not None:
            self.repeats.clear()
        if self.last is not None:
            self.last.clear()
        self.inputs = NO_BATCH
        self.rehearsed = False
        self.given.begin(self.inputs)
        if self.compiled is not None:
            self.compiled.end_step()
        if self.deferral is not None:
            self.deferral.reset()


def _changes_a_leaf(error: RuntimeError) -> bool:
    """Whether autograd refuses to have an input changed in place."""
    return "leaf Variable that requires grad" in str(error)
