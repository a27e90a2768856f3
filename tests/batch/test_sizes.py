"""How large the microbatches are, and what they weigh."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import microbatch_sizes, sizes_of, split_target, weighted_mean, weights
from penstock.errors import SplitError


@given(st.integers(1, 12), st.integers(0, 40))
def test_sizes_are_those_of_tensor_split(num_microbatches, more):
    batch_size = num_microbatches + more
    sizes = microbatch_sizes(batch_size, num_microbatches)
    assert sizes == tuple(len(part) for part in torch.arange(batch_size).tensor_split(num_microbatches))


@pytest.mark.parametrize(("batch_size", "num_microbatches"), [(8, 4), (6, 1), (12, 3)])
def test_an_even_batch_is_cut_as_chunk_cuts_it(batch_size, num_microbatches):
    chunks = torch.arange(batch_size).chunk(num_microbatches)
    assert microbatch_sizes(batch_size, num_microbatches) == tuple(len(part) for part in chunks)


@pytest.mark.parametrize(
    ("batch_size", "num_microbatches", "says"), [(3, 4, "batch of 3"), (3, 0, "is 0"), (0, 1, "no rows")]
)
def test_sizes_that_cannot_be(batch_size, num_microbatches, says):
    with pytest.raises(SplitError, match=says):
        microbatch_sizes(batch_size, num_microbatches)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_weights_are_exact(sizes):
    assert sum(weights(sizes)) == Fraction(1)
    assert [weight * sum(sizes) for weight in weights(sizes)] == sizes


def test_weights_of_nothing():
    with pytest.raises(SplitError, match=r"\(0, 0\)"):
        weights([0, 0])


def test_weighted_mean_is_the_mean_of_the_batch():
    losses = torch.rand(7, dtype=torch.float64)
    parts = split_target(losses, 3)
    mean = weighted_mean([part.mean() for part in parts], sizes_of(parts))
    torch.testing.assert_close(mean, losses.mean(), rtol=1e-14, atol=0)
    with pytest.raises(SplitError, match="3 values and 2"):
        weighted_mean([1.0, 2.0, 3.0], [1, 1])


def test_sizes_of_ready_microbatches():
    assert sizes_of([{"ids": torch.zeros(3, 2), "name": "a"}, {"ids": torch.zeros(1, 2), "name": "b"}]) == (3, 1)
    assert sizes_of([torch.zeros(3), None]) is None
    assert sizes_of([torch.tensor(1.0)]) is None
