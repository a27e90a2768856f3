"""The pool of processes with an accelerator. Skipped, with the reason, only where no compiler can be had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator.pool import SimPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/accelerator" in str(item.path):
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.xdist_group("accelerator"))
            item.add_marker(pytest.mark.timeout(600))  # the first of them builds the device


@pytest.fixture(scope="session")
def sim(accelerator: SimPool) -> SimPool:
    """Only on the simulated device: for what asks it what it has noticed."""
    if accelerator.device != "sim":
        pytest.skip("a real device does not tell of waits, races and communicators")
    return accelerator


@pytest.fixture(scope="session")
def accelerator(request: pytest.FixtureRequest) -> Iterator[SimPool]:
    """On the simulated device, or on the real one that `--device` names."""
    device = str(request.config.getoption("--device"))
    if device == "sim":
        from tests.accelerator.device import ensure_built, why_not

        reason = why_not()
        if reason is not None:
            pytest.skip(f"THE ACCELERATOR TESTS DO NOT RUN: {reason}")
        ensure_built()
    pool = SimPool(device)
    yield pool
    pool.close()
