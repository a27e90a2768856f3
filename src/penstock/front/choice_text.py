"""What was chosen, and why, for people."""

from __future__ import annotations

from penstock.balance.cuts import aligned, size_text
from penstock.front.choice import Built, Choice
from penstock.plan import Op
from penstock.show.summary import percent, time_text

_SHOWN = 6  # candidates in the list


def explanation(built: Built) -> str:
    """The table of stages, the schedule and what it was chosen among, and the prediction."""
    plan = built.plan
    head = (
        f"{_count(plan.num_stages, 'stage')} on {_count(plan.num_ranks, 'rank')} ({plan.placement.kind}), "
        f"{_count(plan.num_microbatches, 'microbatch', 'microbatches')}, schedule {plan.name}"
    )
    if built.choice is None:
        rows = [["stage", "rank", "parameters"]]
        for stage in built.stages:
            size = sum(p.nbytes for p in stage.submod.parameters())
            rows.append([str(stage.stage_index), str(stage.group_rank), size_text(size)])
        return "\n".join([f"{head}: stages made by hand, nothing measured", *aligned(rows), ""])
    choice = built.choice
    found = [*_prediction(choice), *_limit(choice), *_others(choice)]
    return "\n".join([f"{head}: {choice.why}", "", *aligned(stage_rows(choice)), "", *found, ""])


def stage_rows(choice: Choice) -> list[list[str]]:
    """The table of stages; the first row is its head."""
    rows = [["stage", "rank", "layers", "parameters", "forward", "backward", "activations", "sends"]]
    costs, layers = choice.costs, choice.profile.layers
    backward = [costs.time(Op.B, stage) for stage in range(costs.num_stages)]
    known = not choice.profile.metadata.get("estimated")
    for stage, (start, stop) in enumerate(choice.bounds):
        names = layers[start].name if stop - start == 1 else f"{layers[start].name} .. {layers[stop - 1].name}"
        rows.append(
            [
                str(stage),
                str(choice.plan.placement.rank_of(stage)),
                names,
                size_text(choice.parameter_bytes([stage])),
                _cost(costs.forward[stage], choice, whole=sum(costs.forward)),
                _cost(backward[stage], choice, whole=sum(backward)),
                size_text(int(costs.held_to_input[stage])) if known else "-",
                size_text(int(costs.output_bytes[stage])) if known and costs.output_bytes else "-",
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
        held = size_text(round(peak)) if any(timeline.peak_memory) else "-"
        rows.append([str(rank), percent(busy), held, size_text(state), size_text(round(peak) + state)])
    return rows


def _count(number: int, one: str, many: str | None = None) -> str:
    """
    >>> _count(1, "stage"), _count(3, "stage")
    ('1 stage', '3 stages')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def _cost(value: float, choice: Choice, *, whole: float) -> str:
    """Seconds; or, where the costs are in no unit of time, the share of the whole."""
    return time_text(value, "s") if choice.is_timed else percent(value / whole if whole else 0.0)


def _prediction(choice: Choice) -> list[str]:
    timeline = choice.timeline
    bubble = f"bubble {percent(timeline.bubble_makespan)}"
    if not choice.is_timed:
        basis = choice.profile.metadata.get("estimated")
        estimated = f"costs are estimated by {basis}, activations are not known"
        said = estimated if basis else "the profile is not in seconds"
        return [f"nothing was measured: {said}, messages count as free", f"estimated: {bubble}"]
    lines = [f"predicted: a step takes {time_text(choice.predicted, 's')}, {bubble}"]
    if choice.calibrated is not None:  # steps were measured
        lines.append(
            f"of that: {time_text(timeline.makespan, 's')} actions and messages, {time_text(choice.costs.uneven, 's')} since "
            f"equal actions do not take equal time, {time_text(choice.machine.around, 's')} before the first action and after "
            "the last"
        )
    lines.append(f"reckoned with, as measured between these ranks: {_machine(choice)}")
    return lines + aligned(rank_rows(choice))


def _machine(choice: Choice) -> str:
    machine = choice.machine
    found = [f"{time_text(machine.overhead, 's')} for an action"]
    if choice.plan.num_ranks > 1:
        found.append(f"{time_text(machine.posting, 's')} to send or receive")
        found.append(f"{time_text(machine.latency, 's')} under way")
        if machine.bandwidth is not None:
            found.append(f"{size_text(round(machine.bandwidth))} a second")
        far = [f"{link.sender} to {link.receiver} {time_text(link.latency, 's')}" for link in machine.links]
        found += [f"further apart: {', '.join(far)}"] if far else []
    if machine.copy_bandwidth is not None:
        found.append(f"copies at {size_text(round(machine.copy_bandwidth))} a second")
    return ", ".join(found)


def _limit(choice: Choice) -> list[str]:
    """What keeping to a limit of memory took."""
    if choice.smallest_limit is None:
        return []
    rows = [["stage", "holds less by", "microbatches", "saves", "costs"]]
    for one in choice.spared:
        time = _cost(one.time, choice, whole=choice.timeline.makespan)
        of = f"{one.microbatches} of {choice.plan.num_microbatches}"
        rows.append([str(one.stage), one.way, of, size_text(one.size), time])
    spared = aligned(rows) if choice.spared else ["no stage has to hold less for it"]
    assumed = f"reckoned with {choice.optimizer_bytes:g} bytes of optimizer state for each byte of parameters"
    smallest = f"the smallest limit that would do is {size_text(choice.smallest_limit)}"
    return [f"within the limit of memory; {assumed}; {smallest}", *spared]


def tried_rows(choice: Choice) -> list[list[str]]:
    """The candidates: schedule, stages a rank, step, bubble and memory; of one that cannot be, why in place of the memory."""
    best = choice.tried[0].makespan or 1.0
    rows = []
    for tried in choice.tried:
        figures = ["-", "-", tried.why.partition("\n")[0]]
        if tried.makespan is not None:
            step = time_text(tried.makespan, "s") if choice.is_timed else f"{tried.makespan / best:.3f} x"
            figures = [step, percent(tried.bubble), size_text(tried.memory)]
        rows.append([tried.schedule, str(tried.stages_per_rank), *figures])
    return rows


def _others(choice: Choice) -> list[str]:
    if len(choice.tried) < 2:
        return []
    rows = [[*figures, memory[:60]] for *figures, memory in tried_rows(choice)[:_SHOWN]]
    left = len(choice.tried) - _SHOWN
    head = ["candidate", "stages/rank", "step", "bubble", "memory"]
    return ["", *aligned([head, *rows]), *([f"and {left} more"] if left > 0 else [])]
