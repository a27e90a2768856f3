"""Models that were hardly cut, and cuts that are far from even: the story of each."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import penstock
from penstock.capture import Pipe, pipeline

IDS = torch.randint(3, 128, (2, 24))
LABELS = torch.randint(3, 128, (2, 16))


def t5() -> nn.Module:
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_layers=3, num_decoder_layers=3, decoder_start_token_id=0, use_cache=False)
    )


def bart() -> nn.Module:
    sizes = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=128,
            d_model=32,
            encoder_layers=3,
            decoder_layers=3,
            max_position_embeddings=32,
            use_cache=False,
            **sizes,
        )
    )


class Narrowing(nn.Module):
    """A convolutional net: what crosses gets smaller towards the end."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16, 32, 64)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def by_work(model: nn.Module, num_stages: int, *args: Any, **kwargs: Any) -> Pipe:
    """Cut by the work in the graph, which is the same every time: a model without values is not measured."""
    return pipeline(model.to("meta"), args, kwargs, num_stages=num_stages)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("make", [t5, bart], ids=lambda make: make.__name__)
def test_an_encoder_with_a_decoder_is_cut_evenly(make: Any, num_stages: int) -> None:
    """The narrowest places of the whole model were candidates. In a decoder the encoder's output crosses every cut, so the only
    places left were at the end, behind the last cross-attention: T5 with 6 + 6 layers became stages of 150 and 3 ms."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", penstock.errors.UnevenCut)
        pipe = by_work(make(), num_stages, input_ids=IDS, labels=LABELS)
    cuts = pipe.info().cuts
    assert cuts is not None
    costs = [stage.cost for stage in cuts.stages]
    assert max(costs) < 1.2 * sum(costs) / num_stages
    assert pipe.info().uneven == ""


def test_an_encoder_with_a_decoder_still_computes_the_same() -> None:
    torch.manual_seed(0)
    model = t5().eval()
    example = {"input_ids": IDS, "labels": LABELS}
    pipe = pipeline(model, (), example, num_stages=3)
    torch.testing.assert_close(pipe(**example).loss, model(**example).loss)


def test_a_net_that_narrows_is_cut_evenly() -> None:
    """A relative: of a convolutional net only the end was narrow enough, and nine tenths of the work were one stage."""
    cuts = by_work(Narrowing(), 2, torch.randn(4, 3, 32, 32)).info().cuts
    assert cuts is not None
    assert max(stage.cost for stage in cuts.stages) < 1.3 * sum(stage.cost for stage in cuts.stages) / 2


class Lopsided(nn.Module):
    """One layer that costs more than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.large = nn.Linear(16, 4096)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.small:
            x = layer(x).relu()
        return self.large(x)  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_cut_evenly_says_so() -> None:
    with pytest.warns(
        penstock.errors.UnevenCut, match=r"stage 1 of 2 takes 2.0 times the mean.*it is large.*fewer stages"
    ):
        pipe = by_work(Lopsided(), 2, torch.randn(2, 16))
    assert pipe.info().uneven in str(pipe)
