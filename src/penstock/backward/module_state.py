"""State that a forward changes: random states, buffers, and attributes of modules. It is put back before a second run.

    state = ModuleState(module, device=device)
    state.begin_step(None)
    before = state.snapshot()
    module(x)
    state.learn(before)
    with state.replayed(before):
        module(x)                  # with the state of the first run; the state of now is put back afterwards

Before each forward, random states are copied, and the attributes and containers of the user's own modules. Buffers and other
tensors are copied in the first step, which shows those that forwards change; later steps copy these alone. State inside other
Python objects is not seen.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.nest import Value
from penstock.stage.buffers import CONTAINERS, Before, Buffers, Modes, Tables, accelerators

_OF_MODULES = frozenset(vars(nn.Module()))  # tables that every module has: parameters, hooks and the like


class Source(NamedTuple):
    """A source of random numbers."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class Snapshot(NamedTuple):
    """State at one time."""

    random: list[tuple[Source, Value]]
    buffers: Before
    tables: Tables  # attributes, and what is in containers

    def put_back(self) -> None:
        for source, state in self.random:
            source.set(state)
        self.tables.put_back()
        self.buffers.put_back()


class ModuleState:
    """State of the modules of one stage, and of random numbers."""

    def __init__(self, module: nn.Module, *, device: torch.device, keyed: bool = False) -> None:
        self.module = module
        devices = accelerators(device, (*module.parameters(), *module.buffers()))
        # With `keyed` these are set for each microbatch, by others.
        self.of_torch = [] if keyed else [Source(torch.get_rng_state, torch.set_rng_state), *map(_of_device, devices)]
        self.parts: list[nn.Module] = []
        self.modes: Modes = ()

    def begin_step(self, loss: object) -> None:
        """Find what there is. The loss is run again with the last stage; if it is a module, its state counts, too."""
        modules = [self.module, loss] if isinstance(loss, nn.Module) else [self.module]
        parts = [part for module in modules for part in module.modules()]
        if parts != self.parts:
            self.parts, self.buffers = parts, Buffers(modules)
            self.own = [part for part in parts if not is_of_torch(part)]
        self.modes = tuple([part.training for part in parts])
        tensors: dict[str, Tensor | None] = {}
        for place, part in enumerate(self.own):
            for name, value in vars(part).items():
                if isinstance(value, Tensor) and value.is_leaf and not value.requires_grad:
                    tensors[f"{name} of module {place}"] = value
        self.buffers.attributes = tensors

    def snapshot(self) -> Snapshot:
        """Return the state of now."""
        sources = [*self.of_torch, Source(random.getstate, random.setstate)]
        if (numpy := sys.modules.get("numpy")) is not None:
            sources.append(Source(numpy.random.get_state, numpy.random.set_state))
        tables: list[Value] = [vars(part) for part in self.own]
        for part in self.own:
            for name, value in vars(part).items():
                if isinstance(value, torch.Generator):
                    sources.append(Source(value.get_state, value.set_state))
                elif isinstance(value, random.Random):
                    sources.append(Source(value.getstate, value.setstate))
                elif type(value) in CONTAINERS and name not in _OF_MODULES:
                    tables.append(value)
        return Snapshot([(source, source.get()) for source in sources], self.buffers.look(self.modes), Tables(tables))

    def learn(self, before: Snapshot) -> list[str]:
        """After a forward, note which buffers it has changed. Return the names of those of which `before` has no copy."""
        lost = before.buffers.lost()
        self.buffers.learn(before.buffers)
        return lost

    @contextmanager
    def replayed(self, before: Snapshot) -> Iterator[None]:
        """Inside, the state is that of `before`. Afterwards it is what it was."""
        now = Snapshot(
            [(source, source.get()) for source, _ in before.random],
            before.buffers.again(),
            Tables([table for table, _ in before.tables.before]),
        )
        before.put_back()
        try:
            yield
        finally:
            now.put_back()


def is_of_torch(part: nn.Module) -> bool:
    """Return True if all of its class is torch's. (`fully_shard` makes classes that derive from the user's.)"""
    return all(kind.__module__.startswith(("torch.", "builtins")) for kind in type(part).__mro__)


def _of_device(device: torch.device) -> Source:
    module = torch.get_device_module(device)
    return Source(partial(module.get_rng_state, device), partial(module.set_rng_state, device=device))
