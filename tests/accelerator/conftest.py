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
def sim() -> Iterator[SimPool]:
    from tests.accelerator.device import ensure_built, why_not

    reason = why_not()
    if reason is not None:
        pytest.skip(f"THE ACCELERATOR TESTS DO NOT RUN: {reason}")
    ensure_built()
    pool = SimPool()
    yield pool
    pool.close()
