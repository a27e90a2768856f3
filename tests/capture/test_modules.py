"""Hand-made stages from a list of submodules, and ties between stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from penstock.capture import find_ties, pipeline, split_modules, tie
from penstock.errors import CaptureError, UnverifiedSplit


class Untraceable(nn.Module):
    """Branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.abs() if x.sum() > 1e9 else x)


NAMES = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]


def test_stages_in_order_are_the_model() -> None:
    model, ids = Untraceable(), torch.randint(0, 11, (3, 2))
    stages = split_modules(model, NAMES, 3, example=(ids,))
    value = ids
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, model(ids))
    held = [name for stage in stages for name in stage.state_dict()]
    assert sorted(held) == sorted(model.state_dict())
    assert stages[0].embed.weight is stages[2].head.weight  # type: ignore[union-attr]
    assert stages[0].ties == (tie([(0, "embed.weight"), (2, "head.weight")]),)


def test_a_submodule_may_be_called_in_another_way() -> None:
    model, x = nn.Sequential(nn.GRU(4, 4, batch_first=True), nn.Linear(4, 2)), torch.randn(2, 3, 4)
    with pytest.warns(UnverifiedSplit, match="not compared with the model"):
        stages = split_modules(model, ["0", "1"], 2, calls={"0": lambda gru, x: gru(x)[0]})
    assert torch.equal(stages[1](stages[0](x)), model[1](model[0](x)[0]))


class Residual(nn.Module):
    """Adds what its children do not; branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(nn.functional.dropout(x, 0.1, self.training))
        return self.norm(x if x.sum() < 1e9 else -x)  # type: ignore[no-any-return]


def test_a_chain_that_is_not_the_model_is_neither_proposed_nor_made() -> None:
    """The error of a failed capture proposed a call of split_modules that, pasted as printed, trained without the residuals."""
    model, x = Residual(), torch.randn(3, 4)
    names = ["layers.0", "layers.1", "layers.2", "norm"]
    before, random = model.norm.running_mean.clone(), torch.get_rng_state()  # type: ignore[operator]
    with pytest.raises(CaptureError, match=r"As they stand these are not the model: .* outputs differ"):
        pipeline(model, (x,), num_stages=2)
    with pytest.raises(
        CaptureError, match=r"called in this order, are not the model: .* calls= how each one is called"
    ):
        split_modules(model, names, 2, example=(x,))
    with pytest.warns(UnverifiedSplit, match="example="):
        split_modules(model, names, 2)
    with pytest.raises(CaptureError, match=r"example=\(x,\)"):
        split_modules(model, names, 2, example=x)  # type: ignore[arg-type]
    calls = {"layers.*": lambda layer, x: x + layer(nn.functional.dropout(x, 0.1, layer.training))}
    stages = split_modules(model, names, 2, calls=calls, example=(x,))
    assert torch.equal(model.norm.running_mean, before)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), random)
    assert len(stages) == 2


def test_a_chain_that_is_the_model_is_proposed() -> None:
    with pytest.raises(CaptureError) as caught:
        pipeline(Untraceable(), (torch.zeros(2, 3, dtype=torch.long),), num_stages=2)
    assert 'split_modules(model, ["embed", "layers.0"' in str(caught.value)
    assert "not the model" not in str(caught.value)


def test_what_cannot_be_right_is_refused() -> None:
    model = Untraceable()
    with pytest.raises(CaptureError, match=r"no named submodule holds layers\.3\.weight, layers\.3\.bias"):
        split_modules(model, NAMES[:4], 2)
    with pytest.raises(CaptureError, match="6 submodules cannot make 7 stages"):
        split_modules(model, NAMES, 7)
    with pytest.raises(CaptureError, match="no submodule 'heads'"):
        split_modules(model, [*NAMES, "heads"], 2)
    with pytest.raises(CaptureError, match="calls names 'blocks"):
        split_modules(model, NAMES, 2, calls={"blocks.*": lambda layer, x: layer(x)})
    with pytest.raises(CaptureError, match="at least two stages"):
        tie([(1, "a"), (1, "b")])


def test_ties_are_found_by_identity() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    assert find_ties([one, nn.Linear(2, 2), other]) == (tie([(0, "weight"), (2, "weight")]),)


class Weighing(nn.Module):
    """Has so many parameters, and does nothing."""

    def __init__(self, weight: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(weight))


@pytest.mark.parametrize("weights", [[3, 1, 1, 5, 1, 1, 4], [1] * 6, [9, 1, 1], [0, 0, 7, 0]])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_cuts_are_the_most_even_there_are(weights: list[int], count: int) -> None:
    def heaviest(cuts: tuple[int, ...]) -> int:
        return max(sum(weights[a:b]) for a, b in pairwise([0, *cuts, len(weights)]))

    model = nn.Sequential(*map(Weighing, weights))
    stages = split_modules(model, [str(place) for place in range(len(weights))], count)
    assert [name for stage in stages for name in stage.order] == [str(place) for place in range(len(weights))]
    found = [sum(p.numel() for p in stage.parameters()) for stage in stages]
    assert len(found) == count
    assert max(found) == min(map(heaviest, combinations(range(1, len(weights)), count - 1)))
