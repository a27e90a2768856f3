"""search(...): a schedule made to measure, for given costs and a limit of memory, with a proof of how far it may be from best."""

from __future__ import annotations

from penstock.search.local_search import Searched
from penstock.search.lower_bound import floor
from penstock.search.pareto import Front, Point, front
from penstock.search.search import search

__all__ = ["Front", "Point", "Searched", "floor", "front", "search"]
