"""How far the ranks are from one another: pairs of neighbours send messages to and fro, before the first step.

links = measure_links(ends)          # every rank calls it

In a pipeline a rank exchanges messages with the ranks before and after it, so only these pairs are measured: first those that
begin with an even rank, all at the same time, then the others, then the last rank with the first. That is three rounds, for two
ranks as for a thousand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch

from penstock.comm.transport import Transport
from penstock.front.ends import Ends
from penstock.simulate import Link

SMALL, LARGE = 1, 1 << 18  # numbers (of 4 bytes) in the messages
_TIMES: Final = 6
_UNLIKE: Final = 1.5  # so many times what is usual is a link of its own,
_MATTERS: Final = 20e-6  # if that is so many seconds


def rounds(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours; in a round every rank is in one pair at most.

    >>> rounds(5)
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]
    """
    found = [[(rank, rank + 1) for rank in range(first, num_ranks - 1, 2)] for first in (0, 1)]
    return [pairs for pairs in (*found, [(num_ranks - 1, 0)] if num_ranks > 2 else []) if pairs]


def measure_links(ends: Ends) -> list[Link]:
    """Every pair of neighbours, both ways, in the order of the rounds: latency in seconds, and bytes a second if there is a
    limit.

    How long a small message takes is known there and back together alone, since the ranks have clocks of their own; how long
    many bytes take, is known each way.
    """
    if ends.num_ranks < 2:
        return []
    transport, number = ends.transport, ends.num_ranks
    ends.gather("about to measure the links", None)
    transport.connect({(ends.rank + 1) % number, (ends.rank - 1) % number})
    mine = []
    for pairs in rounds(number):
        for one, other in pairs:
            if ends.rank in (one, other):
                links = _measured(transport, one, other)
                mine += links if ends.rank == one else []
    return [Link(*link) for links in ends.gather("how far the ranks are from one another", mine) for link in links]


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
