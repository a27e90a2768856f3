"""What a pipeline holds: planned and measured, rank by rank, in bytes, and what it consists of.

    memory = pipe.memory()                       # on every rank
    for rank in memory.ranks:
        print(rank.rank, rank.planned_peak, rank.measured_peak, rank.state)

A step is measured if the pipeline has a `memory_limit` (the first two of each shape of batch on the host, where counting
takes time; every step on an accelerator), or inside `with pipe.watch_memory():`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from penstock.balance.cuts import size_text
from penstock.errors import OverLimit
from penstock.front.choice import Choice
from penstock.front.mesh import PipelineMesh
from penstock.nest import tensors_in
from penstock.observe.live_memory import MemoryWatch
from penstock.plan import Plan
from penstock.plan.actions import text
from penstock.run.compiled_costs import kept_by_graphs, with_kept
from penstock.run.schedule import Schedule
from penstock.simulate import simulate
from penstock.simulate.planned_memory import levels
from penstock.stage.dtensors import to_local

_COUNTED = 2  # steps of each shape of batch that are counted on the host: one cold, one warm


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds, in bytes: always, and over a step, after each of its actions.

    [(action, held) for action, held in zip(rank.actions, rank.measured)]
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int  # as the plan reckons with
    limit: int | None
    actions: tuple[str, ...]
    planned: tuple[dict[str, float], ...] = ()  # after each action, by kind; empty for stages made by hand
    planned_peak: int = 0  # in a step, with what operators need for a moment
    measured: tuple[int, ...] = ()  # after each action; empty: no step was measured
    measured_buffers: tuple[int, ...] = ()  # of that, what is in buffers of messages
    measured_peak: int = 0

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def planned_curve(self) -> tuple[int, ...]:
        """After each action, all kinds together."""
        return tuple(round(sum(level.values())) for level in self.planned)


@dataclass(frozen=True)
class Memory:
    """What all ranks hold.

    pipe.memory().ranks[0].planned_peak
    """

    ranks: tuple[RankMemory, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"rank {one.rank}: {size_text(one.state)} of parameters, gradients and optimizer; a step "
            f"{size_text(one.planned_peak)} planned, "
            + (f"{size_text(one.measured_peak)} measured" if one.measured else "not measured")
            for one in self.ranks
        )


class MemoryKeeper:
    """Measures steps of this rank, and says when one held too much."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        ends: PipelineMesh,
        limit: int | Sequence[int] | None,
        optimizer_bytes: float,
    ) -> None:
        self.modules, self.ends, self.optimizer_bytes = modules, ends, optimizer_bytes
        self.limits = [limit] * ends.num_ranks if limit is None or isinstance(limit, int) else list(limit)
        self.limit: int | None = self.limits[ends.rank]
        self.counted: Counter[tuple[object, ...]] = Counter()  # steps of each shape of batch
        # Of the last step that was measured: levels after each action, those in buffers of messages, the peak.
        self.last: tuple[Sequence[int], Sequence[int], int] = ((), (), 0)

    @property
    def parameters(self) -> int:
        found = {id(p): to_local(p.detach()).nbytes for module in self.modules for p in module.parameters()}
        return sum(found.values())

    @property
    def state(self) -> int:
        return round(self.parameters * (2 + self.optimizer_bytes))

    @contextmanager
    def around(self, schedule: Schedule, batch: object, choice: Choice | None) -> Iterator[None]:
        """A step over this batch: counted, if it is one of those that are.

        What counts on the host would keep compiled code from running. What compiled stages hold is known from their graphs.
        """
        if not self._wanted(batch):
            yield
            return
        if self.ends.device.type == "cpu" and self._is_compiled():
            yield
            if choice is not None:
                self._check_graphs(schedule, choice)
            return
        with schedule.watch_memory() as watch:
            yield
        self.keep(watch)
        if watch.plan is not None:
            place = max(range(len(watch.peaks)), key=watch.peaks.__getitem__)
            self._tell(watch.peak, f"most of it in action {text(watch.plan.codes[self.ends.rank][place])}")

    def keep(self, watch: MemoryWatch) -> None:
        """The last step that was measured."""
        if watch.levels:
            self.last = watch.levels, watch.buffers, watch.peak

    def _wanted(self, batch: object) -> bool:
        if self.limit is None or self.ends.device.type != "cpu":
            return self.limit is not None
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(batch))
        self.counted[shapes] += 1
        return self.counted[shapes] <= _COUNTED

    def _is_compiled(self) -> bool:
        return any(hasattr(m, "_orig_mod") or m._compiled_call_impl for top in self.modules for m in top.modules())

    def _check_graphs(self, schedule: Schedule, choice: Choice) -> None:
        lowered = schedule.lowered_plan()
        costs = with_kept(choice.costs, kept_by_graphs(schedule), lowered.placement)
        peak = simulate(lowered, costs).peak_memory[self.ends.rank]
        self._tell(round(peak), "as the graphs of its compiled stages say")

    def _tell(self, peak: int, where: str) -> None:
        """Warn if a step with such a peak held more than it may."""
        total = self.state + peak
        if self.limit is None or total <= self.limit:
            return
        warnings.warn(
            f"rank {self.ends.rank} held {size_text(total)} in this step, {where}; memory_limit is "
            f"{size_text(self.limit)}. Parameters, gradients and optimizer state are {size_text(self.state)}, the step took "
            f"{size_text(peak)}. Give a smaller memory_limit, so that more is recomputed, or a batch of the example's size",
            OverLimit,
            stacklevel=5,
        )

    def value(self, lowered: Plan, choice: Choice | None) -> Memory:
        """What all ranks hold; every rank calls it."""
        ranks, told = [], self.ends.own.all_gather("the memory of each rank", (self.parameters, self.last))
        for rank, (parameters, (after_each, buffers, peak)) in enumerate(told):
            ranks.append(
                RankMemory(
                    rank,
                    parameters=parameters,
                    gradients=parameters,
                    optimizer=round(parameters * self.optimizer_bytes),
                    limit=self.limits[rank],
                    actions=tuple(text(code) for code in lowered.codes[rank]),
                    planned=() if choice is None else tuple(levels(lowered, rank, choice.costs)),
                    planned_peak=0 if choice is None else round(choice.timeline.peak_memory[rank]),
                    measured=tuple(after_each),
                    measured_buffers=tuple(buffers),
                    measured_peak=peak,
                )
            )
        return Memory(tuple(ranks))
