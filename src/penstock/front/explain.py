"""What was chosen, and why, for people."""

from __future__ import annotations

from penstock.balance.cuts import size_text
from penstock.front.build import Built
from penstock.front.choose import Choice
from penstock.show.numbers import percent, time_text

_SHOWN = 6  # candidates in the list


def explanation(built: Built) -> str:
    """The table of stages, the schedule and what it was chosen among, and the prediction."""
    plan = built.plan
    head = (
        f"{plan.num_stages} stages on {plan.num_ranks} ranks ({plan.placement.kind}), "
        f"{plan.num_microbatches} microbatches, schedule {plan.name}"
    )
    if built.choice is None:
        rows = [["stage", "rank", "parameters"]]
        for stage in built.stages:
            size = sum(p.nbytes for p in stage.submod.parameters())
            rows.append([str(stage.stage_index), str(stage.group_rank), size_text(size)])
        return "\n".join([f"{head}: stages made by hand, nothing measured", *_table(rows), ""])
    choice = built.choice
    return "\n".join(
        [f"{head}: {choice.why}", "", *_table(stage_rows(choice)), "", *_prediction(choice), *_others(choice), ""]
    )


def stage_rows(choice: Choice) -> list[list[str]]:
    """The table of stages; the first row is its head."""
    rows = [["stage", "rank", "layers", "parameters", "forward", "backward", "activations", "sends"]]
    costs, layers = choice.costs, choice.profile.layers
    for stage, (start, stop) in enumerate(choice.bounds):
        names = layers[start].name if stop - start == 1 else f"{layers[start].name} .. {layers[stop - 1].name}"
        backward = (
            costs.backward[stage] if costs.backward else costs.backward_input[stage] + costs.backward_weight[stage]
        )
        rows.append(
            [
                str(stage),
                str(choice.plan.placement.rank_of(stage)),
                names,
                size_text(choice.parameter_bytes([stage])),
                _time(costs.forward[stage], choice),
                _time(backward, choice),
                size_text(int(costs.held_to_input[stage])),
                size_text(int(costs.output_bytes[stage] if costs.output_bytes else 0)),
            ]
        )
    return rows


def rank_rows(choice: Choice) -> list[list[str]]:
    """The predicted memory and idle time of each rank."""
    timeline = choice.timeline
    rows = [["rank", "busy", "activations", "parameters, gradients, optimizer", "together"]]
    for rank, peak in enumerate(timeline.peak_memory):
        state = choice.state_bytes(choice.plan.placement.stages_of(rank))
        busy = timeline.busy[rank] / timeline.makespan if timeline.makespan else 0.0
        rows.append(
            [str(rank), percent(busy), size_text(round(peak)), size_text(state), size_text(round(peak) + state)]
        )
    return rows


def _time(value: float, choice: Choice) -> str:
    unit = str(choice.profile.metadata.get("unit", ""))
    return time_text(value, unit) if unit else "-"


def _prediction(choice: Choice) -> list[str]:
    timeline = choice.timeline
    if not choice.profile.metadata.get("unit"):
        return ["nothing was measured (profile=False): cut by the size of the parameters"]
    return [
        f"predicted: a step takes {time_text(timeline.makespan, 's')}, bubble {percent(timeline.bubble_makespan)}",
        *_table(rank_rows(choice)),
    ]


def _others(choice: Choice) -> list[str]:
    if len(choice.tried) < 2:
        return []
    rows = [["candidate", "stages/rank", "step", "bubble", "memory"]]
    for tried in choice.tried[:_SHOWN]:
        if tried.makespan is None:
            rows.append([tried.schedule, str(tried.stages_per_rank), "-", "-", tried.why.splitlines()[0][:60]])
        else:
            rows.append(
                [
                    tried.schedule,
                    str(tried.stages_per_rank),
                    _time(tried.makespan, choice),
                    percent(tried.bubble),
                    size_text(tried.memory),
                ]
            )
    left = len(choice.tried) - _SHOWN
    return ["", *_table(rows), *([f"and {left} more"] if left > 0 else [])]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = [
        not any(c.isdigit() for c in "".join(column[1:2])) or " .. " in "".join(column)
        for column in zip(*rows, strict=True)
    ]
    return [
        "  ".join(
            cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in rows
    ]
