"""Batches of an iterable by number: the same whoever asks, and however often the model draws random numbers in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader

from penstock.errors import PenstockError
from penstock.train.train_job import Repeated


def shuffled(count: int = 5) -> Repeated:
    torch.manual_seed(3)
    return Repeated(DataLoader(list(range(count)), batch_size=2, shuffle=True))  # type: ignore[arg-type]


def numbers(source: Repeated, wanted: range) -> list[list[int]]:
    return [source.at(number).tolist() for number in wanted]


def test_a_pass_begun_again_is_the_same_pass() -> None:
    """A rank that compares itself with the unpipelined model reads the first batches more often than the others do."""
    one, other = shuffled(), shuffled()
    before = torch.get_rng_state()
    numbers(one, range(4))
    torch.randn(7), random.random()
    found = numbers(one, range(9))
    torch.set_rng_state(before)
    assert found == numbers(other, range(9))
    assert torch.equal(before, torch.get_rng_state())  # nobody else's numbers were drawn
    passes = [sorted(chain(*found[k : k + 3])) for k in (0, 3, 6)]
    assert passes == [[0, 1, 2, 3, 4]] * 3
    assert found[:3] != found[3:6]


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_a_state_goes_on_where_it_was(taken: int) -> None:
    source = shuffled()
    before = numbers(source, range(taken))
    state = source.state_dict()
    after = numbers(source, range(taken, 8))
    again = shuffled()
    again.at(0)  # an example was asked for first
    again.load_state_dict(state)
    assert numbers(again, range(taken, 8)) == after
    assert numbers(again, range(taken)) == before


def test_what_cannot_be_is_said() -> None:
    def once() -> Iterator[int]:
        yield 1

    with pytest.raises(PenstockError, match="a generator, which can be run through only once"):
        Repeated(once())
    with pytest.raises(PenstockError, match="holds no batch"):
        Repeated([]).at(0)
    source = shuffled(9)
    numbers(source, range(4))
    with pytest.raises(PenstockError, match="ended after 3 batches, and the run had taken 4"):
        shuffled(5).load_state_dict(source.state_dict())
