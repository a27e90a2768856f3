"""Limits on the structure of the code: how long the path of a step is, and who reaches into whom.

Each limit is the value that was measured when it was last lowered. A change that lowers a value lowers its limit in the same
commit; no limit is ever raised.
"""

from __future__ import annotations

import ast
import re
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.comm.store import DistributedStore
from penstock.comm.transport import Transport
from penstock.front import sharing
from penstock.run.channel import Channel
from penstock.run.program import Program
from tests.gloo_pool import GlooPool

ROOT = Path(penstock.__file__).resolve().parent

# A warm step of two ranks as threads, one stage a rank, four microbatches.
FRAMES = 7  # of penstock between the caller of Pipeline.step and the module's forward
FILES = 35  # with a function that is called in the step, on either rank
CALLS = (367, 417)  # of penstock's functions, on rank 0 and on rank 1

# Methods and properties of subclasses of Schedule, by package, that hide one of a base class; constructors aside.
OVERRIDES = {"compat": 11}

# Attributes of a Schedule, Program, Transport or Channel that code of another package sets during a step.
SET_FROM_OUTSIDE = {"awaited", "position"}

STORE_CALLS = 15  # a second and rank, while steps run; most of them are made by the thread that watches other ranks

# Names of torch's that begin with an underscore, by package.
PRIVATE_NAMES = {
    "backward": 10,
    "batch": 1,
    "capture": 8,
    "checkpoint": 1,
    "compat": 5,
    "front": 2,
    "nest.py": 2,
    "observe": 1,
    "parallel": 6,
    "stage": 4,
}

# Per 1,000 lines of the packages that are read most.
CONDITIONAL_EXPRESSIONS, COMPREHENSIONS = 26.8, 46.4


class Probe(nn.Module):
    """A layer that counts the frames of penstock above its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.frames: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frame: FrameType | None = sys._getframe(1)
        found = 0
        while frame is not None and frame.f_code.co_filename != __file__:
            found += _package_of(frame.f_code.co_filename) is not None
            frame = frame.f_back
        self.frames.append(found)
        value: torch.Tensor = torch.tanh(self.linear(x))
        return value


def _package_of(filename: str) -> str | None:
    path = Path(filename)
    return path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else None


def _pipeline(group: Any, rank: int) -> tuple[penstock.Pipeline, Probe]:
    torch.manual_seed(0)
    probe = Probe()
    stage = penstock.PipelineStage(probe, rank, 2, torch.device("cpu"), group=group)
    pipe = penstock.Pipeline(
        stages=[stage], loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, group=group
    )
    return pipe, probe


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    return x, y


def _counted_step(transport: Transport) -> tuple[int, set[str], int]:
    """Frames, files and calls of a warm step; of the calls the fewest of three, since a wait may take more than one."""
    pipe, probe = _pipeline(transport, transport.rank)
    x, y = _batch()
    for _ in range(3):
        pipe.step(x, target=y)
    probe.frames.clear()
    files: set[str] = set()
    calls = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            files.add(frame.f_code.co_filename)
            calls += 1

    counts = []
    for _ in range(3):
        calls = 0
        sys.setprofile(profile)
        try:
            pipe.step(x, target=y)
        finally:
            sys.setprofile(None)
        counts.append(calls)
    return max(probe.frames), files, min(counts)


def test_the_path_of_a_step_does_not_get_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_LIVING", weakref.WeakSet())  # pipelines of other tests may still live
    found = penstock.LocalWorld(2).run(_counted_step)
    assert max(frames for frames, _, _ in found) <= FRAMES
    assert len(set().union(*(files for _, files, _ in found))) <= FILES
    assert all(calls <= limit for (_, _, calls), limit in zip(found, CALLS, strict=True)), [one[2] for one in found]


def _subclasses(cls: type) -> set[type]:
    direct: set[type] = set(cls.__subclasses__())
    return direct.union(*(_subclasses(one) for one in direct))


def test_no_more_methods_of_schedules_are_overridden() -> None:
    import penstock.compat.schedules
    import penstock.integrations.transformers

    classes = set().union(*(cls.__mro__ for cls in _subclasses(penstock.Schedule))) - set(penstock.Schedule.__mro__)
    found: Counter[str] = Counter()
    for cls in classes:
        if not cls.__module__.startswith("penstock."):
            continue
        for name, member in vars(cls).items():
            is_method = callable(member) or isinstance(member, property | classmethod | staticmethod)
            if is_method and not name.startswith("__") and hasattr(penstock.Schedule, name):
                found[cls.__module__.split(".")[1]] += 1
    assert all(count <= OVERRIDES.get(package, 0) for package, count in found.items()), dict(found)


@contextmanager
def _recorded_attributes(*classes: type) -> Iterator[set[str]]:
    """The attributes of instances of these classes that code of another package of penstock sets meanwhile."""
    found: set[str] = set()

    def set_attribute(self: object, name: str, value: object) -> None:
        setter = _package_of(sys._getframe(1).f_code.co_filename)
        owners = {cls.__module__.split(".")[1] for cls in type(self).__mro__ if cls.__module__.startswith("penstock.")}
        if setter is not None and setter not in owners:
            found.add(name)
        object.__setattr__(self, name, value)

    for cls in classes:
        cls.__setattr__ = set_attribute  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        for cls in classes:
            del cls.__setattr__


def test_nothing_more_is_set_on_an_object_of_another_package_in_a_step() -> None:
    def steps(transport: Transport) -> None:
        pipe, _ = _pipeline(transport, transport.rank)
        x, y = _batch()
        for _ in range(3):
            pipe.step(x, target=y)

    with _recorded_attributes(penstock.Schedule, Program, Transport, Channel) as found:
        penstock.LocalWorld(2).run(steps)
    assert found <= SET_FROM_OUTSIDE


def _store_calls() -> float:
    """Calls of the store a second while this rank makes steps."""
    pipe, _ = _pipeline(None, torch.distributed.get_rank())
    x, y = _batch()
    for _ in range(3):
        pipe.step(x, target=y)
    calls = 0
    original = DistributedStore._call

    def counting(self: DistributedStore, name: str, *args: object) -> Any:
        nonlocal calls
        calls += 1
        return original(self, name, *args)

    DistributedStore._call = counting  # type: ignore[method-assign]
    began = time.perf_counter()
    try:
        for _ in range(100):
            pipe.step(x, target=y)
            time.sleep(0.01)
        return calls / (time.perf_counter() - began)
    finally:
        DistributedStore._call = original  # type: ignore[method-assign]


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_steps_do_not_ask_the_store_more_often(gloo_pool: GlooPool) -> None:
    rates = gloo_pool.run(2, _store_calls)
    assert max(rates) <= STORE_CALLS, rates


def test_no_more_private_names_of_torch_are_used() -> None:
    found = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        names = re.findall(r"\btorch(?:\.\w+)*\._[a-z]\w*(?:\.\w+)*", path.read_text())
        found[path.relative_to(ROOT).parts[0]].update(names)
    counts = {package: len(names) for package, names in found.items() if names}
    assert all(count <= PRIVATE_NAMES.get(package, 0) for package, count in counts.items()), counts


def test_expressions_do_not_get_denser() -> None:
    conditional = comprehensions = lines = 0
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        lines += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            conditional += isinstance(node, ast.IfExp)
            comprehensions += isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
    assert 1000 * conditional / lines <= CONDITIONAL_EXPRESSIONS
    assert 1000 * comprehensions / lines <= COMPREHENSIONS


def test_named_schedules_have_no_methods() -> None:
    import penstock.integrations.transformers

    classes = {cls for cls in _subclasses(penstock.Schedule) if cls.__module__.startswith("penstock.")}
    for cls in {cls for cls in classes if not cls.__module__.startswith("penstock.compat.")}:
        methods = {name for name, member in vars(cls).items() if callable(member)} - {"__init__"}
        assert not methods, (cls, methods)
