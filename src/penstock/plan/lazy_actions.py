"""Lists: the packed actions of each rank, computed on first access."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import overload


class Lists(Sequence[tuple[int, ...]]):
    """The packed actions of each rank, as a tuple of tuples would have them; no rank pays for the others.

    >>> lists = Lists(1000, lambda rank: [rank])
    >>> lists[7], len(lists)
    ((7,), 1000)
    """

    def __init__(self, num_ranks: int, make: Callable[[int], Iterable[int]]) -> None:
        self._num_ranks, self._made = num_ranks, cache(lambda rank: tuple(make(rank)))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(self._made, range(self._num_ranks))  # an IndexError of `make` is no end of the lists

    def __len__(self) -> int:
        return self._num_ranks

    @overload
    def __getitem__(self, rank: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[int, ...], ...]: ...
    def __getitem__(self, rank: int | slice) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        try:
            asked = range(self._num_ranks)[rank]
        except IndexError:
            raise IndexError(f"rank {rank} of {self._num_ranks}") from None
        return self._made(asked) if isinstance(asked, int) else tuple(map(self._made, asked))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (tuple(self),)  # in a copy or another process, plain values
