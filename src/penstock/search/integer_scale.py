"""Factors that turn times and sizes into integers."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import gcd, lcm
from typing import Final

_FINEST: Final = 10**6  # the largest denominator that counts as an exact number


def whole_factor(numbers: Iterable[float], *, at_most: float) -> int | None:
    """The least factor that makes all numbers whole; None if it is above `at_most`, or if there is none.

    >>> whole_factor([0.5, 0.75, 2.0], at_most=1e6), whole_factor([2**0.5], at_most=1e6)
    (4, None)
    """
    factor = 1
    for number in set(numbers):
        exact = Fraction(number).limit_denominator(_FINEST)
        factor = lcm(factor, exact.denominator)
        if abs(exact - Fraction(number)) > 1e-12 * abs(number) or factor > at_most:
            return None
    return factor


def within(limit: float, sizes: Iterable[float]) -> float:
    """The most that things of these sizes can come to within the limit, as far as that is known.

    >>> within(2.5, [1.0]), within(2.5, [0.5, 1.0]), within(2.5, [2**0.5])
    (2.0, 2.5, 2.5)
    """
    different = {size for size in sizes if size > 0.0}
    factor = whole_factor(different, at_most=_FINEST)
    if not different or factor is None or limit == float("inf"):
        return limit
    unit = gcd(*(round(factor * size) for size in different))
    units = limit * (1 + 1e-9) * factor / unit
    return limit if units == float("inf") else min(limit, int(units) * unit / factor)
