"""What goes with a model through a checkpoint: optimizer, scheduler, scaler, data, and the random state of each rank."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from penstock.checkpoint.manifest import Damaged
from penstock.checkpoint.plain import decode, encode
from penstock.errors import RunError, StageError
from penstock.nest import Value


class Stateful(Protocol):
    """What a checkpoint keeps the state of: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> dict[str, Value]: ...

    def load_state_dict(self, state: Value, /) -> object: ...


@dataclass(frozen=True)
class Companions:
    """Each may be missing."""

    optimizer: Value = None
    scheduler: object = None  # of the learning rate; like the others, anything with state_dict() and load_state_dict()
    data: object = None  # a data loader that knows its position
    scaler: object = None

    def parts(self) -> Iterator[tuple[str, Stateful]]:
        """Those whose state is small, and each rank's own."""
        for name in ("scheduler", "data", "scaler"):
            one = getattr(self, name)
            if one is None:
                continue
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise StageError(
                    f"{name} is a {type(one).__name__}; expected something with state_dict() and load_state_dict(). What is "
                    f"plain numbers and texts goes into extra={{{name!r}: ...}}"
                )
            yield name, one

    def dumps(self, device: torch.device) -> bytes:
        """The states, and the random generators of this rank."""
        try:
            found = {name: encode(one.state_dict()) for name, one in self.parts()}
        except RecursionError as error:
            raise RunError("the state of a scheduler or of the data contains itself, and cannot be saved") from error
        return json.dumps({**found, "random": encode(random_state(device))}).encode()

    def apply(self, states: dict[str, object]) -> dict[str, object]:
        """Give each its state; what they had before comes back. If one refuses, all have what they had."""
        before: dict[str, object] = {}
        try:
            for name, one in self.parts():
                if name not in states:
                    continue
                kept = copy.deepcopy(one.state_dict())
                before[name] = kept
                one.load_state_dict(states[name])
        except Exception as error:
            self.undo(before)
            raise RunError(f"{name} does not take the state that was saved: {type(error).__name__}: {error}") from error
        return before

    def undo(self, before: dict[str, object]) -> None:
        for name, one in self.parts():
            if name in before:
                one.load_state_dict(before[name])


def read_states(data: bytes, source: str) -> dict[str, object]:
    """What `dumps` wrote."""
    try:
        found = decode(json.loads(data))
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{source} cannot be read: {error}") from error


class Generator(NamedTuple):
    """Where random numbers come from."""

    state: Callable[[], object]
    set_state: Callable[[Value], object]
    try_state: Callable[[Value], object]  # on a generator of nobody's


def _generators(device: torch.device) -> dict[str, Generator]:
    """Those of torch, of Python, of numpy if it is in use, and of the device if it is an accelerator."""
    found = {
        "torch": Generator(torch.get_rng_state, torch.set_rng_state, lambda state: torch.Generator().set_state(state)),
        "python": Generator(random.getstate, random.setstate, lambda state: random.Random().setstate(state)),
    }
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        found["numpy"] = Generator(numpy.get_state, numpy.set_state, lambda s: numpy.RandomState().set_state(s))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        found[device.type] = Generator(
            lambda: module.get_rng_state(device),
            lambda state: module.set_rng_state(state, device),
            lambda state: torch.Generator(device).set_state(state),
        )
    return found


def random_state(device: torch.device) -> dict[str, object]:
    """The state of all random numbers of this rank."""
    return {name: one.state() for name, one in _generators(device).items()}


def check_random_state(found: Value, device: torch.device, source: str) -> None:
    """Whether `set_random_state` would take it."""
    try:
        for name, one in _generators(device).items():
            if name in found or name in ("torch", "python"):
                one.try_state(found[name])
    except Exception as error:  # whatever the value leads them to
        raise Damaged(f"{source} has a random state that cannot be taken: {type(error).__name__}: {error}") from error


def set_random_state(found: Mapping[str, Value], device: torch.device) -> None:
    for name, one in _generators(device).items():
        if name in found:
            one.set_state(found[name])
