"""Settings of the whole suite. Nothing here imports torch: the tests of the planning half run without it."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import HealthCheck, settings

from tests.gloo_pool import gloo_pool  # noqa: F401 - a fixture for every test

# Two workers on two cores: one thread each. Read by torch when it is first imported, and inherited by child processes.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A busy machine is not a failure of the code, so no deadlines. In CI the same examples come every time.
settings.register_profile(
    "penstock",
    deadline=None,
    max_examples=50,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that are marked as long")
    parser.addoption("--device", default="sim", help="where tests/accelerator runs: sim, or a real one such as cuda")


def pytest_sessionstart(session: pytest.Session) -> None:
    """pytest-rerunfailures asks the first process twice a test; without this the second question waits 20 ms for the first."""
    counts = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if isinstance(counts, socket.socket):
        counts.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long, and of which a shorter test shows the better part, runs when asked for, and every week."""
    if config.getoption("--long"):
        return
    for item in items:
        found = item.get_closest_marker("long")
        if found is not None:
            item.add_marker(pytest.mark.skip(reason=f"runs with --long, and every week; meanwhile {found.args[0]}"))
