"""A minute of the fuzzer from fixed seeds, and the fuzzer itself; `make fuzz SECONDS=3600` is the same for longer."""

from __future__ import annotations

from tests.fuzz.fuzz import MOST_REFUSED, Fuzz
from tests.fuzz.run_threads import run_threads


def test_seeds_of_threads() -> None:
    fuzz = Fuzz(run_threads, say=lambda text: None)
    for seed in range(40):
        fuzz.seed(seed, only="hand")
    assert not fuzz.findings, fuzz.findings
    assert fuzz.refused <= MOST_REFUSED, fuzz.reasons
