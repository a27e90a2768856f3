"""Ranks of one pipeline that are given different rows: input of one batch, target of another, and a loss that looks like one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.batch import Microbatches
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PeerFailed, RanksDisagree
from penstock.run.checksums import Comparison, checksums_of
from penstock.stage.pipeline_stage import PipelineStage

WIDTH = 4


class Scaled(nn.Module):
    """Takes a mask beside its input, which its last layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden if mask is None else hidden * mask)


def pipeline(transport: LocalTransport, **options: Any) -> penstock.Pipeline:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Scaled() if "example_kwargs" in options else nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    given = {"loss_fn": nn.functional.mse_loss, "microbatches": 4, "schedule": "1f1b", "profile": False, **options}
    return penstock.Pipeline(model, (rows(0),), group=transport, **given)


def rows(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (PeerFailed, RanksDisagree) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("what", ["args[0]", "target", "mask", "evaluate", "predict"])
def test_rows_that_differ_are_refused_and_named(what: str) -> None:
    """A DistributedSampler that was left in, or a shuffle seeded by rank: the first stage computed one rank's rows, and the loss
    compared them with another's labels. Nothing was said, and the loss went down."""

    def run(transport: LocalTransport) -> tuple[str, float | None]:
        pipe = pipeline(transport, example_kwargs={"mask": rows(3)})
        other = transport.rank == 1
        x, y, mask = (
            rows(10 * (other and what in names) + k)
            for k, names in enumerate(("args[0] predict", "target evaluate", "mask"))
        )
        call = {
            "evaluate": lambda: pipe.evaluate(x, mask=mask, target=y),
            "predict": lambda: pipe.predict(x, mask=mask),
        }.get(what, lambda: pipe.step(x, mask=mask, target=y))
        said = raised(call)
        pipe.zero_grad()
        return said, pipe.step(rows(0), mask=rows(2), target=rows(1)).loss

    (first, loss), (second, same) = LocalWorld(2).run(run)
    name = {"evaluate": "target", "predict": "args[0]"}.get(what, what)
    assert second.startswith(f"RanksDisagree: rank 1: the values differ in {name} of ranks 0 and 1. ")
    assert first.startswith("PeerFailed: rank 1 failed: RanksDisagree: ")
    assert "DataLoader(..., shuffle=True, generator=" in first
    assert loss == same  # the next step works
    assert math.isfinite(loss or math.nan)


def test_ranks_in_the_middle_compare_too() -> None:
    """The first rank has no target; of the others two have different ones, in a dictionary with names."""

    def run(transport: LocalTransport) -> str:
        pipe = pipeline(transport, loss_fn=lambda out, target: nn.functional.mse_loss(out, target["labels"][0]))
        target = {"labels": [rows(transport.rank)], "scale": 2.0, "no": None}
        return raised(lambda: pipe.step(rows(0), target=None if transport.rank == 0 else target))

    said = LocalWorld(3).run(run)
    assert all("rank 2: the values differ in target['labels'][0] of ranks 1 and 2" in each for each in said), said


def test_a_difference_that_comes_later_is_found_within_32_steps() -> None:
    """Random states part with the first dropout, so samplers part at the second epoch."""

    def run(transport: LocalTransport) -> int:
        pipe = pipeline(transport)
        for step in range(1, 100):
            seed = transport.rank if step > 10 else 0
            if raised(lambda seed=seed: pipe.step(rows(seed), target=rows(seed))):
                return step
        return 0

    assert LocalWorld(2).run(run) == [32, 32]


def test_what_ranks_are_not_given_is_not_compared() -> None:
    """Each rank may give what its stages read and nothing else; and NaN is the same as itself."""

    def run(transport: LocalTransport) -> list[float | None]:
        pipe, last = pipeline(transport), transport.rank == 1
        x = rows(0)
        x[0, 0] = math.nan
        found = [
            pipe.step(*(() if last else (rows(0),)), target=rows(1) if last else None).loss,
            pipe.step(rows(0), target=rows(1) if last else None).loss,
            pipe.step(rows(0), target=rows(1)).loss,
            pipe.step(Microbatches(rows(0).split(2)), target=Microbatches(rows(1).split(2))).loss,
        ]
        assert math.isnan(pipe.step(x, target=rows(1)).loss or 0.0)
        return found

    for found in LocalWorld(2).run(run):
        assert found == [found[0]] * 4


class Shifted(nn.Linear):
    def forward(self, x: Tensor, by: float = 0.0) -> Tensor:
        return super().forward(x) + by


def test_what_is_a_rank_s_own_is_not_compared() -> None:
    """Keyword arguments of stages made by hand go to the stages of the rank that gives them. Of what a `Schedule` is given only
    the input on the first rank and the target on the last count, as in torch."""

    def run(transport: LocalTransport) -> None:
        stage = PipelineStage(Shifted(WIDTH, WIDTH), transport.rank, 2, "cpu", group=transport)
        given: Any = {"loss_fn": nn.functional.mse_loss}
        pipe = penstock.Pipeline(stages=[stage], group=transport, microbatches=4, schedule="gpipe", **given)
        pipe.step(rows(0), by=float(transport.rank), target=rows(1))
        schedule = penstock.ScheduleGPipe(stage, 4, **given)
        schedule.step(rows(transport.rank), target=rows(transport.rank))

    LocalWorld(2).run(run)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.int64, torch.float64, torch.complex64, torch.float8_e4m3fn]
)
def test_checksums_are_of_bits_and_places(dtype: torch.dtype) -> None:
    x = torch.arange(15).reshape(3, 5).remainder(2 if dtype is torch.bool else 7).to(dtype)
    own = checksums_of({"x": x})
    assert own == checksums_of({"x": x.t().contiguous().t()})  # strides are not compared
    assert own == checksums_of({"x": nn.Parameter(x, requires_grad=False)})
    rolled = x.view(torch.uint8).roll(1, 0).view(dtype)
    for other in (rolled, x.reshape(5, 3), x[:2], x.to(torch.complex128)):
        assert own != checksums_of({"x": other})
    large = torch.zeros(1 << 19, 2)
    changed = large.clone()
    changed[1 << 10 :] = 1.0
    assert checksums_of({"x": large}) != checksums_of({"x": changed})


def test_checksums_are_computed_in_the_first_steps_and_now_and_then() -> None:
    comparison = Comparison()
    due = [step for step in range(1, 300) if comparison.checksums({"args[0]": rows(0)}, step=step, train=True)]
    assert due == [1, 2, 3, *range(32, 300, 32)]
    assert comparison.checksums({"args[0]": rows(0)}, step=301, train=False)  # evaluations count on their own
    left_out = {"x": torch.eye(3).to_sparse(), "y": torch.ones(2, device="meta"), "z": object(), "n": None}
    assert checksums_of(left_out) == {}
