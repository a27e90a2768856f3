"""Pipelined equals unpipelined: every schedule, every size, every kind of model and call, against a plain loop."""

from __future__ import annotations

import gc
import itertools
import zlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from penstock.schedules import Recipe, all_schedules, get_schedule
from tests.parity.cases import CASES
from tests.parity.harness import Sizes, compare


@pytest.fixture(scope="module", autouse=True)
def _torch_has_checkpointed_before() -> None:
    """The very first checkpoint of a process leaves a cycle behind, in torch itself."""
    x = torch.ones(1, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).backward()
    gc.collect()


TRAINING = [recipe for recipe in all_schedules() if recipe.name != "forward"]


def all_sizes(recipe: Recipe) -> list[Sizes]:
    per_rank = (1, 2, 3) if recipe.stages_per_rank is None else (recipe.stages_per_rank,)
    return [Sizes(*sizes) for sizes in itertools.product((1, 2, 3, 4), per_rank, (1, 2, 3, 5, 8))]


def chosen(recipe: Recipe) -> list[tuple[str, Sizes]]:
    """Each case with a size of its own, such that all sizes come up as often."""
    sizes = all_sizes(recipe)
    start = zlib.crc32(recipe.name.encode())
    return [(name, sizes[(start + 7 * place) % len(sizes)]) for place, name in enumerate(CASES)]


@pytest.mark.parametrize("name", [recipe.name for recipe in TRAINING])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_size(name: str, num_ranks: int) -> None:
    recipe = get_schedule(name)
    for sizes in all_sizes(recipe):
        if sizes.num_ranks == num_ranks:
            compare(recipe, sizes, CASES["plain"], rendezvous=bool(sum(sizes) % 2))


@pytest.mark.parametrize(
    ("name", "case", "sizes"),
    [
        pytest.param(recipe.name, case, sizes, id=f"{recipe.name}-{case}-{'x'.join(map(str, sizes))}")
        for recipe in TRAINING
        for case, sizes in chosen(recipe)
    ],
)
def test_every_case(name: str, case: str, sizes: Sizes) -> None:
    compare(get_schedule(name), sizes, CASES[case], rendezvous=True, seed=sum(sizes))
