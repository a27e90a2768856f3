"""What an action, a message and a copy cost on these ranks beside the computing: measured before the first step.

    machine = measure_machine(ends)          # every rank calls it; a few steps of a few microseconds each
    links = measure_links(ends)              # a part of that: how far the ranks are from one another
    speed = copy_bandwidth(torch.device("cpu"), Folder("/scratch"))     # bytes a second, before a plan may have O and L

A pipeline that computes nothing runs over the real connections with the real loop, so whatever these cost is in the figures.

For the links, pairs of neighbours send messages to and fro. In a pipeline a rank exchanges messages with the ranks before and
after it, so only these pairs are measured: first those that begin with an even rank, all at the same time, then the others, then
the last rank with the first. That is three rounds, for two ranks as for a thousand.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from penstock.backward.offload_targets import OffloadTarget
from penstock.comm.device_wait import wait_for_device
from penstock.comm.transport import Transport
from penstock.front.choice import Machine
from penstock.front.mesh import PipelineMesh
from penstock.plan import Op
from penstock.plan.actions import OP, microbatch_of
from penstock.run.schedule import Schedule
from penstock.schedules import get_schedule
from penstock.simulate import Link, Timeline
from penstock.stage.pipeline_stage import PipelineStage

_MICROBATCHES: Final = 8
_WARM_UP, _ROUNDS = 2, 3
SMALL, LARGE = 1, 1 << 18  # numbers (of 4 bytes) in the messages
_TIMES: Final = 6
_UNLIKE: Final = 1.5  # so many times what is usual is a link of its own,
_MATTERS: Final = 20e-6  # if that is so many seconds
_COPIED: Final = 8 << 20  # bytes of a copy
_BOUND: Final = 60.0  # seconds that one of them may take on a device


class NoWork(nn.Module):
    """Hardly any work, with a gradient for its input and for a parameter."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def measure_machine(ends: PipelineMesh) -> Machine:
    """Overhead of an action, cost of posting a message, latency and bandwidth; medians, in seconds."""
    with torch.enable_grad():
        steps = [_times(timeline) for timeline in _record(ends)]
    spans: dict[int, list[float]] = defaultdict(list)
    for times in steps:
        for (_, op, _), (start, end) in times.items():
            spans[op].append(end - start)
    posts = [span for op, found in spans.items() if Op(op).is_message for span in found]
    latency = min(_median(_latencies(times, ends.num_ranks)) for times in steps)  # what disturbs it only adds to it
    links = measure_links(ends)
    return Machine(
        latency=latency,
        bandwidth=usual_bandwidth(links),
        overhead=(_median(spans[Op.F]) + _median(spans[Op.B])) / 2,
        posting=_median(posts),
        links=unlike(links, latency),
    )


def _median(values: Sequence[float]) -> float:
    return max(statistics.median(values), 0.0) if values else 0.0


def _record(ends: PipelineMesh) -> list[Timeline]:
    """Some steps of a stage a rank."""
    stage = PipelineStage(NoWork(ends.device), ends.rank, ends.num_ranks, ends.device, group=ends.group)
    plan = get_schedule("1f1b")(ends.num_ranks, _MICROBATCHES)
    schedule = Schedule.from_plan(plan, [stage], loss_fn=lambda output, _: output.sum())
    batch = torch.ones(_MICROBATCHES, 1, device=ends.device)
    found = []
    for _ in range(_WARM_UP + _ROUNDS):
        with schedule.record() as recording:
            schedule.step(batch, target=batch, return_outputs=False)
        found.append(recording.timeline)
    return found[_WARM_UP:]


def _times(timeline: Timeline) -> dict[tuple[int, int, int], tuple[float, float]]:
    """By rank, op and microbatch: when it began and ended."""
    return {(rank, code & OP, microbatch_of(code)): (start, end) for rank, code, start, end in timeline.every()}


def _latencies(times: dict[tuple[int, int, int], tuple[float, float]], num_ranks: int) -> list[float]:
    """Over each boundary, by the first forward and the last backward: for those the receiver does nothing but wait."""
    last = _MICROBATCHES - 1
    found = []
    for rank in range(num_ranks - 1):
        there = times[rank + 1, Op.F, 0][0] - times[rank, Op.SEND_F, 0][1]
        back = times[rank, Op.B, last][0] - times[rank + 1, Op.SEND_B, last][1]
        found.append((there + back) / 2)  # what the ranks' clocks differ by counts once this way and once that
    return found


def rounds(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours; in a round every rank is in one pair at most.

    >>> rounds(5)
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]
    """
    found = [[(rank, rank + 1) for rank in range(first, num_ranks - 1, 2)] for first in (0, 1)]
    return [pairs for pairs in (*found, [(num_ranks - 1, 0)] if num_ranks > 2 else []) if pairs]


def measure_links(ends: PipelineMesh) -> list[Link]:
    """Every pair of neighbours, both ways, in the order of the rounds: latency in seconds, and bytes a second if there is a
    limit.

    How long a small message takes is known there and back together alone, since the ranks have clocks of their own; how long
    many bytes take, is known each way.
    """
    if ends.num_ranks < 2:
        return []
    transport, number = ends.transport, ends.num_ranks
    ends.own.barrier("about to measure the links")
    transport.connect({(ends.rank + 1) % number, (ends.rank - 1) % number})
    mine = []
    for pairs in rounds(number):
        for one, other in pairs:
            if ends.rank in (one, other):
                links = _measured(transport, one, other)
                mine += links if ends.rank == one else []
    return [
        Link(*link) for links in ends.own.all_gather("how far the ranks are from one another", mine) for link in links
    ]


def _measured(transport: Transport, one: int, other: int) -> list[Link]:
    """One way, and the other."""
    both = _ping(transport, one, other, (SMALL, SMALL))
    found = []
    for pair, sizes in (((one, other), (LARGE, SMALL)), ((other, one), (SMALL, LARGE))):
        extra = _ping(transport, one, other, sizes) - both
        found.append(Link(*pair, both / 2, 4 * (LARGE - SMALL) / extra if extra > 1e-7 else None))
    return found


def _ping(transport: Transport, one: int, other: int, sizes: tuple[int, int]) -> float:
    """Seconds of a message there and one back, the quickest of a few."""
    leads = transport.rank == one
    peer = other if leads else one
    buffers = [torch.zeros(size, dtype=torch.float32, device=transport.device) for size in sizes]
    found = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        for buffer, sends in zip(buffers, (leads, not leads), strict=True):
            (transport.isend(buffer, peer) if sends else transport.irecv(buffer, peer)).wait()
        if transport.device.type != "cpu":
            transport.wait_for_device()
        found.append(time.perf_counter() - began)
    return min(found)


def usual_bandwidth(links: Sequence[Link]) -> float | None:
    """The median bandwidth of the links that have a limit."""
    found = [link.bandwidth for link in links if link.bandwidth is not None]
    return statistics.median(found) if found else None


def unlike(links: Sequence[Link], latency: float) -> tuple[Link, ...]:
    """The links that are far slower than the others; `latency` is that of a usual message in a step.

    >>> near, far = Link(0, 1, 1e-5, 1e9), Link(1, 2, 5e-3, 1e7)
    >>> unlike([near, near, far], 3e-5)[0]
    Link(sender=1, receiver=2, latency=0.00502, bandwidth=10000000.0)
    """
    if len(links) < 2:
        return ()
    usual, width = statistics.median_low(link.latency for link in links), usual_bandwidth(links)
    found: list[Link] = []
    for link in links:
        late = link.latency > max(_UNLIKE * usual, usual + _MATTERS)
        narrow = link.bandwidth is not None and width is not None and link.bandwidth * _UNLIKE < width
        if late or narrow:
            seconds = latency + max(link.latency - usual, 0.0)
            found.append(link._replace(latency=round(seconds, 9), bandwidth=link.bandwidth if narrow else width))
    return tuple(found)


def copy_bandwidth(device: torch.device, elsewhere: OffloadTarget) -> float:
    """Bytes a second of a copy, the mean of the way there and the way back; the best of some rounds.

    >>> from penstock.backward.offload_targets import HostMemory
    >>> copy_bandwidth(torch.device("cpu"), HostMemory()) > 0
    True
    """
    flat = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
    elsewhere.put(flat).back()  # what is made once, such as a stream, is made
    return 2 * _COPIED / min(_round_trip(flat, elsewhere) for _ in range(_ROUNDS))


def _round_trip(flat: torch.Tensor, elsewhere: OffloadTarget) -> float:
    """Seconds there and back: of the host, or on a device by its own events, since the host does not wait for copies."""
    if flat.is_cpu:
        start = time.perf_counter()
        elsewhere.put(flat).back()
        return max(time.perf_counter() - start, 1e-9)
    begin, end = (torch.Event(flat.device, enable_timing=True) for _ in range(2))
    begin.record()
    elsewhere.put(flat).back()
    end.record()
    wait_for_device(flat.device, _BOUND)
    return max(begin.elapsed_time(end) / 1e3, 1e-9)
