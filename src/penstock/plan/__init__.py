"""What each rank does, in which order: actions, placement, stage graph, rules, plans, their check and their text."""

from __future__ import annotations

from penstock.plan.actions import Action, AnyAction, Overlap, pack, parse, unpack
from penstock.plan.check import check
from penstock.plan.graph import StageGraph
from penstock.plan.ops import Op
from penstock.plan.placement import Placement
from penstock.plan.plan import Plan
from penstock.plan.rules import Rules
from penstock.plan.text import dump, dumps, load, loads

__all__ = [
    "Action",
    "AnyAction",
    "Op",
    "Overlap",
    "Placement",
    "Plan",
    "Rules",
    "StageGraph",
    "check",
    "dump",
    "dumps",
    "load",
    "loads",
    "pack",
    "parse",
    "unpack",
]
