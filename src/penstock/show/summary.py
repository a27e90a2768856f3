"""The figures of a timeline: as one JSON-ready object, as a few lines of text, and how single figures are written."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Final

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Plan
from penstock.simulate import Idle, Timeline

CAUSES: Final = tuple(field.name for field in fields(Idle))
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SURELY_BYTES: Final = 10_000  # activations are counted in ones, bytes in thousands


def summary(timeline: Timeline) -> dict[str, object]:
    """The figures of a timeline, ready for JSON.

    >>> from penstock.schedules import get_schedule
    >>> from penstock.simulate import simulate
    >>> summary(simulate(get_schedule("1f1b")(4, 8)))["makespan"]
    33.0
    """
    check_types("summary", PlanError, timeline=(timeline, Timeline))
    plan = timeline.plan
    return {
        "schedule": plan.name,
        "ranks": plan.num_ranks,
        "stages": plan.num_stages,
        "microbatches": plan.num_microbatches,
        "actions": plan.num_actions,
        "makespan": timeline.makespan,
        "bubble": {"makespan": timeline.bubble_makespan, "longest_rank": timeline.bubble_longest_rank},
        "peak_activations": list(timeline.peak_memory),
        "idle": idle_sums(timeline),
        "idle_per_rank": list(map(asdict, timeline.idle)),
        "busy_per_rank": list(timeline.busy),
    }


def summary_text(timeline: Timeline) -> str:
    """The figures of `summary` for people: one line for the whole, one line a rank.

    print(summary_text(simulate(plan)))
    """
    check_types("summary_text", PlanError, timeline=(timeline, Timeline))
    plan, unit = timeline.plan, timeline.unit
    causes = " ".join(f"{cause:>13}" for cause in CAUSES)
    makespan, bubble, longest, most = figures(timeline).values()
    lines = [
        f"{plan.name or 'plan'}: {sizes(plan)}, {plan.num_actions} actions",
        f"makespan {makespan}   bubble {bubble} of the makespan, {longest} on the longest rank   peak memory {most}",
        f"{'rank':>8} {'busy':>10} {causes} {'peak memory':>12}",
    ]
    peaks = timeline.peak_memory
    for rank, idle in enumerate(timeline.idle):
        causes = " ".join(f"{time_text(getattr(idle, cause), unit):>13}" for cause in CAUSES)
        held = memory_text(peaks[rank]) if timeline.memory else "-"
        lines.append(f"{rank:>8} {time_text(timeline.busy[rank], unit):>10} {causes} {held:>12}")
    return "\n".join(lines) + "\n"


def figures(timeline: Timeline) -> dict[str, str]:
    """The figures that every list of schedules shows, as texts; a dash where nothing is known of memory.

    >>> from penstock.schedules import get_schedule
    >>> from penstock.simulate import simulate
    >>> figures(simulate(get_schedule("1f1b")(4, 8)))
    {'makespan': '33', 'bubble': '27.3%', 'longest rank': '27.3%', 'peak memory': '4'}
    """
    return {
        "makespan": time_text(timeline.makespan, timeline.unit),
        "bubble": percent(timeline.bubble_makespan),
        "longest rank": percent(timeline.bubble_longest_rank),
        "peak memory": memory_text(max(timeline.peak_memory)) if holds(timeline) else "-",
    }


def idle_sums(timeline: Timeline) -> dict[str, float]:
    """By cause: the idle time of all ranks."""
    return {cause: sum(getattr(idle, cause) for idle in timeline.idle) for cause in CAUSES}


def sizes(plan: Plan) -> str:
    """``4 ranks, 8 stages, 16 microbatches``."""
    ranks, stages, count = plan.num_ranks, plan.num_stages, plan.num_microbatches
    return (
        f"{ranks} rank{'s' * (ranks > 1)}, {stages} stage{'s' * (stages > 1)}, {count} microbatch{'es' * (count > 1)}"
    )


def holds(timeline: Timeline) -> bool:
    """Return True if the memory of a timeline is known: without sizes in the costs it is zero at all times."""
    return any(timeline.peak_memory)


def percent(share: float) -> str:
    """``27.3%``; a bubble that is nothing but rounding is none."""
    return f"{max(share, 0.0) * 100 + 0.0:.1f}%"


def number(value: float) -> str:
    """Four digits, or all that stand before the point; never an exponent for what is large.

    >>> number(12345.6), number(0.33333), number(33.0)
    ('12346', '0.3333', '33')
    """
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def time_text(value: float, unit: str = "") -> str:
    """A time: seconds get the prefix that suits them, any other unit stays as it is.

    >>> time_text(0.00125, "s"), time_text(33.0), time_text(1 / 3, "slots"), time_text(0.3 - 0.1 * 3, "s")
    ('1.25 ms', '33', '0.3333 slots', '0 s')
    """
    if unit != "s":
        return number(value) + (f" {unit}" if unit else "")
    if abs(value) < 1e-13:  # nothing is measured that finely: what is left is rounding
        return "0 s"
    scale, name = next(((s, n) for s, n in _SECONDS if abs(value) >= s), _SECONDS[-1])
    return f"{number(value / scale)} {name}"


def memory_text(value: float) -> str:
    """Format an amount of memory: a number of activations as it is, bytes with a prefix.

    >>> memory_text(4.0), memory_text(3_500_000.0)
    ('4', '3.338 MiB')
    """
    if abs(value) < _SURELY_BYTES:
        return number(value)
    scale, name = next((s, n) for s, n in _BYTES if abs(value) >= s)
    return f"{number(value / scale)} {name}"
