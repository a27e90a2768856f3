"""Questions of the page, and their answers: a timeline, a comparison, or a file. No torch, no network, no state."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args, get_type_hints

from penstock.checks import check_types
from penstock.errors import PenstockError, PlanError
from penstock.lower import lower
from penstock.plan import Plan, check, dumps
from penstock.schedules import all_schedules, get_schedule
from penstock.show.html import timeline_section
from penstock.show.summary import figures
from penstock.show.svg import to_svg
from penstock.simulate import Costs, Link, Timeline, simulate

Kind = Literal["show", "compare", "svg", "csv"]
_TIMES: Final = ("forward", "backward_input", "backward_weight", "latency")
_READ: Final[dict[str, Callable[[Any], object]]] = {  # of a question: what makes its own value of one that JSON knows
    **dict.fromkeys(("ranks", "microbatches", "stages_per_rank"), int),
    **dict.fromkeys((*_TIMES, "transfer", "kept_for_weights", "memory"), float),
    "speeds": lambda given: tuple(map(float, given)),
    "links": lambda given: tuple(map(str, given)),
}
MOST_ACTIONS: Final = 40_000  # what a browser draws at once; a forward and a backward of each stage and microbatch


@dataclass(frozen=True)
class Question:
    """What the page asks about. Times are per rank and microbatch, as in `penstock plan`.

    >>> Question.of({"schedule": "1f1b", "ranks": 4, "speeds": [1, 1, 2, 1]}).speeds
    (1.0, 1.0, 2.0, 1.0)
    """

    schedule: str = "1f1b"
    ranks: int = 4
    microbatches: int = 8
    stages_per_rank: int | None = None  # None: what suits the schedule
    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    latency: float = 0.0  # of a message
    transfer: float = 0.0  # the time that a message of a whole rank occupies its link
    kept_for_weights: float = 1.0  # the share of the activations that a microbatch holds between I and W
    memory: float | None = None  # a rank's room, in activations of one rank for one microbatch
    speeds: tuple[float, ...] = ()  # how long each rank takes, relative to the others; empty: all the same
    links: tuple[str, ...] = ()  # latencies of single links, such as "6-7=30": both ways; "6>7=30": one way
    messages: bool = False  # draw sends and receives as well

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Question:
        """From plain values, as JSON gives them; what is not asked for stays as it is."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(asked) - known):
            raise PlanError(f"a question about {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
        given = {name: value for name, value in asked.items() if value is not None}
        try:
            given |= {name: read(given[name]) for name, read in _READ.items() if name in given}
        except (TypeError, ValueError, OverflowError) as error:
            raise PlanError(f"a question with {given!r}: {error}") from None
        return cls(**given)

    def __post_init__(self) -> None:
        hints = get_type_hints(Question).items()
        check_types("Question", PlanError, **{name: (getattr(self, name), hint) for name, hint in hints})
        if self.speeds and len(self.speeds) != self.ranks:
            raise PlanError(f"{len(self.speeds)} speeds for {self.ranks} ranks; expected one for each, or none")
        count = 3 * self.ranks * self.microbatches * (self.stages_per_rank or 2)
        if count > MOST_ACTIONS:
            raise PlanError(
                f"{self.ranks} ranks x {self.microbatches} microbatches are about {count:,} actions, and the page draws "
                f"{MOST_ACTIONS:,}; `penstock plan --html` draws plans of any size"
            )


def answer(question: Question, kind: Kind) -> dict[str, Any]:
    """What the page shows, ready for JSON.

    >>> made = answer(Question("1f1b", ranks=4, microbatches=8), "show")
    >>> made["figures"]["bubble"], made["command"]
    ('27.3%', 'penstock plan 1f1b --ranks 4 --microbatches 8')
    """
    match kind:
        case "compare":
            rows = sorted(_compared(question), key=lambda row: (not row["fits"], row["makespan"], row["peak"]))
            return {"rows": rows}
        case "csv":
            return {"text": dumps(_timeline(question).plan), "name": f"{question.schedule}.csv"}
        case "svg":
            return {"text": to_svg(_timeline(question)), "name": f"{question.schedule}.svg"}
        case "show":
            timeline = _timeline(question)
            return {
                "html": timeline_section([(timeline.plan.name, timeline)]).html,
                "figures": figures(timeline),
                "command": _command(question),
                **_beside(question, timeline),
            }


def answer_json(text: str) -> str:
    """The same for JSON text: ``{"kind": "show", "question": {...}}``; an error is an answer too.

    >>> answer_json('{"kind": "show", "question": {"ranks": 0}}')
    '{"error": "num_ranks=0; expected a whole number, at least 1"}'
    """
    try:
        match json.loads(text):
            case {"kind": kind, "question": dict(question)} if kind in get_args(Kind):
                return json.dumps(answer(Question.of(question), kind))
        raise PlanError(f"expected a question and its kind, one of {', '.join(get_args(Kind))}; got {text[:200]}")
    except (PenstockError, json.JSONDecodeError, RecursionError) as error:
        return json.dumps({"error": str(error)})


def _timeline(question: Question) -> Timeline:
    recipe = get_schedule(question.schedule)
    plan = recipe(question.ranks, question.microbatches, stages_per_rank=question.stages_per_rank)
    costs = _costs(plan, question)
    if question.messages or question.transfer:  # links are occupied by messages, which lowering makes
        plan = lower(plan)
    check(plan)
    return simulate(plan, costs)


def _costs(plan: Plan, question: Question) -> Costs:
    count, kept = plan.num_stages, question.kept_for_weights
    times = {name: getattr(question, name) for name in _TIMES}
    each = -(-count // plan.num_ranks)
    costs = Costs.per_rank(num_stages=count, stages_per_rank=each, held_to_weight=kept, **times)
    if question.transfer > 0:
        costs = replace(costs, bandwidth=1.0 / question.transfer, output_bytes=(1.0,) * count)
    links = [link._replace(bandwidth=costs.bandwidth) for text in question.links for link in Link.read(text)]
    return replace(costs, links=tuple(links), ranks=question.speeds or None)


def _compared(question: Question) -> Iterator[dict[str, Any]]:
    """Every schedule that trains with these sizes and costs."""
    for recipe in all_schedules():
        if question.stages_per_rank is not None and recipe.stages_per_rank not in (None, question.stages_per_rank):
            continue
        timeline = _timeline(replace(question, schedule=recipe.name, messages=False))
        if timeline.plan.has_backward:
            yield {
                "schedule": recipe.name,
                "title": recipe.title,
                "makespan": timeline.makespan,
                "bubble": timeline.bubble_makespan,
                **_beside(question, timeline),
            }


def _beside(question: Question, timeline: Timeline) -> dict[str, object]:
    """What the page says of a timeline, whether it is drawn or stands in a row of the comparison."""
    peak = max(timeline.peak_memory, default=0.0)
    fits = question.memory is None or peak <= question.memory
    return {"peak": peak, "fits": fits, "stages_per_rank": timeline.plan.num_stages // timeline.plan.num_ranks}


def _command(question: Question) -> str | None:
    """The question as a command line; None where the command has no option for it."""
    if question.speeds or question.transfer or question.kept_for_weights != 1.0:
        return None
    words = ["penstock", "plan", question.schedule]
    usual = Question()
    for name in ("ranks", "microbatches", "stages_per_rank", *_TIMES):
        value = getattr(question, name)
        if name in ("ranks", "microbatches") or value != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", f"{value:g}"]
    for link in question.links:
        words += ["--link", link]
    return shlex.join([*words, "--lowered"] if question.messages else words)
