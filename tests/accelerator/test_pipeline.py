"""`Pipeline` on the simulated accelerator: what makes its host wait, and where its model and its batch may be."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.lower import InTurn
from tests.accelerator import pipes
from tests.accelerator.pool import BOUND, Mode, SimPool
from tests.accelerator.test_device import held

MICROBATCHES = 4


def whole_model() -> nn.Sequential:
    return nn.Sequential(*(pipes.block(stage) for stage in range(4)))


def piped(place: torch.device, model: nn.Module | None = None, **options: Any) -> penstock.Pipeline:
    example = torch.zeros(MICROBATCHES * pipes.ROWS, pipes.WIDTH, dtype=torch.float64, device=place)
    options = {"schedule": "1f1b", "profile": False, "loss_fn": nn.functional.mse_loss, **options}
    return penstock.Pipeline(
        whole_model().to(place) if model is None else model, (example,), microbatches=MICROBATCHES, **options
    )


def plain(steps: int, model: nn.Module | None = None) -> list[float]:
    """The losses of training the model in one piece."""
    model = whole_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = pipes.batch(MICROBATCHES)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Noticed:
    """What the device has noticed since the last question."""

    def __init__(self, device: torch.device) -> None:
        self.sim = pipes.simulation(device)
        self.again()

    def again(self) -> None:
        torch.accelerator.synchronize()
        self.sim.reset()

    def waits(self) -> int:
        return len(self.sim.waits())


STEPS = 4


def trains(device: torch.device) -> dict[str, Any]:
    """Steps as in a training loop, and what each part of a warm one made the host wait."""
    pipe = piped(device)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = (part.to(device) for part in pipes.batch(MICROBATCHES))
    noticed = Noticed(device)
    waits: dict[str, int] = {}
    results = []
    for _ in range(STEPS):
        noticed.again()
        results.append(pipe.step(x, target=y))
        optimizer.step()
        optimizer.zero_grad()
        waits["step"] = noticed.waits()
    if dist.get_rank() == 0:  # one rank reads, the others need not
        assert results[-1].loss is not None
        waits["loss"] = noticed.waits()
        assert len(results[-1].losses) == MICROBATCHES
        waits["losses"] = noticed.waits()
    pipe.step(x, target=y)
    noticed.again()
    norm = pipe.clip_grad_norm_(1e-3)
    waits["clip"] = noticed.waits()
    evaluated = pipe.evaluate(x, target=y).loss
    violations = noticed.sim.violations()
    return {
        "waits": waits,
        "losses": [r.loss for r in results],
        "norm": norm,
        "evaluated": evaluated,
        "violations": violations,
    }


@pytest.mark.parametrize(("ranks", "mode"), [(1, "lazy"), (3, "lazy"), (3, "eager")])
def test_a_training_step_does_not_wait_and_a_loss_is_read_by_whoever_wants_it(
    sim: SimPool, ranks: int, mode: Mode
) -> None:
    told = sim.run(ranks, mode, trains)
    expected = plain(STEPS + 1)
    for rank, found in enumerate(told):
        assert found["waits"]["step"] == 0
        assert found["waits"]["clip"] == 1
        assert found["losses"] == pytest.approx(expected[:STEPS])
        assert found["evaluated"] == pytest.approx(expected[STEPS])
        assert found["violations"] == []
        if rank == 0:
            assert found["waits"]["loss"] == found["waits"]["losses"] == 1
    assert len({found["norm"] for found in told}) == 1


def scales(device: torch.device, poison: int | None) -> tuple[list[int], bool, float]:
    """A step with a GradScaler; on one rank gradients may overflow.

    Waits of the step, and of clipping, scaler and optimizer together; whether parameters moved; the scale after it.
    """
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    model = whole_model().float().to(device)
    example = torch.zeros(MICROBATCHES * pipes.ROWS, pipes.WIDTH, device=device)
    pipe = penstock.Pipeline(
        model,
        (example,),
        microbatches=MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        profile=False,
        loss_scale=scaler,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = (part.float().to(device) for part in pipes.batch(MICROBATCHES))
    for _ in range(2):
        pipe.step(x, target=y)
        pipe.zero_grad()
    if dist.get_rank() == poison:
        next(iter(pipe.parameters())).register_hook(infinite)
    before = [p.detach().clone() for p in pipe.parameters()]
    noticed = Noticed(device)
    pipe.step(x, target=y)
    waits = [noticed.waits()]
    noticed.again()
    scaler.unscale_(optimizer)
    norm = pipe.clip_grad_norm_(0.1)
    scaler.step(optimizer)
    scaler.update()
    waits.append(noticed.waits())
    assert math.isfinite(norm) == (poison is None)
    assert noticed.sim.violations() == []
    moved = any(not torch.equal(old, new) for old, new in zip(before, pipe.parameters(), strict=True))
    return waits, moved, scaler.get_scale()


def infinite(grad: Tensor) -> Tensor:
    return grad * float("inf")


@pytest.mark.parametrize("poison", [None, 0, 1])
def test_a_scaler_and_clipping_read_once_together_and_all_ranks_skip_an_overflow(
    sim: SimPool, poison: int | None
) -> None:
    expected = ([0, 1], True, 1024.0) if poison is None else ([0, 1], False, 512.0)
    assert sim.run(2, "eager", scales, poison) == [expected] * 2


def from_the_host(device: torch.device, kind: str) -> dict[str, Any]:
    """The model and the batch are in host memory, or the model is nowhere; `device=` says where to compute."""
    x, y = pipes.batch(MICROBATCHES)
    model, options = whole_model(), {}
    if kind == "meta":
        options = {"weights": model.state_dict()}
        model = whole_model().to("meta")
    pipe = penstock.Pipeline(
        model,
        (x,),
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        profile=False,
        device=device,
        **options,
    )
    places = {parameter.device.type for parameter in pipe.parameters()}
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    noticed = Noticed(device)
    results, waits = [], []
    for step in range(STEPS):
        noticed.again()
        batch = (x, y) if step % 2 == 0 else (x.to(device), y.to(device))  # on the host, or on the device
        noticed.again()
        results.append(pipe.step(batch[0], target=batch[1]))
        waits += noticed.sim.waits() if step else []
        optimizer.step()
        optimizer.zero_grad()
    violations = noticed.sim.violations()
    evaluated = pipe.evaluate(x, target=y).loss
    losses = [result.loss for result in results]
    return {"places": places, "losses": losses, "evaluated": evaluated, "waits": waits, "violations": violations}


@pytest.mark.parametrize("kind", ["host", "meta"])
def test_a_model_and_a_batch_in_host_memory_go_to_the_device_without_a_wait_or_a_race(sim: SimPool, kind: str) -> None:
    expected = plain(STEPS + 1)
    for found in sim.run(2, "eager", from_the_host, kind):
        assert found["places"] == {"sim"}
        assert found["losses"] == pytest.approx(expected[:STEPS])
        assert found["evaluated"] == pytest.approx(expected[STEPS])
        assert found["waits"] == []
        assert found["violations"] == []


def elsewhere(device: torch.device) -> dict[str, Any]:
    """On the second device of the process, which nobody made the current one."""
    there = torch.device(device.type, 1)
    x, y = (part.to(there) for part in pipes.batch(MICROBATCHES))
    pipe = piped(there, rng="per-microbatch")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    results = []
    for _ in range(STEPS - 1):
        results.append(pipe.step(x, target=y))
        optimizer.step()
        optimizer.zero_grad()
    with pipe.record() as recording:
        results.append(pipe.step(x, target=y))
    found = {
        "losses": [r.loss for r in results],
        "norm": pipe.clip_grad_norm_(1.0),
        "took": recording.timeline.makespan,
    }
    return found | {"violations": pipes.simulation(device).violations()}


def test_the_device_of_the_stages_need_not_be_the_current_one(sim: SimPool) -> None:
    expected = plain(STEPS)
    for found in sim.run(2, "lazy", elsewhere):
        assert found["losses"] == pytest.approx(expected)
        assert found["norm"] > 0
        assert found["took"] > 0
        assert found["violations"] == []


def tied_model() -> nn.Module:
    """The first and the last stage share a weight."""
    model = whole_model()
    blocks: Any = model
    blocks[3][3].weight = blocks[0][0].weight
    return model


def trains_tied(device: torch.device, receives: InTurn | None) -> dict[str, Any]:
    pipe = piped(device, tied_model(), device=device, receives=receives)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = (part.to(device) for part in pipes.batch(MICROBATCHES))
    noticed = Noticed(device)
    results, waits = [], []
    for _ in range(STEPS):
        noticed.again()
        results.append(pipe.step(x, target=y))
        waits = noticed.sim.waits()
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": [r.loss for r in results], "waits": waits, "violations": noticed.sim.violations()}


@pytest.mark.parametrize(("mode", "receives"), [("lazy", None), ("eager", InTurn("one"))])
def test_a_weight_of_two_ranks_that_are_no_neighbours_stays_one(
    sim: SimPool, mode: Mode, receives: InTurn | None
) -> None:
    expected = plain(STEPS, tied_model())
    for found in sim.run(3, mode, trains_tied, receives):
        assert found["losses"] == pytest.approx(expected)
        assert found["waits"] == []
        assert found["violations"] == []


def overlaps(device: torch.device) -> bool:
    """Whether the second microbatch is copied while nothing of the first is computed: on a stream of its own."""
    from penstock.run.feed import Feed

    sim = pipes.simulation(device)
    feed = Feed(device, torch.Stream(device=device))
    first, second = torch.ones(4), torch.full((4,), 2.0)
    with held():  # what is computed with the first
        total = feed.of([first, second], 0).sum()
        there = feed.of([first, second], 1)
        end = time.monotonic() + BOUND
        while sim.peek(there)[0].item() != 2.0 and time.monotonic() < end:
            time.sleep(0.002)
        copied: bool = sim.peek(there)[0].item() == 2.0
    assert (total + there.sum()).item() == 12.0
    return copied


def test_the_next_microbatch_is_copied_while_this_one_is_computed(sim: SimPool) -> None:
    assert sim.run(1, "lazy", overlaps) == [True]


def read_later(device: torch.device, folder: Path | None) -> list[str]:
    """The rank of the loss is killed, its device busy, after a step that it has issued; the other one reads the loss then, or
    saves its weights there."""
    os.environ["PENSTOCK_HEARTBEAT"] = "1"
    try:
        pipe = piped(device)
        x, y = (part.to(device) for part in pipes.batch(MICROBATCHES))
        pipe.step(x, target=y)
        if dist.get_rank() == 1:
            pipes.simulation(device).busy(110.0)
        result = pipe.step(x, target=y)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        told = []
        first = (lambda: result.loss) if folder is None else (lambda: pipe.save(folder))
        for act in (first, lambda: result.loss, lambda: pipe.step(x, target=y)):
            try:
                told.append(str(act()))
            except penstock.errors.PenstockError as error:
                told.append(f"{type(error).__name__}: {error}")
        return told
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]


@pytest.mark.parametrize(("mode", "saves"), [("lazy", True), ("eager", False)])
def test_a_loss_that_never_comes_is_an_error_that_names_the_rank(
    sim: SimPool, tmp_path: Path, mode: Mode, saves: bool
) -> None:
    """And it is one within seconds, though the group would wait longer; asked again it says so again, and so does a step."""
    first, _ = sim.outcomes(2, mode, read_later, tmp_path / "saved" if saves else None)
    assert first.ok, first.details
    assert first.seconds < 100.0
    for text in first.value:
        assert "rank 1 failed: " in text, first.value
        assert "has ended" in text, first.value  # its process, or the line to it


def given_otherwise(device: torch.device, kind: str) -> str:
    """A step for which the second rank has numbers that another kernel rounded, or another batch."""
    pipe = piped(device)
    x, y = pipes.batch(MICROBATCHES)
    if dist.get_rank() == 1:
        x = x * (1 + 1e-6) if kind == "rounded" else x.flip(0)
    try:
        pipe.step(x.to(device), target=y.to(device))
    except penstock.errors.RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["rounded", "flipped"])
def test_batches_on_the_device_are_compared_roughly(sim: SimPool, kind: str) -> None:
    """Ranks may compute what they give on their devices, whose kernels differ in the last bits."""
    for said in sim.run(2, "lazy", given_otherwise, kind):
        assert ("the values differ in args[0] of ranks 0 and 1" in said) is (kind == "flipped"), said
