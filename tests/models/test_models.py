"""Real architectures: the stages together are the model, in what they return and in every gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from penstock.capture import SplitPoint, pipeline
from tests.capture.chain import assert_same, assert_same_grads, forward_backward
from tests.models.models import MODELS, Entry


def _loss(output: object) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    return loss if loss is not None else output.logits.float().square().mean()  # type: ignore[attr-defined]


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_four_stages_train_like_the_model(entry: Entry) -> None:
    torch.manual_seed(0)
    model = entry.make().train()
    example = entry.example()
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (), example, split_spec=dict.fromkeys(entry.cuts, SplitPoint.BEGINNING))
    assert pipe.num_stages == 4

    torch.manual_seed(1)
    expected = reference(**example)
    torch.manual_seed(1)
    assert_same(pipe(**example), expected)

    _loss(expected).backward()
    torch.manual_seed(1)
    assert_same(forward_backward(pipe, (), example, _loss), expected)
    assert_same_grads(model, reference)
    names = set(model.state_dict())
    assert set(pipe.state_dict()) == names
    assert all(set(pipe.get_stage_module(k).state_dict()) < names for k in range(4))


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_two_stages_evaluate_like_the_model(entry: Entry) -> None:
    torch.manual_seed(0)
    model = entry.make().eval()
    split = {entry.cuts[1]: SplitPoint.BEGINNING}
    pipe = pipeline(model, (), entry.example(), split_spec=split, dynamic_shapes={})
    assert pipe.num_stages == 2
    example = entry.example()  # other values than at capture
    with torch.no_grad():
        assert_same(pipe(**example), model(**example))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_cache_in_the_output_crosses_the_stages(name: str) -> None:
    entry = next(entry for entry in MODELS if entry.name == name)
    torch.manual_seed(0)
    model = entry.make().eval()
    example = {key: value for key, value in entry.example().items() if key != "use_cache"}
    pipe = pipeline(model, (), example, split_spec={entry.cuts[1]: SplitPoint.BEGINNING}, dynamic_shapes={})
    with torch.no_grad():
        result, expected = pipe(**example), model(**example)
    assert result.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() > 0
    assert_same(result, expected)
