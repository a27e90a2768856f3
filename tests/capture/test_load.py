"""Stages of a model that is nowhere in memory: traced on the meta device, loaded by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock
from penstock.capture import load, materialise, pipeline
from penstock.capture.export import has_no_data
from penstock.errors import CaptureError, PenstockError
from tests.capture import toys


class Model(toys.Tied):
    """Tied weights, and a buffer that checkpoints leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.scale.sum()


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


def _fill(name: str, tensor: torch.Tensor) -> None:
    assert name == "scale"
    tensor.fill_(3.0)


def _of_fakes() -> nn.Module:
    with FakeTensorMode():
        return Model()


@pytest.mark.parametrize("make", [_on_meta, _of_fakes])
def test_stage_by_stage_from_a_state_dict(make: Callable[[], nn.Module]) -> None:
    real, ids = Model(), torch.randint(0, 11, (5, 3))
    values = {k: v for k, v in real.state_dict().items() if k != "head.weight"} | {"extra": torch.zeros(1)}
    pipe = pipeline(make(), (ids,))
    assert all(map(has_no_data, pipe.parameters()))
    reports = [materialise(pipe.get_stage_module(k), values, fill=_fill) for k in range(3)]
    assert torch.equal(pipe(ids), real(ids))
    assert reports[2].loaded == ("head.weight",)  # found under its other name
    assert all(report.unexpected == ("extra",) for report in reports)
    assert "1 loaded, 1 missing, 1 unexpected" in str(reports[2])
    assert reports[1].missing == ()


def test_only_the_own_stage_gets_memory() -> None:
    pipe = pipeline(_on_meta(), (torch.randint(0, 11, (5, 3)),))
    materialise(pipe.get_stage_module(1), Model().state_dict())
    on_meta = [any(p.is_meta for p in pipe.get_stage_module(k).parameters()) for k in range(3)]
    assert on_meta == [True, False, True]


def test_stages_given_together_go_on_sharing() -> None:
    real, ids = Model(), torch.randint(0, 11, (5, 3))
    pipe = pipeline(_on_meta(), (ids,))
    materialise(pipe, real.state_dict(), fill=_fill)
    assert pipe.get_stage_module(0).get_parameter("embed.weight") is pipe.get_stage_module(2).get_parameter(
        "head.weight"
    )
    assert torch.equal(pipe(ids), real(ids))


def test_values_that_are_nowhere_are_named() -> None:
    pipe = pipeline(_on_meta(), (torch.randint(0, 11, (5, 3)),))
    with pytest.raises(CaptureError, match=r"no value for scale: on the meta device, .* fill="):
        materialise(pipe, Model().state_dict())
    with pytest.raises(CaptureError, match=r"middle.bias is \(4,\) in the model and \(5,\) in the source"):
        materialise(pipe, Model().state_dict() | {"middle.bias": torch.zeros(5)}, fill=_fill)


@pytest.mark.parametrize("form", ["file", "folder", "index"])
def test_from_safetensors(tmp_path: Path, form: str) -> None:
    real, ids = Model(), torch.randint(0, 11, (5, 3))
    values = {k: v.clone() for k, v in real.state_dict().items() if k != "head.weight"}
    names = sorted(values)
    save_file({n: values[n] for n in names[:3]}, tmp_path / "a.safetensors")
    save_file({n: values[n] for n in names[3:]}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    where = ", ".join(f'"{n}": "{"a" if n in names[:3] else "b"}.safetensors"' for n in names)
    index.write_text(f'{{"weight_map": {{{where}}}}}')
    source = {"file": [tmp_path / "a.safetensors", tmp_path / "b.safetensors"], "folder": tmp_path, "index": index}[
        form
    ]
    pipe = pipeline(_on_meta(), (ids,))
    report = materialise(pipe, source, fill=_fill)
    assert report.unexpected == ()
    assert torch.equal(pipe(ids), real(ids))


def test_loading_into_real_stages() -> None:
    model, other, ids = Model(), Model(), torch.randint(0, 11, (5, 3))
    pipe = pipeline(copy.deepcopy(model), (ids,))
    report = load(pipe, other.state_dict())
    assert not report.missing
    assert torch.equal(pipe(ids), other(ids))
    pipe.load_state_dict(model.state_dict())
    assert torch.equal(pipe(ids), model(ids))
    with pytest.raises(CaptureError, match=r"unexpected \['nothing'\]"):
        pipe.load_state_dict(model.state_dict() | {"nothing": torch.zeros(1)})


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(4, device="meta"), "text"])
def test_nothing_is_changed_by_values_that_do_not_fit(wrong: object) -> None:
    """`load` copied tensor by tensor, and what came before the one that did not fit was changed."""
    ids = torch.randint(0, 11, (5, 3))
    pipe = pipeline(Model(), (ids,))
    before = copy.deepcopy(pipe.state_dict())
    other = Model().state_dict() | {"head.weight": torch.ones(11, 4), "embed.weight": torch.ones(11, 4)}
    last = list(before)[-1]
    for call in (load, materialise):
        with pytest.raises(PenstockError):
            call(pipe, other | {last: wrong})  # type: ignore[operator]
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    meta = pipeline(_on_meta(), (ids,))
    with pytest.raises(PenstockError):
        materialise(meta, other | {last: wrong}, fill=_fill)
    assert all(map(has_no_data, meta.parameters())), "not even memory was taken"


def test_nothing_is_changed_by_a_file_that_is_damaged_at_its_end(tmp_path: Path) -> None:
    ids = torch.randint(0, 11, (5, 3))
    pipe = pipeline(Model(), (ids,))
    before = copy.deepcopy(pipe.state_dict())
    saved = penstock.Pipeline(
        Model(), (ids,), loss_fn=lambda output, target: output.sum(), microbatches=1, profile=False
    )
    saved.save(tmp_path / "checkpoint")
    part = max(tmp_path.glob("checkpoint/*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(part.read_bytes())
    data[-20] ^= 1
    part.write_bytes(data)
    with pytest.raises(PenstockError):
        load(pipe, tmp_path / "checkpoint")
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
