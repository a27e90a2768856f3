"""HandDriven: a step through the stages' own methods, action by action.

penstock's own loop binds a plan into calls and never looks at a stage's methods. Where a program overrides them (a stage
with its own `forward_one_chunk`, a function for OVERLAP_F_B that moves tensors itself) the step goes this way instead,
slower, in the words of torch.distributed.pipelining. Every rank takes the same way: they ask one another before the first
step. Shapes are learnt once, before the first microbatch, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.errors import RunError
from penstock.parallel import adapt
from penstock.plan.vocabulary import ComputationType as Kind
from penstock.plan.vocabulary import NamedAction
from penstock.run.p2p import batch_p2p, wait_batch_p2p

if TYPE_CHECKING:
    from penstock.run.legacy import LegacySchedule

_FORWARD = frozenset({Kind.FORWARD, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD})


@dataclass
class PipelineContext:
    """What a user's function for a kind of action is given beside the action."""

    schedule_ref: Any
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


class CustomFunction(Protocol):
    """A user's function for a kind of action."""

    def __call__(self, action: NamedAction, ctx: PipelineContext) -> object: ...


class HandDriven:
    """One step of this rank's stages."""

    def __init__(self, schedule: LegacySchedule, context: PipelineContext, *, keep: bool, loss_kwargs: Any) -> None:
        self.schedule = schedule
        self.context = context
        self.keep = keep
        self.loss_kwargs = loss_kwargs
        self.stages: dict[int, Any] = {stage.stage_index: stage for stage in schedule._stages}
        self.sends: list[list[Any]] = []

    def run(self, actions: list[NamedAction]) -> None:
        schedule = self.schedule
        schedule.backward_counter.clear()
        functions: Mapping[Kind, Callable[..., object]] = schedule._hand_functions
        for at, action in enumerate(actions):
            try:
                own = functions.get(action.computation_type)
                if own is not None:
                    own(action, self.context)
                else:
                    for part in action.leaves:
                        self.do(part)
            except Exception as error:
                error.add_note(f"rank {schedule.rank}, action {at + 1} of {len(actions)}: {action}")
                raise
        for works in self.sends:
            wait_batch_p2p(works)

    def do(self, action: NamedAction) -> None:
        stage, microbatch = self.stages[action.stage_index], action.microbatch_index
        match action.computation_type:
            case Kind.UNSHARD:
                self.schedule._unshard(stage)
            case Kind.RESHARD:
                self.schedule._reshard(stage)
            case Kind.REDUCE_GRAD:
                stage.perform_reduce_grad(self.schedule._grad_scale_factor)
            case _ if microbatch is None:
                raise RunError(f"{action} names no microbatch")
            case Kind.FORWARD:
                self.forward(stage, microbatch)
            case Kind.FULL_BACKWARD:
                self.backward(stage, microbatch, full=True)
            case Kind.BACKWARD_INPUT:
                self.backward(stage, microbatch, full=False)
            case Kind.BACKWARD_WEIGHT:
                stage.backward_weight_one_chunk(microbatch, last_backward=self.count(stage))
            case Kind.SEND_F:
                self.sends.append(batch_p2p(stage.get_fwd_send_ops(microbatch)))
            case Kind.SEND_B:
                self.sends.append(batch_p2p(stage.get_bwd_send_ops(microbatch)))
            case Kind.RECV_F:
                self.schedule.fwd_recv_ops[action.stage_index, microbatch] = batch_p2p(
                    stage.get_fwd_recv_ops(microbatch)
                )
            case Kind.RECV_B:
                self.schedule.bwd_recv_ops[action.stage_index, microbatch] = batch_p2p(
                    stage.get_bwd_recv_ops(microbatch)
                )
            case Kind.OVERLAP_F_B:
                raise RunError(f"{action} overlaps nothing; expected a forward and a backward in it")

    def forward(self, stage: Any, microbatch: int) -> None:
        index, context = stage.stage_index, self.context
        if not stage.is_first and index - 1 not in self.stages:
            self.arrived(self.schedule.fwd_recv_ops, index, microbatch, "its input")
        output = stage.forward_one_chunk(
            microbatch,
            (context.arg_mbs or [])[microbatch],
            (context.kwarg_mbs or [])[microbatch],
            save_forward_output=self.keep,
        )
        self.schedule._maybe_compute_loss(stage, output, context.target_mbs, microbatch, self.loss_kwargs)
        if index + 1 in self.stages:
            self.stages[index + 1].set_local_fwd_input(output, microbatch)
        elif not stage.has_backward and stage.is_last:
            stage.fwd_cache.pop(microbatch, None)

    def backward(self, stage: Any, microbatch: int, *, full: bool) -> None:
        index = stage.stage_index
        if not stage.is_last and index + 1 not in self.stages:
            self.arrived(self.schedule.bwd_recv_ops, index, microbatch, "the gradient of its output")
        loss = self.schedule._maybe_get_loss(stage, microbatch)
        last = self.count(stage) if full else False
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=full, last_backward=last)
        if index - 1 in self.stages:
            self.stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def arrived(self, posted: dict[tuple[int, int], list[Any]], stage: int, microbatch: int, what: str) -> None:
        works = posted.pop((stage, microbatch), None)
        if works is None:
            raise RunError(
                f"stage {stage}, microbatch {microbatch}: {what} was never received; the order has no receive for it"
            )
        wait_batch_p2p(works)

    def count(self, stage: Any) -> bool:
        """Count a backward of the stage; whether it was the last."""
        counter = self.schedule.backward_counter
        counter[stage.stage_index] += 1
        return counter[stage.stage_index] == self.schedule._n_microbatches


def forward_part(actions: list[NamedAction]) -> list[NamedAction]:
    """What an evaluation does of an order."""
    return [leaf for action in actions for leaf in action.leaves if leaf.computation_type in _FORWARD]


@contextmanager
def stepping(stages: list[Any]) -> Iterator[None]:
    """Around a step: data parallelism waits for REDUCE_GRAD, and nobody scales gradients."""
    adapted = []
    for stage in stages:
        stage._in_step = True
        if isinstance(stage.submod, torch.nn.Module):
            stage._adapter = adapt(stage.submod)
            stage._adapter.begin()
            adapted.append(stage)
    failed = True
    try:
        yield
        failed = False
    finally:
        for stage in adapted:
            stage._adapter.end(failed=failed)
            stage._adapter = None
        for stage in stages:
            stage._in_step = False
