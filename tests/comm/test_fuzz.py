"""Whatever stands in the store or comes over the wire is read as what it is, or refused with an error of penstock's own.

The sources are real: each test takes something that a rank wrote, and changes, cuts or replaces parts of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.batch.batch import Rows
from penstock.comm import FailureRecord, LocalTransport, LocalWorld, collectives
from penstock.comm.framing import LONGEST, complete, frame, receive_frame
from penstock.errors import PenstockError, RunError, TransportError
from penstock.front import Choice
from penstock.health.decoding import loads, reading
from penstock.health.position import Whereabouts
from penstock.run import Schedule1F1B
from penstock.run.layout import Layout, described
from penstock.run.preamble import Preamble
from penstock.stage.boundary import flatten
from penstock.stage.pipeline_stage import PipelineStage

SCRAPS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCRAPS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def _layout() -> Layout:
    tensors, spec = flatten({"x": torch.zeros(2, 3), "more": [torch.zeros(1, requires_grad=True), 5, "text", None]})
    return Layout.of(tensors, spec)


def _choice(data: bytes) -> Choice:
    return Choice.loads(data.decode("utf-8", "replace"))


SOURCES: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "failure": (FailureRecord(1, 3, "3F0", 0, "ValueError: no").encode(), FailureRecord.decode),
    "description": (_layout().encode(), lambda data: Layout.decode(*described(data))),
    "gradients": (Layout.of([torch.zeros(2), None]).encode(), lambda data: Layout.decode(*described(data))),
    "whereabouts": (Whereabouts(1, 7, "1F0", 3, 9, "waits", 0, 12.0).encode(), Whereabouts.decode),
    "choice": (b'{"machine": {}, "plan": "0F0,0B0", "schedule": "gpipe", "placement": [0]}', _choice),
}


def read(name: str, data: bytes) -> None:
    """As it is, or as an error of penstock's."""
    with suppress(PenstockError):
        SOURCES[name][1](data)


@pytest.mark.parametrize("name", SOURCES)
@given(data=st.data())
def test_bytes_that_are_changed_cut_or_put_in(name: str, data: st.DataObject) -> None:
    whole_text = SOURCES[name][0]
    start = data.draw(st.integers(0, len(whole_text)))
    end = data.draw(st.integers(start, min(len(whole_text), start + 6)))
    read(name, whole_text[:start] + data.draw(st.binary(max_size=4)) + whole_text[end:])
    read(name, data.draw(st.binary(max_size=40)))


@pytest.mark.parametrize("name", SOURCES)
@given(data=st.data())
def test_values_of_another_kind_anywhere(name: str, data: st.DataObject) -> None:
    value = json.loads(SOURCES[name][0])
    walked: Any = value
    for _ in range(data.draw(st.integers(0, 3))):
        keys = list(walked) if isinstance(walked, dict) else list(range(len(walked)))
        inner = [key for key in keys if isinstance(walked[key], dict | list) and walked[key]]
        if not inner:
            break
        walked = walked[data.draw(st.sampled_from(inner))]
    keys = list(walked) if isinstance(walked, dict) else list(range(len(walked)))
    walked[data.draw(st.sampled_from(keys))] = data.draw(JSON)
    read(name, json.dumps(value).encode())


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"a":' * 50_000, b"1" * 100_000, b"null", b"{}"])
def test_bombs(name: str, data: bytes) -> None:
    with pytest.raises(PenstockError):
        SOURCES[name][1](data)


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 40], [-1], [1.5], [True], ["2"], [1] * 1000, "22", None])
def test_tensors_that_cannot_be_are_not_made(shape: Any) -> None:
    blob = json.dumps([[[shape, "float32", False, None, None]], "tensor"]).encode()
    with pytest.raises(PenstockError):
        described(blob)


@given(kind=st.integers(-(1 << 62), 1 << 62), length=st.integers(-(1 << 62), 1 << 62))
def test_headers_of_frames(kind: int, length: int) -> None:
    """A length that nobody would send is refused before memory is taken for it."""
    posted: list[int] = []

    class Done:
        def wait(self, *_: object) -> None: ...

    def receive(buffers: list[torch.Tensor]) -> Done:
        posted.append(buffers[0].numel())
        if len(posted) == 1:
            buffers[0].copy_(torch.tensor([kind, length]))
        return Done()

    if length > 4096 and length <= LONGEST:
        length = 4096
    try:
        found, payload = complete(receive_frame(receive))
        assert (found, len(payload)) == (kind, length)
    except TransportError:
        assert not 0 <= length <= LONGEST
        assert posted == [2], "nothing was allocated"


@given(payload=st.binary(max_size=64), kind=st.integers(0, 9))
def test_frames_come_back(payload: bytes, kind: int) -> None:
    parts = iter(frame(kind, payload))

    class Done:
        def wait(self, *_: object) -> None: ...

    def receive(buffers: list[torch.Tensor]) -> Done:
        buffers[0].copy_(next(parts))
        return Done()

    assert complete(receive_frame(receive)) == (kind, payload)


@given(st.lists(st.integers(-(1 << 62), 1 << 62), min_size=7, max_size=7))
def test_preambles_of_any_numbers_can_be_compared_and_shown(numbers: list[int]) -> None:
    preamble = Preamble(*numbers)
    assert str(numbers[0]) in str(preamble)
    Rows(8, 8).differs_from(Rows(preamble.rows, preamble.target_rows))


def test_frames_of_a_collective_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank says so, and names what it read."""
    monkeypatch.setattr(collectives, "_entry", lambda number, _: collectives._ENTRY.pack(number, 8) + b"nonsense")

    def run(transport: LocalTransport) -> str:
        with pytest.raises(TransportError, match="does everybody run the same penstock") as caught:
            transport.collectives.all_gather("a step", 1)
        return str(caught.value)

    assert all("'a step'" in text for text in LocalWorld(2).run(run))


def test_helpers_refuse_what_they_must() -> None:
    for wrong in (b'[true, "a"]', b'[1.0, "a"]', b"[1, 1]", b"[1]", b"{}"):
        with pytest.raises(TransportError, match="it cannot be read"), reading("it"):
            loads(wrong, tuple[int, str])
    with reading("it"):
        assert loads(b'[1, "a"]', tuple[int, str]) == (1, "a")
        assert loads(b"[true, true]", tuple[bool, object]) == (True, True), "an object may be anything"
    with pytest.raises(PenstockError, match="as it is"), reading("it"):
        raise PenstockError("as it is")


def test_a_forged_description_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    forged = b'[[[[-5], "float32", false, null]], "tensor"]'
    monkeypatch.setattr(Layout, "encode", lambda self: forged)
    found: list[str] = []

    def run(transport: LocalTransport) -> None:
        stage = PipelineStage(nn.Linear(4, 4), transport.rank, 2, "cpu", group=transport)
        x, y = torch.randn(2, 8, 4)
        with pytest.raises(PenstockError) as caught:
            Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss).step(x, target=y)
        found.append(str(caught.value))

    with pytest.raises(RunError, match="messages without their other half"):  # how many follow nobody could tell
        LocalWorld(2).run(run)
    assert len(found) == 2
    assert all("the description of a message cannot be read" in text for text in found), found
