"""Measured costs: what a profile says of a model, and what it leaves as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.balance import Profile, balance
from penstock.capture.layer_costs import Layer
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
    assert len({(layer.forward, layer.activation_to_input) for layer in blocks}) == 1, "alike, so measured once"
    assert all(layer.activation_to_weight <= layer.activation_to_input for layer in profile.layers)
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


def test_times_are_medians_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a layer and a run that was disturbed do not count."""
    calls: dict[Layer, int] = {}
    split = Layer._split

    def disturbed(layer: Layer) -> tuple[float, float, float]:
        split(layer)
        calls[layer] = run = calls.get(layer, 0) + 1
        return (100.0, 100.0, 100.0) if run in (1, 3) else (1.0 + run, 2.0, 3.0)

    monkeypatch.setattr(Layer, "_split", disturbed)
    monkeypatch.setattr(Layer, "_now", lambda layer: 0.0)  # or a busy machine takes too long for all three runs
    profile = penstock.profile(make(), (batch()[0],), repeats=3)
    assert {(layer.forward, layer.backward_input, layer.backward_weight) for layer in profile.layers} == {
        (5.0, 2.0, 3.0)
    }


def test_no_repeats_are_refused() -> None:
    with pytest.raises(CaptureError, match="at least 1"):
        penstock.profile(make(), (batch()[0],), repeats=0)
