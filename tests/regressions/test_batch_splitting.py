"""What existing systems do silently wrong when they cut a batch; each test tells the story of one such mistake."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from penstock.batch import (
    Microbatches,
    Replicate,
    microbatch_sizes,
    sizes_of,
    split_batch,
    split_target,
    weighted_mean,
)
from penstock.errors import SplitError


class Ragged(NamedTuple):
    rows: torch.Tensor
    offsets: torch.Tensor


@pytest.mark.parametrize(
    ("value", "leaf"),
    [
        (torch.zeros(16, 4), r"kwargs\['extra'\]"),
        (Ragged(torch.zeros(8, 4), torch.arange(9)), r"kwargs\['extra'\]\.offsets"),
        (torch.tensor(0.5), r"kwargs\['extra'\]"),
        (torch.zeros(1, 4), r"kwargs\['extra'\]"),
    ],
    ids=["a table of positions", "offsets in a NamedTuple", "a scalar", "a single row"],
)
def test_what_is_no_batch_is_not_cut(value, leaf):
    """A rotary table of (seq, dim) was cut along seq with the batch: each microbatch used wrong positions, no error.

    Now the leaf is named, and with Replicate it arrives whole.
    """
    x = torch.zeros(8, 4)
    with pytest.raises(SplitError, match=leaf):
        split_batch((x,), {"extra": value}, 4)
    _, kwargs = split_batch((x,), {"extra": value}, 4, kwargs_spec={"extra": Replicate()})
    for one in kwargs:
        whole = value if isinstance(value, torch.Tensor) else value.offsets
        part = one["extra"] if isinstance(value, torch.Tensor) else one["extra"].offsets
        assert part is whole


def test_an_uneven_batch_is_cut_without_stale_or_lost_rows():
    """Ten rows over four microbatches: a short last piece went into a larger buffer, and stale rows were computed on.

    Here every row is in exactly one microbatch, no microbatch is empty, and sizes differ by one at most.
    """
    x = torch.arange(10)
    args, _ = split_batch((x,), {}, 4)
    assert torch.equal(torch.cat([piece for (piece,) in args]), x)
    assert [len(piece) for (piece,) in args] == list(microbatch_sizes(10, 4)) == [3, 3, 2, 2]


def test_a_batch_smaller_than_the_number_of_microbatches_is_an_error():
    """Three rows over four microbatches quietly became three microbatches, and the schedule then failed elsewhere."""
    with pytest.raises(SplitError, match=r"the batch size 3 .* smaller than the number of microbatches, 4"):
        split_batch((torch.zeros(3, 2),), {}, 4)


def test_the_loss_of_an_uneven_batch_is_that_of_the_whole_batch():
    """Means over microbatches of 3, 2 and 2 rows were averaged with equal weights: not the loss of any batch."""
    torch.manual_seed(0)
    output, target = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    outputs, targets = split_target(output, 3), split_target(target, 3)
    losses = [nn.functional.mse_loss(*pair) for pair in zip(outputs, targets, strict=True)]
    whole = nn.functional.mse_loss(output, target)
    torch.testing.assert_close(weighted_mean(losses, sizes_of(targets)), whole, rtol=1e-14, atol=0)
    assert not torch.allclose(sum(losses) / 3, whole, rtol=1e-6, atol=0)


def test_targets_need_not_be_tensors():
    """A dict of labels and class weights was refused; None and numbers were too."""
    target = {"labels": torch.arange(6), "boxes": [torch.zeros(6, 4)], "smoothing": 0.1, "extra": None}
    parts = split_target(target, 3)
    assert [part["labels"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[2]["boxes"][0].shape == (2, 4)
    assert (parts[2]["smoothing"], parts[2]["extra"]) == (0.1, None)


def test_lengths_that_change_from_microbatch_to_microbatch():
    """Each microbatch padded to its own length could not be given at all; a ready list is handed on as it is."""
    ready = [torch.zeros(2, 5), torch.zeros(2, 9)]
    args, _ = split_batch((Microbatches(ready),), {}, 2)
    assert [piece.shape for (piece,) in args] == [(2, 5), (2, 9)]


def test_work_in_place_gives_the_batch_no_history():
    """A first layer that works in place made the user's batch part of the graph: the second step then failed with
    "backward through the graph a second time". The pieces share memory with the batch, but not its history.
    """
    x = torch.ones(4, 2)
    scale = nn.Parameter(torch.ones(2))
    for piece in [*(arg for (arg,) in split_batch((x,), {}, 2)[0]), *split_target(x, 2)]:
        piece.mul_(scale).sum().backward()
    assert not x.requires_grad
    assert x.grad_fn is None
