"""`penstock train` with its options, in real processes, against a plain loop of one process: the same losses, bit by bit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PenstockError
from penstock.train import Job
from penstock.train.train_options import TrainOptions
from penstock.train.update import check_names, rate_of

JOB = """
import torch
from torch import nn

def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))

def batch(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, 6, generator=generator)
    return x, x[:, :3] * 2

def build():
    return model(), batch, nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.5), [batch(1000)]
"""
STEPS, MICROBATCHES = 6, 4
COMMON = ["--ranks", "2", "--schedule", "1f1b", "--microbatches", str(MICROBATCHES), "--no-measure", "--batch", "8"]


def train(
    folder: Path, options: str, *, apart: str = "0.0\n", job: str = JOB, build: str = "job:build"
) -> list[dict[str, Any]]:
    """Run the command, which compares itself with the unpipelined model first; its events."""
    (folder / "job.py").write_text(job, encoding="utf-8")
    command = [sys.executable, "-m", "penstock", "train", build, *COMMON, "--steps", str(STEPS), *options.split()]
    command += ["--log", "jsonl", "-o", str(folder / "run")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"pipelined == unpipelined over 3 steps: largest difference {apart}" in done.stdout, done.stdout
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def plain(*, clip: float, accumulate: int, rate: Any, dtype: torch.dtype | None) -> tuple[list[float], list[float]]:
    """The same in one process: losses and gradient norms."""
    names: dict[str, Any] = {}
    exec(JOB, names)
    model, batch, loss_fn, make, _ = names["build"]()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for number in range(accumulate):
            x, y = batch(step * accumulate + number)
            for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss = loss_fn(model(a), b)
                loss.backward(scaler.scale(torch.full_like(loss, 1 / MICROBATCHES)))
                total += loss.item() / MICROBATCHES
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad /= accumulate
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.param_groups[0]["lr"] = 0.25 * rate(step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total / accumulate)
    return losses, norms


@pytest.mark.processes
@pytest.mark.slow
def test_rate_clipping_and_accumulation_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    options = "--clip 0.5 --accumulate 2 --rate-schedule cosine --warmup 2 --keep-best --validate-every 2"
    found = train(tmp_path, options)
    steps = [event for event in found if event["kind"] == "step"]

    def rate(step: int) -> float:
        return (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 4))

    losses, norms = plain(clip=0.5, accumulate=2, rate=rate, dtype=None)
    assert [event["loss"] for event in steps[:1]] == losses[:1]  # before any rounding can differ: the same bits
    torch.testing.assert_close([event["loss"] for event in steps], losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close([event["norm"] for event in steps], norms, rtol=1e-5, atol=1e-6)
    assert [event["rate"] for event in steps] == [0.25 * rate(step) for step in range(STEPS)]
    for event in steps:
        assert len(event["ranks"]) == 2
        assert event["seconds"] == max(rank["seconds"] for rank in event["ranks"])
    validated = {event["step"]: event["loss"] for event in found if event["kind"] == "validation"}
    assert list(validated) == [2, 4, 6]
    best = penstock.load(tmp_path / "run" / "best")
    assert best.extra["validation"] == min(validated.values())


@pytest.mark.processes
@pytest.mark.slow
def test_replicas_share_the_rows_of_a_batch_also_in_bfloat16(tmp_path: Path) -> None:
    """Two pipelines of two ranks, two microbatches each: what one process makes of the four."""
    options = "--dp 2 --data-parallel fsdp --microbatches 2 --precision bf16 --clip 0.5"
    steps = [event for event in train(tmp_path, options, apart="") if event["kind"] == "step"]
    assert [len(event["ranks"]) for event in steps] == [4] * STEPS
    losses, norms = plain(clip=0.5, accumulate=1, rate=lambda step: 1.0, dtype=torch.bfloat16)
    torch.testing.assert_close([event["loss"] for event in steps], losses, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close([event["norm"] for event in steps], norms, rtol=1e-2, atol=1e-3)


@pytest.mark.processes
@pytest.mark.slow
def test_half_precision_with_a_scaled_loss_is_that_of_a_plain_loop_and_a_run_may_end_early(tmp_path: Path) -> None:
    """What is validated wants the opposite, so that each validation is worse than the one before it. The job brings
    options of its own; what the command line says goes before them."""
    opposite = JOB.replace("[batch(1000)]", "[(batch(1000)[0], -batch(1000)[1])]")
    asked = "Job(*build(), options={'precision': 'fp16', 'patience': 3, 'clip': 9.0})"
    job = opposite + f"\nfrom penstock.train import Job\n\ndef whole():\n    return {asked}\n"
    options = "--clip 0.5 --rate-schedule constant --validate-every 1 --keep-best"
    events = train(tmp_path, options, job=job, build="job:whole")
    steps = [event["loss"] for event in events if event["kind"] == "step"]
    losses, _ = plain(clip=0.5, accumulate=1, rate=lambda step: 1.0, dtype=torch.float16)
    torch.testing.assert_close(steps, losses[: len(steps)], rtol=1e-3, atol=1e-4)
    assert len(steps) == 4  # the first validation was the best, and three more were allowed
    assert penstock.load(tmp_path / "run" / "best").extra["step"] == 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long("compiled stages in tests/parity/test_compiled.py")
def test_compiled_stages_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    found = train(tmp_path, "--compile --compile-backend aot_eager --schedule zb-h1 --clip 0.5")
    losses, _ = plain(clip=0.5, accumulate=1, rate=lambda step: 1.0, dtype=None)
    steps = [event["loss"] for event in found if event["kind"] == "step"]
    torch.testing.assert_close(steps, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (TrainOptions(dp=3), "--batch 16 rows over --dp 3 replicas"),
        (TrainOptions(dp=4), "for --microbatches 8 of --dp 4"),
        (TrainOptions(data_parallel="zero"), "'zero'; expected ddp or fsdp"),
        (TrainOptions(rate_schedule="stairs"), "'stairs'; expected one of constant, linear, cosine"),
        (TrainOptions(precision="int4"), "'int4'; expected one of fp32, bf16, fp16"),
    ],
)
def test_a_wrong_name_is_said_before_anything_starts(options: TrainOptions, said: str) -> None:
    def check() -> None:
        options.check()
        check_names(options)

    with pytest.raises(PenstockError, match=said):
        check()


def test_a_warm_up_needs_a_rate_and_a_job_options_that_exist() -> None:
    options = TrainOptions(warmup=3)
    with pytest.raises(PenstockError, match="--warmup 3 without --rate-schedule"):
        rate_of(options, Job(nn.Linear(1, 1), [], None, torch.optim.SGD))
    with pytest.raises(PenstockError, match="a job with the option 'ranks'; expected some of accumulate, "):
        options.with_those_of({"ranks": 3}, ["ranks"])


def test_a_run_that_goes_on_has_the_options_that_it_had(tmp_path: Path) -> None:
    """Also those that its job brought, and those that its first command line said in spite of the job."""
    first = TrainOptions(output=str(tmp_path), clip=0.5)
    assert "clip" not in first.open_to_a_job(["clip"])
    made = first.with_those_of({"clip": 9.0, "precision": "bf16"}, first.open_to_a_job(["clip"]))
    assert (made.clip, made.precision) == (0.5, "bf16")
    (tmp_path / "options.json").write_text(made.dumps(), encoding="utf-8")
    again = TrainOptions(output=str(tmp_path), resume=True).resumed([])
    assert again.open_to_a_job([]) == frozenset()
    assert (again.clip, again.precision) == (0.5, "bf16")


def test_patience_needs_validation() -> None:
    with pytest.raises(PenstockError, match="--validate-every"):
        TrainOptions(patience=2, validate_every=0).check()
