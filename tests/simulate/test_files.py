"""Costs as files: what is written is read again, and anything else is refused with what was expected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ParseError, PenstockError
from penstock.simulate import Costs, Link, dump_costs, dumps_costs, load_costs, loads_costs

PLAIN = Costs.per_rank(num_stages=3, forward=2.0)
FULL = replace(
    PLAIN,
    latency=0.5,
    bandwidth=10.0,
    output_bytes=(1.0, 2.0, 3.0),
    backward=(1.0, 1.0, 1.5),
    overlap=2.0,
    links=(Link(0, 1, 3.0), Link(1, 0, 0.0, 4.0)),
    microbatches=(1.0, 0.5),
    ranks=(1.0, 1.25, 1.0),
)


@pytest.mark.parametrize("costs", [PLAIN, FULL])
def test_what_is_written_is_read(costs: Costs, tmp_path: Path) -> None:
    assert loads_costs(dumps_costs(costs)) == costs
    dump_costs(costs, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == costs


def test_a_mark_of_the_encoding_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(dumps_costs(PLAIN), encoding="utf-8-sig")
    assert load_costs(tmp_path / "costs.json") == PLAIN


def test_the_least_file() -> None:
    costs = loads_costs('{"forward": [1, 2], "backward_input": [1, 2], "backward_weight": [1, 2]}')
    assert costs == Costs.per_stage((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "no costs; expected a JSON object"),
        ({"version": 2}, "no costs; expected a JSON object"),
        ({"forwards": [1.0]}, "costs have no 'forwards'"),
        ({"forward": 1.0}, "forward=1.0; expected a list of numbers"),
        ({"forward": None}, "forward=None; expected a list of numbers"),
        ({"forward": [1.0, "2", 3.0]}, "forward: '2'; expected a number"),
        ({"forward": [True, 2.0, 3.0]}, "forward: True; expected a number"),
        ({"forward": [1.0]}, "different numbers of stages"),
        ({"forward": [-1.0, 1.0, 1.0]}, "expected finite numbers >= 0"),
        ({"latency": 10**400}, "a number of 401 digits"),
        ({"latency": None}, "latency: None; expected a number"),
        ({"links": {"0": 1}}, "expected a list of objects"),
        ({"links": [{"sender": 0, "receiver": 1}]}, "expected an object with sender, receiver, latency"),
        ({"links": [{"sender": 0, "receiver": 1.0, "latency": 1}]}, "expected the numbers of two ranks"),
        ({"links": [{"sender": 0, "receiver": 0, "latency": 1}]}, "expected two ranks"),
        ({"links": [{"sender": 0, "receiver": 1, "latency": 1, "bandwidth": 5}]}, "needs output_bytes"),
    ],
)
def test_what_is_refused(change: dict[str, object], words: str) -> None:
    data = {**json.loads(dumps_costs(PLAIN)), **change}
    with pytest.raises(ParseError, match=words):
        loads_costs(json.dumps(data))


SCRAPS = st.none() | st.booleans() | st.floats() | st.text()
NESTS = st.recursive(SCRAPS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(NESTS)
def test_no_text_raises_anything_else(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value)[:-1], json.dumps({"forward": value})):
        with pytest.raises(PenstockError):
            loads_costs(text)


def test_deep_and_large_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="no JSON"):
        loads_costs("[" * 100_000)
    path = tmp_path / "large.json"
    path.write_bytes(b" " * (16 * 1024 * 1024 + 1))
    with pytest.raises(ParseError, match="16,777,217 bytes; such files are read up to"):
        load_costs(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ParseError, match="is no text"):
        load_costs(path)
