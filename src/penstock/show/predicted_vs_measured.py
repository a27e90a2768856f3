"""Predicted against measured, action kind by action kind, and which assumption was off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.plan.actions import OP
from penstock.plan.ops import COMPUTES, MESSAGES, OVERLAP, ROWS
from penstock.show.summary import percent, time_text
from penstock.simulate import Timeline

_CLOSE = 0.05  # of the step: below that no assumption is called off


class KindOfAction(NamedTuple):
    """Total time of the actions of one kind on all ranks, in a step."""

    name: str
    actions: int
    predicted: float
    measured: float
    assumption: str  # what was reckoned with

    @property
    def more(self) -> float:
        return self.measured - self.predicted


def kinds(planned: Timeline, measured: Timeline) -> Iterator[KindOfAction]:
    """The kinds of actions that the plan has, then messages, then waiting.

    kinds(simulate(measured.plan, costs), measured)
    """
    predicted, taken = _sums(planned), _sums(measured)
    for op in sorted(op for op in taken if op in COMPUTES):
        name = "overlapped pairs" if op == OVERLAP else ROWS[op].word
        assumption = f"what {name} cost, as measured before"
        yield KindOfAction(name, taken[op][0], predicted[op][1], taken[op][1], assumption)
    posting, uneven = (planned.costs.posting, planned.costs.uneven) if planned.costs else (0.0, 0.0)
    if messages := [taken[op] for op in taken if op in MESSAGES]:
        count, spent = (sum(column) for column in zip(*messages, strict=True))
        assumption = "what a rank spends on posting a message"
        yield KindOfAction("sends and receives", int(count), count * posting, spent, assumption)
    before, after = (sum(idle.total for idle in timeline.idle) for timeline in (planned, measured))
    before += uneven * planned.plan.num_ranks
    assumption = "how long messages are under way, and how unequal the times of equal actions are"
    yield KindOfAction("waiting", 0, before, after, assumption)


def rows(found: Iterable[KindOfAction], num_ranks: int) -> list[list[str]]:
    """A table; the first row is its head. The last column is what the difference makes on a rank, on average."""
    made = [["", "actions", "predicted", "measured", "difference", "on a rank"]]
    for kind in found:
        times = [time_text(time / (kind.actions or num_ranks), "s") for time in (kind.predicted, kind.measured)]
        change = f"{kind.measured / kind.predicted - 1:+.0%}" if kind.predicted else "-"
        more = f"{'+' if kind.more >= 0 else '-'}{time_text(abs(kind.more) / num_ranks, 's')}"
        made.append([kind.name, str(kind.actions or ""), *times, change, more])
    return made


def step_time(planned: Timeline) -> float:
    """Return the predicted step time, including waits because equal actions do not take equal time.

    step_time(simulate(plan, costs))
    """
    return planned.makespan + (planned.costs.uneven if planned.costs else 0.0)


def verdict(planned: Timeline, measured: Timeline) -> str:
    """Which assumption was off, in a sentence.

    verdict(planned, measured)  # "The step took 1.2 s, 3% more than predicted: every assumption held."
    """
    ratio = measured.makespan / step_time(planned) - 1 if planned.makespan else 0.0
    much = f"{percent(abs(ratio))} {'more' if ratio >= 0 else 'less'} than predicted"
    step = f"The step took {time_text(measured.makespan, 's')}, {much}"
    if abs(ratio) <= _CLOSE:
        return f"{step}: every assumption held."
    if ratio > 0 and measured.kept_waiting > _CLOSE * step_time(planned):
        much = f"a rank had no processor for {time_text(measured.kept_waiting, 's')} while it computed"
        return f"{step}. What was off first of all is the assumption that the machine is free: {much}."
    same = [kind for kind in kinds(planned, measured) if (kind.more > 0) == (ratio > 0)]
    worst = max(same, key=lambda kind: abs(kind.more), default=None)
    if worst is None:
        return f"{step}, and no kind of action tells why."
    much = f"{time_text(abs(worst.more) / measured.plan.num_ranks, 's')} a rank {'more' if worst.more > 0 else 'less'}"
    return f"{step}. What was off first of all is {worst.assumption}: {worst.name} took {much}."


def _sums(timeline: Timeline) -> dict[int, tuple[int, float]]:
    """By op: how many actions, and their time on all ranks."""
    found: dict[int, tuple[int, float]] = {}
    for _, code, start, end in timeline.every():
        number, total = found.get(code & OP, (0, 0.0))
        found[code & OP] = number + 1, total + (end - start)
    return found
