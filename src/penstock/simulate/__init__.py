"""Costs, and simulate(plan, costs) -> Timeline: spans, bubble, idle time by cause, memory."""

from __future__ import annotations

from penstock.simulate.costs import Costs
from penstock.simulate.idle import Idle
from penstock.simulate.simulate import simulate
from penstock.simulate.timeline import Message, Span, Timeline

__all__ = ["Costs", "Idle", "Message", "Span", "Timeline", "simulate"]
