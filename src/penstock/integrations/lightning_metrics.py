"""Metrics of torchmetrics beside a pipelined model: the last stage updates them, and every rank has their state.

So `self.log("accuracy", self.accuracy)`, and `self.accuracy.compute()` at the end of an epoch, give on every rank what they give
in one process. torchmetrics' own exchange between processes is left out: it would add up what all ranks have already.
"""

from __future__ import annotations

from itertools import takewhile
from operator import is_

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from penstock.front import Pipeline
from penstock.front.spread import receive_from, send_to
from penstock.nest import Value

Kept = dict[str, int]  # of each state that is a list: how many of its first values the other ranks have


def _alone() -> bool:
    return False


class SharedMetrics:
    """The metrics of a LightningModule, by their names in it."""

    def __init__(self, module: nn.Module) -> None:
        parts = dict(module.named_modules())
        self.by_name = {name: part for name, part in parts.items() if isinstance(part, Metric)}
        self._groups = [part for part in parts.values() if isinstance(part, MetricCollection)]
        self.parts: list[nn.Module] = [*self.by_name.values(), *self._groups]
        self._before: dict[str, tuple[int, dict[str, list[Tensor]]]] = {}
        for metric in self.by_name.values():
            metric.distributed_available_fn = _alone

    def begin(self) -> None:
        """Before a step, on every rank: what all have."""
        self._before = {
            name: (
                metric.update_count,
                {key: [*value] for key, value in metric.metric_state.items() if isinstance(value, list)},
            )
            for name, metric in self.by_name.items()
        }

    def changes(self) -> dict[str, tuple[int, Kept]]:
        """On the last stage, after a step: how often each metric was updated so far, and what need not be sent."""
        for group in self._groups:
            group.values(copy_state=False)  # metrics of a collection that share a state all refer to it from here on
        found = {}
        for name, metric in self.by_name.items():
            count, lists = self._before[name]
            if count or metric.update_count:
                state = metric.metric_state
                same = {key: takewhile(bool, map(is_, old, [*state[key]])) for key, old in lists.items()}
                found[name] = (metric.update_count, {key: sum(1 for _ in values) for key, values in same.items()})
        return found

    def share(self, pipe: Pipeline, changes: dict[str, tuple[int, Kept]]) -> None:
        """Give every rank the state of the last stage's; `changes` are those of its rank."""
        last = pipe.plan.placement.ranks[-1]
        if not changes or pipe.num_ranks == 1:
            return
        if pipe.rank == last:
            states: dict[str, Value] = {}
            for name, (_, kept) in changes.items():
                state = self.by_name[name].metric_state
                states[name] = {key: value[kept[key] :] if key in kept else value for key, value in state.items()}
            send_to(pipe.transport, [rank for rank in range(pipe.num_ranks) if rank != last], states)
            return
        given: Value = receive_from(pipe.transport, last)
        for name, (count, kept) in changes.items():
            metric: Value = self.by_name[name]
            for key, value in given[name].items():
                setattr(metric, key, getattr(metric, key)[: kept[key]] + list(value) if key in kept else value)
            metric._update_count, metric._computed = count, None  # as its own update would leave them
