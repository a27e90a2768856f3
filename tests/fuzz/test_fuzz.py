"""A minute of the fuzzer from fixed seeds, in parts that two workers share; `make fuzz SECONDS=3600` is the same for longer."""

from __future__ import annotations

import pytest

from tests.fuzz.fuzz import MOST_REFUSED, Fuzz
from tests.fuzz.pooled import runner
from tests.fuzz.run_threads import run_threads
from tests.gloo_pool import GlooPool


def play(fuzz: Fuzz, seeds: range, only: str) -> None:
    """Run the cases of these seeds; any finding fails, with its smaller case."""
    for seed in seeds:
        fuzz.seed(seed, only=only)
    assert not fuzz.findings, "\n".join(f"{case.dumps()}\n{found.details}" for case, found in fuzz.findings)
    assert fuzz.outcomes["right"] >= len(seeds) // 4, f"too few were run: {fuzz.outcomes}, {fuzz.left_out}"
    # Of so few one or two more are no sign.
    assert fuzz.refused * len(seeds) <= max(2, 2 * MOST_REFUSED * len(seeds)), fuzz.reasons


def quiet(text: str) -> None:
    """The failure says it all."""


@pytest.mark.parametrize("first", [0, 100, 200, 300])
def test_stages_made_by_hand(first: int) -> None:
    play(Fuzz(run_threads, say=quiet, seconds=30.0), range(first, first + 30), "hand")


@pytest.mark.parametrize("first", [0, 100, 200, 300])
def test_captured_models(first: int) -> None:
    play(Fuzz(run_threads, say=quiet, seconds=30.0, size="small"), range(first, first + 4), "captured")


def test_compiled_stages() -> None:
    play(Fuzz(run_threads, say=quiet, seconds=30.0, size="small"), range(3), "compiled")


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("only", ["replicas", "tensor"])
def test_meshes(gloo_pool: GlooPool, only: str) -> None:
    play(Fuzz(runner(gloo_pool), say=quiet, seconds=30.0, size="small"), range(5), only)
