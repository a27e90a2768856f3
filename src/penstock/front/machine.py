"""What an action and a message cost on these ranks beside the computing: found by running a pipeline that computes nothing.

machine = measure_machine(ends)          # every rank calls it; a few steps of a few microseconds each

The steps run over the real connections with the real loop, so whatever these cost is in the figures.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock.balance import Profile
from penstock.capture import LayerSetting, pipeline, profile_layers
from penstock.comm import LocalTransport
from penstock.front.ends import Ends
from penstock.front.links import measure_links, unlike, usual_bandwidth
from penstock.front.stage_costs import Machine
from penstock.plan import Op
from penstock.plan.actions import MICROBATCH, MICROBATCH_SHIFT, OP
from penstock.run.schedule import Schedule
from penstock.schedules import get_schedule
from penstock.simulate import Timeline
from penstock.stage.pipeline_stage import PipelineStage

_MICROBATCHES = 8
_WARM_UP, _ROUNDS = 2, 3
_SLOWER = 1.25  # so many times what the others take is a rank of its own kind
_AT_LEAST = 0.1  # of what was measured for a layer counts, whatever the calls take


class _Nothing(nn.Module):
    """Hardly any work, with a gradient for its input and for a parameter."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def measure_machine(ends: Ends) -> Machine:
    """Overhead of an action, cost of posting a message, latency and bandwidth; medians, in seconds."""
    with torch.enable_grad():
        timelines = _record(ends)
    spans: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        for codes, starts, stops in zip(timeline.plan.codes, timeline.starts, timeline.ends, strict=True):
            for code, start, stop in zip(codes, starts, stops, strict=True):
                spans[code & OP].append(stop - start)
    posts = [span for op, found in spans.items() if Op(op).is_message for span in found]
    latency = min(_median(_latencies(timeline)) for timeline in timelines)  # what disturbs it only adds to it
    links = measure_links(ends)
    return Machine(
        latency=latency,
        bandwidth=usual_bandwidth(links),
        overhead=(_median(spans[Op.F]) + _median(spans[Op.B])) / 2,
        posting=_median(posts),
        links=unlike(links, latency),
    )


def together(ends: Ends, measure: Callable[[Callable[[], None]], Profile]) -> Callable[[], Profile]:
    """What layers cost while all ranks are at work: all measure at the same time, and the median over the ranks counts.

    `measure` is handed a barrier, to call when it is about to begin. The first rank asks for the outcome, and gets its own error
    if it had one; a rank that cannot measure is left out. Ranks that are threads of one process take turns anyway: the first
    one measures for all.
    """
    if isinstance(ends.transport, LocalTransport):
        return lambda: measure(lambda: None)
    begun = False

    def barrier() -> None:
        nonlocal begun
        begun = True
        ends.gather("about to measure the layers", None)

    mine: Profile | None = None
    problem: Exception | None = None
    try:
        mine = measure(barrier)
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one
        problem = error
    if not begun:
        barrier()
    texts = ends.gather("what the layers cost on each rank", None if mine is None else mine.dumps())

    def outcome() -> Profile:
        if problem is not None:
            raise problem
        assert mine is not None, "measured, or a problem"
        return typical(mine, [Profile.loads(text) for text in texts if text is not None])

    return outcome


def typical(mine: Profile, everyone: Sequence[Profile]) -> Profile:
    """The profile with the median times of all ranks that measured the same layers."""
    names = [layer.name for layer in mine.layers]
    alike = [profile for profile in everyone if [layer.name for layer in profile.layers] == names]
    if len(alike) < 2:
        return mine
    layers = tuple(
        replace(
            layer,
            **{
                name: statistics.median(getattr(profile.layers[k], name) for profile in alike)
                for name in ("forward", "backward_input", "backward_weight")
            },
        )
        for k, layer in enumerate(mine.layers)
    )
    unlike = rank_times([[layer.forward + layer.backward_input for layer in p.layers] for p in alike])
    backward = [statistics.median(whole) for whole in zip(*(p.metadata["backward"] for p in alike), strict=True)]
    facts = {**mine.metadata, "backward": backward, "ranks": len(alike)}
    if unlike is not None and len(alike) == len(everyone):
        facts["rank_times"] = unlike
    return replace(mine, layers=layers, metadata=facts)


def rank_times(times: Sequence[Sequence[float]]) -> list[float] | None:
    """How many times as long each rank takes as they do at the median, if one is slower with nearly all its layers.

    Noise slows some layers on a rank, a slow device all of them: three quarters must be slower by a quarter.

    >>> rank_times([[1.0, 1.0, 2.0, 1.0], [1.1, 0.9, 1.0, 1.0], [2.0, 2.2, 1.9, 2.0]])
    [1.0, 1.0, 1.909]
    >>> rank_times([[1.0, 1.0, 2.0, 1.0], [1.1, 0.9, 1.0, 1.0]])
    """
    usual = [statistics.median_low(column) or 1e-12 for column in zip(*times, strict=True)]
    ratios = [sorted(time / typical for time, typical in zip(row, usual, strict=True)) for row in times]
    if not any(row[len(row) // 4] > _SLOWER for row in ratios):
        return None
    return [round(statistics.median(row), 3) if row[len(row) // 4] > _SLOWER else 1.0 for row in ratios]


def without_calls(profile: Profile, device: torch.device) -> Profile:
    """What the layers cost inside a stage. Each was measured alone, and the calls around it are made once a stage.

    These calls are an action's overhead, which `measure_machine` finds; here they are taken off, as a layer that does
    nothing has them.
    """
    x = torch.ones(1, 1, device=device, requires_grad=True)
    with torch.enable_grad():
        setting = LayerSetting((x,), {}, device)
        empty = profile_layers(pipeline(_Nothing(device), (x,)), None, setting, progress=False)
    calls, full = empty.layers[0], empty.metadata["backward"][0]
    layers = tuple(
        replace(
            layer,
            forward=_less(layer.forward, calls.forward),
            backward_input=_less(layer.backward_input, calls.backward_input),
            backward_weight=_less(layer.backward_weight, calls.backward_weight),
        )
        for layer in profile.layers
    )
    backward = [_less(whole, full) for whole in profile.metadata["backward"]]
    return replace(profile, layers=layers, metadata={**profile.metadata, "backward": backward, "calls": "taken off"})


def _less(measured: float, calls: float) -> float:
    """What is left, and never nothing: the calls are not known that well."""
    return max(measured - calls, _AT_LEAST * measured)


def _median(values: Sequence[float]) -> float:
    return max(statistics.median(values), 0.0) if values else 0.0


def _record(ends: Ends) -> list[Timeline]:
    """Some steps of a stage a rank."""
    stage = PipelineStage(_Nothing(ends.device), ends.rank, ends.num_ranks, ends.device, group=ends.group)
    plan = get_schedule("1f1b")(ends.num_ranks, _MICROBATCHES)
    schedule = Schedule.from_plan(plan, [stage], loss_fn=lambda output, _: output.sum())
    batch = torch.ones(_MICROBATCHES, 1, device=ends.device)
    for _ in range(_WARM_UP):
        schedule.step(batch, target=batch, return_outputs=False)
    found = []
    for _ in range(_ROUNDS):
        with schedule.record() as recording:
            schedule.step(batch, target=batch, return_outputs=False)
        found.append(recording.timeline)
    return found


def _latencies(timeline: Timeline) -> list[float]:
    """Over each boundary, by the first forward and the last backward: for those the receiver does nothing but wait."""
    plan = timeline.plan
    times = [
        {
            (code & OP, code >> MICROBATCH_SHIFT & MICROBATCH): (start, end)
            for code, start, end in zip(plan.codes[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        }
        for rank in range(plan.num_ranks)
    ]
    last = plan.num_microbatches - 1
    found = []
    for rank in range(plan.num_ranks - 1):
        there = times[rank + 1][Op.F, 0][0] - times[rank][Op.SEND_F, 0][1]
        back = times[rank][Op.B, last][0] - times[rank + 1][Op.SEND_B, last][1]
        found.append((there + back) / 2)  # what the ranks' clocks differ by counts once this way and once that
    return found
