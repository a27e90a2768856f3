"""search(...): a schedule made to measure, for given costs and a limit of memory, with a proof of how far it may be from best."""

from __future__ import annotations

from penstock.search.floor import floor
from penstock.search.lane import Searched
from penstock.search.search import search

__all__ = ["Searched", "floor", "search"]
