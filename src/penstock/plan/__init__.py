"""Plans: the actions of each rank in order, placement, stage graph, dependencies, the check, and the CSV format."""

from __future__ import annotations

from penstock.plan.actions import Action, AnyAction, Overlap, pack, parse, unpack
from penstock.plan.check import check
from penstock.plan.csv_format import dump, dumps, load, loads
from penstock.plan.dependencies import Rules
from penstock.plan.ops import Op
from penstock.plan.placement import Placement
from penstock.plan.plan import Plan
from penstock.plan.stage_graph import StageGraph

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
