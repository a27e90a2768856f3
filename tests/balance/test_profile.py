"""The profile: its JSON file, what crosses a cut, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.balance import LayerCost, Profile
from penstock.errors import BalanceError

sizes = st.integers(0, 10**15)
times = st.floats(0, 1e9)


@st.composite
def any_profile(draw: st.DrawFn) -> Profile:
    names = draw(st.lists(st.text(min_size=1), min_size=1, max_size=6, unique=True))
    shared = draw(st.dictionaries(st.text(), sizes, max_size=2))
    layers = [
        LayerCost(
            name, draw(times), draw(times), draw(times), draw(sizes), draw(sizes), draw(sizes), draw(sizes),
            shared=draw(st.frozensets(st.sampled_from(sorted(shared)))) if shared else frozenset(),
            last_use=draw(st.none() | st.integers(index, len(names) - 1)),
        )
        for index, name in enumerate(names)
    ]  # fmt: skip
    crossing = st.lists(sizes, min_size=len(names) - 1, max_size=len(names) - 1)
    metadata = draw(st.dictionaries(st.text(), st.integers() | st.text() | st.none(), max_size=2))
    return Profile(tuple(layers), shared, draw(st.none() | crossing.map(tuple)), metadata)


@given(any_profile())
def test_dumps_and_loads_are_inverses(profile: Profile) -> None:
    assert Profile.loads(profile.dumps()) == profile


def test_a_file_is_small_and_readable(tmp_path: Path) -> None:
    profile = Profile((LayerCost("embed", 0.25), LayerCost("head", shared=frozenset({"wte"}))), {"wte": 12})
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    lines = (tmp_path / "profile.json").read_text().splitlines()
    assert '  {"name": "embed", "forward": 0.25},' in lines


def test_what_crosses_a_cut_counts_values_that_skip() -> None:
    layers = (
        LayerCost("a", output_bytes=1),
        LayerCost("b", output_bytes=10, last_use=4),
        LayerCost("c", output_bytes=100, last_use=2),  # read by nobody
        LayerCost("d", output_bytes=1000),
        LayerCost("e", output_bytes=10_000),
    )
    assert Profile(layers).crossing == (1, 10, 10, 1010)
    assert Profile(layers, crossing_bytes=(4, 3, 2, 1)).crossing == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LayerCost("a", forward=-1.0), "forward is -1.0"),
        (lambda: LayerCost("a", backward_weight=float("nan")), "backward_weight is nan"),
        (lambda: LayerCost("a", parameter_bytes=1.5), "parameter_bytes is 1.5"),
        (lambda: LayerCost("a", shared="wte"), "expected a set of names"),
        (lambda: Profile(()), "no layers"),
        (lambda: Profile((LayerCost("a"), LayerCost("a"))), "layers 0 and 1 are both called 'a'"),
        (lambda: Profile((LayerCost("a", shared=frozenset({"w"})),)), r"shared_parameters=\{'w': bytes\}"),
        (lambda: Profile((LayerCost("a"), LayerCost("b", last_use=0))), "last_use is 0, expected an index from 1 to 1"),
        (lambda: Profile((LayerCost("a"), LayerCost("b")), crossing_bytes=()), "0 entries, expected 1"),
        (lambda: Profile((LayerCost("a"),), {"w": -1}), "shared parameter 'w' is -1"),
        (lambda: Profile.loads("no json"), "not JSON"),
        (lambda: Profile.loads("[]"), "no profile"),
        (lambda: Profile.loads('{"format": "penstock-profile", "version": 9}'), "version 9"),
        (lambda: Profile.loads('{"format": "penstock-profile", "version": 1}'), "list 'layers'"),
    ],
)
def test_what_is_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(BalanceError, match=says):
        make()


def test_unknown_fields_are_refused_not_dropped() -> None:
    data = json.loads(Profile((LayerCost("a"),)).dumps())
    data["layers"][0]["flops"] = 3
    with pytest.raises(BalanceError, match="flops"):
        Profile.loads(json.dumps(data))


def test_neither_torch_nor_numpy_is_loaded() -> None:
    code = "import sys, penstock.balance; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
