"""group_rows(...): the rows of a batch into microbatches of even cost, from the rows' lengths.

Rows of unequal length make microbatches of unequal cost, and a pipeline goes at the pace of the longest: the ranks wait for it
one after another. Which rows go together is free, since the gradient of a batch is a sum over its rows. So the longest rows
are dealt out first, each to the microbatch that costs least so far; then rows are moved and exchanged between the costliest
microbatch and the others while that makes the costliest cheaper.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.checks import check_types
from penstock.errors import BalanceError, SplitError

_ROUNDING = 1e-12
_TRIES = 20_000  # rows put somewhere, while a way to keep to a limit is looked for: a fraction of a second


@dataclass(frozen=True)
class Grouped:
    """Which rows are in which microbatch: every row once, in the order of the batch within a microbatch.

    Grouped(rows=((0, 3), (1, 2)), costs=(5.0, 4.0)).imbalance  # 1.11
    """

    rows: tuple[tuple[int, ...], ...]  # by microbatch
    costs: tuple[float, ...]  # by microbatch

    @property
    def imbalance(self) -> float:
        """The costliest microbatch against the mean: 1 is even."""
        return max(self.sizes)

    @property
    def sizes(self) -> tuple[float, ...]:
        """Each microbatch against the mean: what `Costs.microbatches` takes."""
        mean = sum(self.costs) / len(self.costs)
        return tuple(cost / mean if mean else 1.0 for cost in self.costs)


def attention(width: float) -> Callable[[int], float]:
    """The cost of a row of a transformer of this hidden size: linear in its length, and quadratic by its attention.

    >>> [round(attention(1024.0)(length) / length, 2) for length in (1024, 6144)]
    [1.17, 2.0]
    """
    return lambda length: length * (1.0 + length / (6.0 * width))


def group_rows(
    lengths: Sequence[int],
    num_microbatches: int,
    *,
    cost: Callable[[int], float] = float,
    longest: float | None = None,
) -> Grouped:
    """Rows of these lengths into microbatches of even cost, none of which has more than `longest` in all.

    `cost` says what a row of a length costs: its length unless given, or `attention(hidden_size)`. The same for the same
    arguments, so every rank can do it by itself. Raises SplitError if there are fewer rows than microbatches, or no room.

    >>> group_rows([8, 1, 1, 6, 2, 2], 2).rows
    ((0, 5), (1, 2, 3, 4))
    """
    check_types("group_rows", BalanceError, lengths=(lengths, Sequence[float]), cost=(cost, Callable))
    check_types("group_rows", BalanceError, num_microbatches=(num_microbatches, int), longest=(longest, float | None))
    if not 1 <= num_microbatches <= len(lengths):
        raise SplitError(
            f"{len(lengths)} rows for {num_microbatches} microbatches; expected at least one row for each, and one microbatch"
        )
    prices = [float(cost(length)) for length in lengths]
    if any(length < 0 for length in lengths) or not all(0.0 <= price < float("inf") for price in prices):
        raise SplitError(
            "rows of negative or endless length or cost; expected lengths from 0 up, and finite costs from 0 up"
        )
    groups = [_Group([], 0.0, 0.0) for _ in range(num_microbatches)]
    room = float("inf") if longest is None else longest * (1 + 1e-9)
    for row in sorted(range(len(lengths)), key=lambda row: (-prices[row], -lengths[row], row)):
        fitting = [group for group in groups if group.length + lengths[row] <= room]
        if not fitting:
            found = _packed(lengths, num_microbatches, room)
            if found is None:
                raise SplitError(
                    f"row {row} of length {lengths[row]} finds no room: {sum(lengths)} in {num_microbatches} microbatches of at "
                    f"most {longest:g}; allow more, or make more microbatches"
                )
            groups = [_Group(rows, sum(prices[r] for r in rows), sum(lengths[r] for r in rows)) for rows in found]
            break
        least = min(fitting, key=lambda group: (group.cost, len(group.rows)))
        least.change(-1, row, prices[row], lengths[row])
    _settle(groups, [*prices, 0.0], [*lengths, 0], room)
    groups.sort(key=lambda group: min(group.rows))
    return Grouped(tuple(tuple(sorted(group.rows)) for group in groups), tuple(group.cost for group in groups))


@dataclass
class _Group:
    rows: list[int]
    cost: float
    length: float

    def change(self, goes: int, comes: int, cost: float, length: float) -> None:
        """A row for another; -1 is none."""
        self.rows = [row for row in (*self.rows, comes) if row not in (goes, -1)]
        self.cost += cost
        self.length += length


def _packed(lengths: Sequence[int], count: int, room: float) -> list[list[int]] | None:
    """Some rows for each of the groups, none of which has more than `room`; None: no way was found.

    The longest first, each into the fullest group that it fits into; if that ends in nothing, into the others one after another.
    All ways are tried if the rows are few; of many rows as many ways as there is time for.
    """
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    sums, spare, left = [0] * count, count * room - sum(lengths), _TRIES
    where: list[int] = []  # by row: the group that it is in; one less than there are `tries`
    tries = [] if spare < 0 else [_places(sums, lengths[rows[0]], room)]  # by row: the groups that it may still go to
    while tries and len(where) < len(rows) and left:
        if tries[-1]:
            left -= 1
            where.append(tries[-1].pop())
            sums[where[-1]] += lengths[rows[len(where) - 1]]
            lost = sum(room - total for total in sums if total + lengths[rows[-1]] > room)  # what no row will fill
            follower = lengths[rows[min(len(where), len(rows) - 1)]]
            tries.append(_places(sums, follower, room) if lost <= spare else [])
        else:  # the row before goes elsewhere
            tries.pop()
            if where:
                sums[where.pop()] -= lengths[rows[len(where)]]
    if len(where) < len(rows):
        return None
    groups = [[row for row, place in zip(rows, where, strict=True) if place == group] for group in range(count)]
    for group in groups:
        if not group:  # a group of more than one has a row to give
            group.append(max(groups, key=len).pop())
    return groups


def _places(sums: Sequence[int], length: int, room: float) -> list[int]:
    """The groups that a row fits into, the fullest last; of those that are equally full one."""
    found = {total: place for place, total in enumerate(sums) if total + length <= room}
    return [found[total] for total in sorted(found)]


def _settle(groups: list[_Group], prices: Sequence[float], lengths: Sequence[int], room: float) -> None:
    """Exchange rows between the costliest microbatch and others while the costliest of all becomes cheaper."""
    for _ in range(4 * len(prices)):
        high = max(groups, key=lambda group: group.cost)
        # With itself the costliest has nothing to exchange: there is no gap.
        if not any(_exchange(high, low, prices, lengths, room) for low in sorted(groups, key=lambda group: group.cost)):
            return


def _exchange(high: _Group, low: _Group, prices: Sequence[float], lengths: Sequence[int], room: float) -> bool:
    """Give `low` a row of `high`, for a cheaper one of its own or for nothing, if that leaves both cheaper than `high` was."""
    gap = high.cost - low.cost
    others = sorted(low.rows, key=prices.__getitem__)
    levels = [prices[row] for row in others]
    choices = []  # how far from half the gap; the row that goes; the one that comes, or -1, which costs nothing; what both change
    for row in high.rows:
        near = bisect_left(levels, prices[row] - gap / 2)
        for other in (*others[max(0, near - 1) : near + 1], *([-1] if len(high.rows) > 1 else [])):
            won, grown = prices[row] - prices[other], lengths[row] - lengths[other]
            fits = low.length + grown <= room and high.length - grown <= room
            if fits and gap * _ROUNDING < won < gap * (1 - _ROUNDING):
                choices.append((abs(won - gap / 2), row, other, won, grown))
    if not choices:
        return False
    _, row, other, won, grown = min(choices)
    high.change(row, other, -won, -grown)
    low.change(other, row, won, grown)
    return True
