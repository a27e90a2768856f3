"""How many rows each microbatch gets, and what each microbatch weighs in a mean over the whole batch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache, reduce

from penstock.errors import SplitError
from penstock.misfits import takes
from penstock.nest import Value


@takes(SplitError)
@lru_cache(maxsize=1024)
def microbatch_sizes(batch_size: int, num_microbatches: int) -> tuple[int, ...]:
    """The rows of each microbatch: as equal as possible, larger ones first.

        >>> microbatch_sizes(8, 4)
        (2, 2, 2, 2)
        >>> microbatch_sizes(10, 4)
        (3, 3, 2, 2)

    These are the sizes of `torch.tensor_split`, and those of `torch.chunk` whenever the batch divides evenly. No
    microbatch is ever empty: a batch with fewer rows than microbatches is a SplitError.
    """
    if num_microbatches < 1:
        raise SplitError(f"num_microbatches is {num_microbatches}; expected 1 or more")
    if batch_size < 1:
        raise SplitError(f"the batch has no rows; expected at least one for each of {num_microbatches} microbatches")
    if batch_size < num_microbatches:
        raise SplitError(
            f"a batch of {batch_size} cannot be cut into {num_microbatches} microbatches: "
            f"use a batch of {num_microbatches} or more, or at most {batch_size} microbatches"
        )
    return even_sizes(batch_size, num_microbatches)


def even_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Rows in parts as equal as possible, larger ones first; some have none if there are more parts than rows."""
    each, larger = divmod(rows, parts)
    return (each + 1,) * larger + (each,) * (parts - larger)


@takes(SplitError)
def weights(sizes: Iterable[int]) -> tuple[Fraction, ...]:
    """The part of the whole batch that each microbatch is; the sum is exactly 1.

    >>> weights([3, 2, 2])
    (Fraction(3, 7), Fraction(2, 7), Fraction(2, 7))
    """
    sizes = tuple(sizes)
    total = sum(sizes)
    if total <= 0 or min(sizes) < 0:
        raise SplitError(f"microbatch sizes {sizes} have no weights; expected counts of rows with a sum above 0")
    return tuple(Fraction(size, total) for size in sizes)


@takes(SplitError)
def weighted_mean(values: Sequence[Value], sizes: Sequence[int]) -> Value:
    """The mean over the whole batch from the means over its microbatches: tensors or numbers, weighted by size.

        >>> weighted_mean([1.0, 4.0], [3, 1])
        1.75

    With equal sizes this is the plain mean.
    """
    if len(values) != len(sizes):
        raise SplitError(f"{len(values)} values and {len(sizes)} microbatch sizes; expected one size for each value")
    return reduce(operator.add, (value * float(weight) for value, weight in zip(values, weights(sizes), strict=True)))
