"""`penstock train` with its options, in real processes, against a plain loop of one process: the same losses, bit by bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PenstockError
from penstock.train import Job
from penstock.train.loggers import check_logger
from penstock.train.train_options import TrainOptions
from penstock.train.update import rate_of
from tests.gloo_pool import GlooPool
from tests.train.test_train import under_torchrun

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
COMMON = ["--schedule", "1f1b", "--microbatches", str(MICROBATCHES), "--no-measure"]


def train(
    pool: GlooPool,
    ranks: int,
    folder: Path,
    options: str,
    *,
    apart: str = "0.0\n",
    job: str = JOB,
    build: str = "job:build",
    log: str = "jsonl",
) -> list[dict[str, Any]]:
    """Run the command, which compares itself with the unpipelined model first; its events."""
    (folder / "job.py").write_text(job, encoding="utf-8")
    asked = [build, *COMMON, "--steps", str(STEPS), *options.split(), "--log", log, "-o", "run"]
    output = under_torchrun(pool, ranks, folder, *asked)
    assert f"pipelined == unpipelined over 3 steps: largest difference {apart}" in output, output
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]


@dataclass
class Plain:
    """What the same training in one process gives, step by step; `validations` are the losses after each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)


def constant(step: int) -> float:
    return 1.0


def plain(
    *,
    clip: float = math.inf,
    accumulate: int = 1,
    rate: Callable[[int], float] = constant,
    dtype: torch.dtype | None = None,
    replicas: int = 1,
) -> Plain:
    """A loop over microbatches. Replicas add up their gradients each for itself, and then take the mean of them."""
    names: dict[str, Any] = {}
    exec(JOB, names)
    model, batch, loss_fn, make, validation = names["build"]()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    found, each = Plain(), MICROBATCHES // replicas

    def losses_of(x: torch.Tensor, y: torch.Tensor, pieces: int) -> Iterator[torch.Tensor]:
        for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = loss_fn(model(a), b)
            yield loss

    for step in range(STEPS):
        batches = [batch(step * accumulate + number) for number in range(accumulate)]
        total, gradients = 0.0, []
        for replica in range(replicas):
            for x, y in batches:
                for loss in losses_of(x.chunk(replicas)[replica], y.chunk(replicas)[replica], each):
                    loss.backward(scaler.scale(torch.full_like(loss, 1 / each)))
                    total += loss.item() / MICROBATCHES
            gradients.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for p, of_replicas in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            p.grad = sum(of_replicas) / replicas
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad /= accumulate
        squares = [torch.linalg.vector_norm(p.grad).double().item() ** 2 for p in model.parameters()]
        found.norms.append(sum(squares) ** 0.5)
        for p in model.parameters():
            p.grad *= min(1.0, clip / (found.norms[-1] + 1e-6))
        optimizer.param_groups[0]["lr"] = 0.25 * rate(step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.losses.append(total / accumulate)
        with torch.no_grad():
            found.validations.append(
                sum(loss.item() for loss in losses_of(*validation[0], MICROBATCHES)) / MICROBATCHES
            )
    return found


def losses_in(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if event["kind"] == "step"]


def scalars(folder: Path, name: str) -> list[float]:
    """What TensorBoard itself reads of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "run" / "tensorboard"))
    found.Reload()
    return [point.value for point in found.Scalars(name)]


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_rate_clipping_and_accumulation_are_those_of_a_plain_loop(gloo_pool: GlooPool, tmp_path: Path) -> None:
    options = "--clip 0.5 --accumulate 2 --rate-schedule cosine --warmup 2 --keep-best --validate-every 2"
    found = train(gloo_pool, 2, tmp_path, options, log="jsonl,tensorboard")
    steps = [event for event in found if event["kind"] == "step"]

    def rate(step: int) -> float:
        return (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 4))

    expected = plain(clip=0.5, accumulate=2, rate=rate)
    assert losses_in(found) == expected.losses
    assert scalars(tmp_path, "train/loss") == pytest.approx(expected.losses)
    assert min(expected.norms) > 0.5, "otherwise nothing is clipped"
    torch.testing.assert_close([event["norm"] for event in steps], expected.norms, rtol=1e-12, atol=0.0)
    assert [event["rate"] for event in steps] == [0.25 * rate(step) for step in range(STEPS)]
    for event in steps:
        assert len(event["ranks"]) == 2
        assert event["seconds"] == max(rank["seconds"] for rank in event["ranks"])
    validated = {event["step"]: event["loss"] for event in found if event["kind"] == "validation"}
    assert validated == {step: expected.validations[step - 1] for step in (2, 4, 6)}
    best = penstock.load(tmp_path / "run" / "best")
    assert best.extra["validation"] == min(validated.values())


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_replicas_share_the_rows_of_a_batch_also_in_bfloat16(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Two pipelines of two ranks, two microbatches each: what one process makes of the four."""
    asked = "--dp 2 --data-parallel fsdp --microbatches 2 --precision bf16 --clip 0"
    found = train(gloo_pool, 4, tmp_path, asked, apart="")
    steps = [event for event in found if event["kind"] == "step"]
    assert [len(event["ranks"]) for event in steps] == [4] * STEPS
    expected = plain(dtype=torch.bfloat16, replicas=2)
    assert losses_in(found) == expected.losses
    torch.testing.assert_close([event["norm"] for event in steps], expected.norms)  # of shards: summed in another order


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_half_precision_with_a_scaled_loss_is_that_of_a_plain_loop_and_a_run_may_end_early(
    gloo_pool: GlooPool, tmp_path: Path
) -> None:
    """What is validated wants the opposite, so that each validation is worse than the one before it. The job brings
    options of its own; what the command line says goes before them."""
    opposite = JOB.replace("[batch(1000)]", "[(batch(1000)[0], -batch(1000)[1])]")
    asked = "Job(*build(), options={'precision': 'fp16', 'patience': 3, 'clip': 9.0})"
    job = opposite + f"\nfrom penstock.train import Job\n\ndef whole():\n    return {asked}\n"
    options = "--clip 0.5 --rate-schedule constant --validate-every 1 --keep-best"
    steps = losses_in(train(gloo_pool, 2, tmp_path, options, job=job, build="job:whole"))
    assert steps == plain(clip=0.5, dtype=torch.float16).losses[: len(steps)]
    assert len(steps) == 4  # the first validation was the best, and three more were allowed
    assert penstock.load(tmp_path / "run" / "best").extra["step"] == 1


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.long("compiled stages in tests/parity/test_compiled.py")
def test_compiled_stages_are_those_of_a_plain_loop(gloo_pool: GlooPool, tmp_path: Path) -> None:
    found = train(gloo_pool, 2, tmp_path, "--compile --compile-backend aot_eager --schedule zb-h1 --clip 0.5")
    torch.testing.assert_close(losses_in(found), plain(clip=0.5).losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (TrainOptions(dp=3), "--batch 16 rows over --dp 3 replicas"),
        (TrainOptions(dp=4), "for --microbatches 8 of --dp 4"),
        (TrainOptions(data_parallel="zero"), "'zero'; expected one of ddp, fsdp"),
        (TrainOptions(rate_schedule="stairs"), "'stairs'; expected one of constant, linear, cosine"),
        (TrainOptions(log="jsonl, excel"), "no logger 'excel'; there are jsonl, mlflow, tensorboard, wandb"),
        (TrainOptions(precision="int4"), "'int4'; expected one of fp32, bf16, fp16"),
    ],
)
def test_a_wrong_name_is_said_before_anything_starts(options: TrainOptions, said: str) -> None:
    def check() -> None:
        options.check()
        for name in options.loggers:
            check_logger(name)

    with pytest.raises(PenstockError, match=said):
        check()


def test_a_warm_up_needs_a_rate_and_a_job_options_that_exist() -> None:
    options = TrainOptions(warmup=3)
    with pytest.raises(PenstockError, match="--warmup 3 without --rate-schedule"):
        rate_of(options, Job(nn.Linear(1, 1), [], None, torch.optim.SGD))
    with pytest.raises(PenstockError, match="a job with the option 'ranks'; expected some of accumulate, "):
        options.with_those_of({"ranks": 3}, ["ranks"])


@pytest.mark.parametrize(
    ("brought", "said"),
    [
        ({"clip": "0.5"}, "'clip': '0.5'; expected float"),
        ({"microbatches": 2.5}, "'microbatches': 2.5; expected int"),
        ({"steps": True}, "'steps': True; expected int"),
        ({"keep_best": "yes"}, "'keep_best': 'yes'; expected bool"),
        ({"stages": "2"}, "'stages': '2'; expected int or nothing"),
        ({"log": ["jsonl"]}, r"'log': \['jsonl'\]; expected str"),
        ({"accumulate": 0}, "--accumulate 0; expected a number from 1"),
        ({"clip": float("nan")}, "--clip nan; expected a number from 0"),
    ],
)
def test_options_of_a_job_are_of_their_kind(brought: dict[str, Any], said: str) -> None:
    """They were taken as they were, and failed somewhere in the run."""
    with pytest.raises(PenstockError, match=said):
        TrainOptions().with_those_of(brought, list(brought))
    assert TrainOptions().with_those_of({"clip": 1, "stages": None}, ["clip", "stages"]).clip == 1


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
