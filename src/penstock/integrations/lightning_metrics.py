"""Metrics of torchmetrics beside a pipelined model: the last stage updates them, and every rank has their state.

So `self.log("accuracy", self.accuracy)`, and `self.accuracy.compute()` at the end of an epoch, give on every rank what they give
in one process. torchmetrics' own exchange between processes is left out: it would add up what all ranks have already.
"""

from __future__ import annotations

from itertools import takewhile
from operator import is_

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from penstock.nest import Value


class SharedMetrics:
    """The metrics of a LightningModule, by their names in it."""

    def __init__(self, module: nn.Module) -> None:
        parts = dict(module.named_modules())
        self.by_name = {name: part for name, part in parts.items() if isinstance(part, Metric)}
        self._groups = [part for part in parts.values() if isinstance(part, MetricCollection)]
        self.parts: list[nn.Module] = [*self.by_name.values(), *self._groups]
        self._before: dict[str, tuple[int, dict[str, list[Tensor]]]] = {}
        for metric in self.by_name.values():
            metric.distributed_available_fn = bool  # which says False: no exchange between processes

    def begin(self) -> None:
        """Before a step, on every rank: what all have."""
        for name, metric in self.by_name.items():
            lists = {key: [*value] for key, value in metric.metric_state.items() if isinstance(value, list)}
            self._before[name] = metric.update_count, lists

    def changes(self) -> dict[str, tuple[int, dict[str, Value]]]:
        """On the last stage, after a step: how often each metric was updated so far, and its state; of a list that is how many of
        its first values the other ranks have, and those that they lack."""
        for group in self._groups:
            group.values(copy_state=False)  # metrics of a collection that share a state all refer to it from here on
        found = {}
        for name, metric in self.by_name.items():
            count, lists = self._before[name]
            if count or metric.update_count:
                state: dict[str, Value] = dict(metric.metric_state)
                for key, old in lists.items():
                    kept = sum(1 for _ in takewhile(bool, map(is_, old, [*state[key]])))
                    state[key] = kept, state[key][kept:]
                found[name] = metric.update_count, state
        return found

    def take(self, changes: dict[str, tuple[int, dict[str, Value]]]) -> None:
        """On the other ranks: the changes of the last stage."""
        for name, (count, state) in changes.items():
            metric: Value = self.by_name[name]
            for key, value in state.items():
                before = getattr(metric, key)
                setattr(metric, key, before[: value[0]] + list(value[1]) if isinstance(before, list) else value)
            metric._update_count, metric._computed = count, None  # as its own update would leave them
