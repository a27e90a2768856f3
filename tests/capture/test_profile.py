"""Measured costs: what a profile says of a model, and what it leaves as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import penstock
from penstock.balance import Profile, balance
from penstock.errors import CaptureError
from tests.front.models import Words, batch, loss_fn, make


def test_a_profile_covers_the_model_and_leaves_it_alone(tmp_path: Path) -> None:
    model = make(tied=True, dropout=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens, labels = batch()
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    profile = penstock.profile(model, (tokens,), loss_fn=loss_fn, target=labels, repeats=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    assert all(layer.forward > 0 for layer in profile.layers)
    assert profile.shared_parameters == {"embed.weight": model.embed.weight.nbytes}
    own = sum(layer.parameter_bytes for layer in profile.layers)
    assert own == sum(p.nbytes for p in model.parameters()) - model.embed.weight.nbytes
    assert profile.layers[0].shared == profile.layers[-1].shared == {"embed.weight"}
    assert all(size >= tokens.numel() * 16 * 8 for size in profile.crossing), "a value of the full width crosses"
    blocks = [layer for layer in profile.layers if layer.name.endswith(".norm")]
    assert len({(layer.forward, layer.forward_peak) for layer in blocks}) == 1, "alike, so measured once"
    assert all(layer.forward_peak > 0 and layer.backward_peak > 0 for layer in blocks)
    assert any(layer.activation_to_weight > 0 for layer in profile.layers), "linear layers wait for the weight pass"

    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert balance(profile, 3).num_stages == 3


def test_a_model_without_data_can_be_measured() -> None:
    with torch.device("meta"):
        model = Words()
    profile = penstock.profile(model, (batch()[0],), repeats=1)
    assert sum(layer.parameter_bytes for layer in profile.layers) == sum(p.nbytes for p in model.parameters())
    assert all(p.is_meta for p in model.parameters())


def test_a_bar_shows_the_progress_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    penstock.profile(make(), (batch()[0],), repeats=1, progress=True)
    assert "profiling" in capsys.readouterr().err
    penstock.profile(make(), (batch()[0],), repeats=1)
    assert capsys.readouterr().err == "", "no terminal, no bar"


class Tick(torch.autograd.Function):
    """Takes as long as the next number says, on a clock of the test's own."""

    now = 0.0
    seconds: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Tick.now += Tick.seconds.pop(0) if Tick.seconds else 0.0
        return 1 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def test_times_are_medians_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a layer and a run that was disturbed do not count. Of two forwards in a run one is timed."""

    class Ticking(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Tick.apply(super().forward(x))  # type: ignore[no-any-return,no-untyped-call]

    pipe = penstock.pipeline(Ticking(4, 4), (torch.ones(2, 4),))
    monkeypatch.setattr("time.perf_counter", lambda: Tick.now)
    monkeypatch.setattr(Tick, "seconds", [0.9, 0, 0.1, 0, 0.4, 0, 0.2, 0])
    (layer,) = penstock.profile(pipe, (torch.ones(2, 4),), repeats=3).layers
    assert (layer.forward, layer.backward_input, layer.backward_weight) == (pytest.approx(0.2), 0, 0)


def test_no_repeats_are_refused() -> None:
    with pytest.raises(CaptureError, match="at least 1"):
        penstock.profile(make(), (batch()[0],), repeats=0)
