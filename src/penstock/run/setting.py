"""What a program is bound for: a lowered plan, who does its actions, and with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.backward.offload_targets import OffloadTarget
from penstock.lower import ReceivePolicy
from penstock.parallel import DataParallel
from penstock.plan import Op, Overlap, Plan
from penstock.run.rng import MicrobatchRng

Call: TypeAlias = Callable[[], object]
"""Does an action."""
ActionKind: TypeAlias = Op | type[Overlap]
"""What tells one handler from another: an Op, or Overlap for pairs."""
Handler: TypeAlias = Callable[[Any, Any], Call]  # programs of compat are of a class of their own
"""``handler(program, action)`` is asked once for each action, before the first step; what it returns does the action."""
Handlers: TypeAlias = Mapping[ActionKind, Handler]


@dataclass(frozen=True)
class Binding:
    """How a schedule wants its plan bound."""

    receives: ReceivePolicy | None = None  # how far ahead receives are posted; None: as suits the mode
    rng: MicrobatchRng | None = None
    elsewhere: OffloadTarget | None = None  # where O takes what forwards saved; None: to the memory of the host
    # The user's handlers, which stand before the others.
    custom: dict[ActionKind, Handler] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Setting(Binding):
    """What a program is bound for."""

    plan: Plan  # lowered
    grad: bool  # training, or forward only
    reap: bool  # whether old sends may be waited for before the end: proved for plans that hold with blocking sends
    adapters: Mapping[int, DataParallel]  # by stage
    handlers: Handlers
