"""The report of a run: report.json with the figures, and report.html, one page that needs nothing else.

figures = {"title": "a run", "rows": 16, "unit": "rows", **collect(pipe, history, batch)}      # at its end
path = write(folder, figures)
path = rewrite(folder)                                                                         # penstock report FOLDER
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from penstock.errors import PenstockError
from penstock.front import Choice, Pipeline
from penstock.front.memory_view import Memory, RankMemory
from penstock.nest import Value
from penstock.plan import Placement, StageGraph, dumps, loads
from penstock.show import predicted_vs_measured
from penstock.show.what_if import WhatIf, explained
from penstock.simulate import Costs, Timeline, measured_costs, simulate
from penstock.train.history import History
from penstock.train.loggers import strict_json
from penstock.train.report_page import NOT_MEASURED, render
from penstock.train.train_job import Batch
from penstock.train.train_options import read_json

REPORT, PAGE = "report.json", "report.html"
_STRANGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, AssertionError)
_FORMAT = 1
_ROUNDS = 3  # of steps that are measured


def _measured(pipe: Pipeline, batch: Batch) -> tuple[Timeline, Memory]:
    """The timeline of the median of some training steps, and what a step holds beside parameters and gradients.

    Gradients are dropped, random numbers are put back.
    """
    args, target = batch
    steps = pipe.schedule.steps
    pipe.step(*args, target=target)
    found = []
    for _ in range(_ROUNDS):
        with pipe.record() as recording:
            pipe.step(*args, target=target)
        found.append(recording.timeline)
    with pipe.watch_memory():
        pipe.step(*args, target=target)
    pipe.zero_grad()
    pipe.schedule.steps = steps
    return sorted(found, key=lambda timeline: timeline.makespan)[_ROUNDS // 2], pipe.memory()


def collect(pipe: Pipeline, history: History, batch: Batch) -> dict[str, object]:
    """All that the page shows but its title, `rows` of a step and their `unit`. Every rank calls it at the end of a run."""
    assert pipe.choice is not None, "a training run captures its model"
    measured, memory = _measured(pipe, batch)
    return {
        "format": _FORMAT,
        "choice": pipe.choice.dumps(),
        **asdict(history),
        "measured": _timeline_to_json(measured),
        "memory": [one.measured_peak for one in memory.ranks],
        "held": [
            {"actions": one.actions, "planned": one.planned_curve, "measured": one.measured, "kinds": _kinds(one)}
            for one in memory.ranks
        ],
    }


def _kinds(rank: RankMemory) -> dict[str, int]:
    """What the fullest moment of the plan consists of."""
    fullest = max(rank.planned, key=lambda level: sum(level.values()), default={})
    return {kind: round(size) for kind, size in fullest.items() if size}


def write(folder: str | Path, data: dict[str, object]) -> Path:
    """Write the figures and the page; the path of the page comes back."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / REPORT).write_text(strict_json(data), encoding="utf-8")
    return rewrite(place)


def read(folder: str | Path) -> dict[str, Value]:
    file = Path(folder) / REPORT
    if os.path.isdir(folder) and not file.is_file():  # noqa: PTH112  a name that cannot be is no folder either
        raise PenstockError(
            f"{folder} has no {REPORT}: give the output folder of a `penstock train` that went to its end"
        )
    data = read_json(file)
    if data.get("format") != _FORMAT:
        raise PenstockError(f"{file} has format {data.get('format')!r}, this penstock reads {_FORMAT}")
    return data


def rewrite(folder: str | Path) -> Path:
    """Make the page again from the figures."""
    with _figures_of(folder) as (data, choice, measured):
        costs = choice.costs if choice.is_timed else _scaled(choice.costs, measured)
        measured = replace(measured, costs=costs)
        planned = replace(simulate(measured.plan, costs), unit="s")
        page = render(data, choice, _explained(choice, measured), planned=planned, measured=measured)
    (Path(folder) / PAGE).write_text(page, encoding="utf-8")
    return Path(folder) / PAGE


def explain(folder: str | Path) -> str:
    """Where the time of the measured step went, and which assumption was off, where something was predicted, in words."""
    with _figures_of(folder) as (_, choice, measured):
        compared = NOT_MEASURED
        if choice.is_timed:
            compared = predicted_vs_measured.verdict(replace(simulate(measured.plan, choice.costs), unit="s"), measured)
        return f"{_explained(choice, measured)}\n{compared}\n"


def costs_of_run(folder: str | Path) -> Costs:
    """What the actions and messages of the measured step cost."""
    with _figures_of(folder) as (_, choice, measured):
        return measured_costs([measured], replace(choice, calibrated=None).costs)


@contextmanager
def _figures_of(folder: str | Path) -> Iterator[tuple[dict[str, Value], Choice, Timeline]]:
    """What was written of a run; what cannot be made of it inside is an error of the file's."""
    data = read(folder)
    try:
        yield data, Choice.loads(data["choice"]), _timeline_from_json(data["measured"])
    except _STRANGE as error:
        raise PenstockError(f"{Path(folder) / REPORT} does not hold the figures of a run: {error!r}") from error


def _explained(choice: Choice, measured: Timeline) -> str:
    return explained(WhatIf.of([measured], replace(choice, calibrated=None).costs))


def _scaled(costs: Costs, measured: Timeline) -> Costs:
    """Costs in no unit of time, made seconds: the ranks together are as busy as they were measured to be."""
    busy = sum(simulate(measured.plan, costs).busy)
    factor = sum(measured.busy) / busy if busy else 0.0
    names = ("forward", "backward_input", "backward_weight", *(["backward"] if costs.backward is not None else []))
    scaled: dict[str, Value] = {name: tuple(factor * time for time in getattr(costs, name)) for name in names}
    return replace(costs, **scaled)


def _timeline_to_json(timeline: Timeline) -> dict[str, object]:
    plan = timeline.plan
    return {
        "plan": dumps(plan),
        "name": plan.name,
        "placement": plan.placement.ranks,
        "edges": plan.graph.edges,
        "starts": timeline.starts,
        "ends": timeline.ends,
        "processor": timeline.processor,
    }


def _timeline_from_json(data: dict[str, Value]) -> Timeline:
    placement = Placement.of(data["placement"])
    graph = StageGraph.of(placement.num_stages, [(a, b) for a, b in data["edges"]])
    plan = loads(data["plan"], name=data["name"], placement=placement, graph=graph)
    processor = None if data.get("processor") is None else tuple(data["processor"])
    return Timeline(plan, tuple(data["starts"]), tuple(data["ends"]), measured=True, unit="s", processor=processor)
