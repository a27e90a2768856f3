"""The simulated device itself: it computes what the CPU does, later; it notices what goes wrong with memory and order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.accelerator.pool import BOUND, SimPool


def test_it_computes_what_the_cpu_does_without_making_the_host_wait(sim: SimPool) -> None:
    assert sim.run(1, "lazy", trains) == [True]


def trains(device: torch.device) -> bool:
    sim = loaded()
    torch.manual_seed(0)
    here = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    there = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(
        device
    )
    there.load_state_dict(here.state_dict())
    tokens = torch.randint(10, (4, 6))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (here, there)]
    moved = tokens.to(device)
    sim.reset()
    for model, optimizer, given in zip((here, there), optimizers, (tokens, moved), strict=True):
        for _ in range(3):
            hidden = model(given)
            mixed = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
            nn.functional.cross_entropy(mixed.flatten(0, 1), given.flatten() % 8).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sim.waits() == [], sim.waits()
    for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(theirs.detach().cpu(), ours.detach(), rtol=1e-4, atol=1e-5)
    assert sim.violations() == [], sim.violations()
    return True


def test_kernels_run_later_and_waits_are_counted(sim: SimPool) -> None:
    assert sim.run(1, "lazy", waits) == [True]


def waits(device: torch.device) -> bool:
    sim = loaded()
    x = torch.ones(4, device=device)
    begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    begin.record()
    with held():
        sim.busy(0.05)
        x.add_(1)
        end.record()
        assert not end.query()
        assert sim.peek(x).tolist() == [1.0] * 4 or not torch.isfinite(sim.peek(x)).all()  # the kernel has not run
        assert sim.waits() == []
    assert x.sum().item() == 8
    assert begin.elapsed_time(end) >= 50
    for act, reason in {
        x.tolist: "a copy to the host",
        x.nonzero: "aten::nonzero",
        lambda: torch.tensor([1.0], device=device): "a copy from pageable memory of the host",
        torch.accelerator.synchronize: "synchronize",
        end.synchronize: "event.synchronize",
    }.items():
        sim.reset()
        act()
        assert [why for why in sim.waits() if why.startswith(reason)], (reason, sim.waits())
    pinned = torch.ones(4).pin_memory()
    sim.reset()
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    assert sim.waits() == []
    return True


def test_races_fresh_memory_and_use_after_free_are_noted(sim: SimPool) -> None:
    assert sim.run(1, "lazy", violates) == [True]


def violates(device: torch.device) -> bool:
    sim = loaded()
    other = torch.Stream(device=device)

    def noted(act: Any) -> set[str]:
        sim.reset()
        act()
        found = sim.violations()
        torch.accelerator.synchronize()
        return {text.split(":")[0] for text in found}

    def race() -> None:
        x = torch.ones(4, device=device)
        with other:
            x.add_(1)
        x.record_stream(other)

    def ordered() -> None:
        x = torch.ones(4, device=device)
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            x.add_(1)
        torch.accelerator.current_stream().wait_stream(other)

    def freed() -> None:
        x = torch.ones(4, device=device)
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            y = x * 2
        del x
        torch.accelerator.current_stream().wait_stream(other)
        del y

    def recorded() -> None:
        x = torch.ones(4, device=device)
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            y = x * 2
        x.record_stream(other)
        del x, y

    def fresh() -> None:
        torch.empty(4, device=device) * 2

    assert noted(race) == {"race"}
    assert noted(ordered) == set()
    assert noted(freed) == {"use after free"}
    assert noted(recorded) == set()
    assert noted(fresh) == {"fresh memory"}
    assert torch.isnan(torch.empty(4, device=device).cpu()).all()
    return True


def test_random_numbers_follow_the_seed_of_their_device(sim: SimPool) -> None:
    assert sim.run(1, "lazy", draws) == [True]


def draws(device: torch.device) -> bool:
    module: Any = torch.get_device_module(device)
    module.manual_seed_all(5)
    state = module.get_rng_state(device)
    first = nn.functional.dropout(torch.ones(64, device=device))
    module.set_rng_state(state, device)
    again = nn.functional.dropout(torch.ones(64, device=device))
    assert torch.equal(first.cpu(), again.cpu())
    other = torch.ones(64, device=torch.device("sim", 1))
    before = module.get_rng_state(device)
    nn.functional.dropout(other)
    assert torch.equal(module.get_rng_state(device), before)
    return True


def loaded() -> Any:
    from tests.accelerator.device import load

    return load()


@contextmanager
def held() -> Iterator[None]:
    """Inside, the device does nothing of what it is told on the current stream; it does so afterwards."""
    gate = loaded().hold()
    try:
        yield
    finally:
        gate.open()


def comes(event: torch.Event) -> bool:
    """Whether an event happens, however slow the machine is; if not, the test has failed anyway."""
    end = time.monotonic() + BOUND
    while not event.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
