"""Costs, and simulate(plan, costs) -> Timeline: spans, bubble, idle time by cause, memory."""

from __future__ import annotations

from penstock.simulate.costs import Costs, Link
from penstock.simulate.costs_file import dump_costs, dumps_costs, load_costs, loads_costs
from penstock.simulate.fit_costs import measured_costs
from penstock.simulate.simulate import simulate
from penstock.simulate.timeline import Idle, Message, Span, Timeline

__all__ = [
    "Costs",
    "Idle",
    "Link",
    "Message",
    "Span",
    "Timeline",
    "dump_costs",
    "dumps_costs",
    "load_costs",
    "loads_costs",
    "measured_costs",
    "simulate",
]
