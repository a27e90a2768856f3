"""Settings of the whole suite. Nothing here imports torch: the tests of the planning half run without it."""

from __future__ import annotations

import os

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
    parser.addoption("--device", default="sim", help="where tests/accelerator runs: sim, or a real one such as cuda")
