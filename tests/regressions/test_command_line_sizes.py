"""Numbers on the command line and in plan files that nothing could be done with, but that were tried all the same."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import penstock
from penstock.cli.main import main
from penstock.errors import IncompleteError, PlanError, RunError
from penstock.lower import offload, recompute
from penstock.plan import Placement, Plan, StageGraph, check, load, loads
from penstock.plan.actions import MAX_MICROBATCH, forward
from penstock.schedules import get_schedule
from penstock.search.integer_scale import within
from penstock.simulate import simulate

SMALL = 10_000_000  # bytes; what was taken before counts in gigabytes
STAGES = 24
LAST = 9_999_999  # the last microbatch of a plan that has no others


def hostile() -> str:
    """A plan of a few hundred bytes: 24 stages on a rank, one action each, of which the first is of microbatch 9,999,999."""
    return ",".join([f"0F{LAST}", *(f"{stage}F0" for stage in range(STAGES)), *(f"{s}B0" for s in range(STAGES))])


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="penstock")


def taken(call: Callable[[], object]) -> int:
    """The most bytes that a call held."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "arguments", [["check"], ["show"], ["show", "--recompute", "all"], ["show", "--offload", "all"]], ids=" ".join
)
def test_a_small_plan_file_takes_little_memory(tmp_path: Path, arguments: list[str]) -> None:
    """`check` and `show` made a place for every microbatch up to the highest number, for each kind of action, before they
    looked whether the actions are there: 391 bytes took 10 GB."""
    file = tmp_path / "plan.csv"
    file.write_text(hostile(), encoding="utf-8")
    command, *options = arguments

    def refused() -> None:
        done = run(command, file, *options)
        assert done.exit_code == 1, done.output
        assert "rank 0 lacks 0F1; expected each microbatch once through every stage" in done.stderr

    refused()  # what is imported on the way is not counted
    assert taken(refused) < SMALL


def test_and_so_do_the_functions_behind_the_commands() -> None:
    """Also without a check before them: `simulate` and the passes made as many places."""
    plan = loads(hostile())

    def refused() -> None:
        with pytest.raises(IncompleteError, match="lacks 0F1"):
            check(plan)
        with pytest.raises(PlanError, match="49 actions for 10,000,000 microbatches, too few"):
            simulate(plan)
        for change in (recompute, offload):
            with pytest.raises(PlanError, match="lacks 0F1"):
                check(change(plan))

    assert taken(refused) < SMALL


def test_a_rank_without_actions_is_found_at_once() -> None:
    plan = Plan(Placement.loop(2), StageGraph.chain(2), MAX_MICROBATCH + 1, ((forward(0, 0),), ()))

    def refused() -> None:
        with pytest.raises(IncompleteError, match="rank 0 lacks 0F1"):
            check(plan)

    assert taken(refused) < SMALL


def test_a_message_that_is_missing_is_found_at_once() -> None:
    """All forwards are there, and for each of a thousand messages that do not exist there would be a place for each of them."""
    count = 2_000
    messages = [f"0SEND_F0>{stage}" for stage in range(1, count)]
    rows = [[*(f"0F{number}" for number in range(count)), *messages], *([f"{stage}F0"] for stage in range(1, count))]
    plan = Plan.of(rows, num_microbatches=count)

    def refused() -> None:
        with pytest.raises(IncompleteError, match=r"rank 0 lacks 0SEND_F1"):
            check(plan)

    assert taken(refused) < SMALL


HUGE = "9" * 23


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "PLAN", "--limit", "9" * 20], "'--limit': 99999999999999999999 is not in the range"),
        (["show", "PLAN", "--limit", "9" * 20], "'--limit': 99999999999999999999 is not in the range"),
        (["show", "PLAN", "--offload", "7"], "--offload '7' of a plan with 2 stages; expected 0 to 1"),
        (["search", "--memory", "1e308"], "'--memory': 1e+308 is not in the range"),
        (["search", "--tries", HUGE], f"'--tries': {HUGE} is not in the range"),
        (["search", "-m", "16000000"], "4 ranks x 4 stages each x 16,000,000 microbatches are 256,000,000"),
        (["compare", "-m", "16000000"], "4 ranks x 2 stages each x 16,000,000 microbatches are 128,000,000"),
        (["plan", "1f1b", "-m", "16000000", "-p", "100"], "are 1,600,000,000; expected at most 5,000,000"),
        (["plan", "1f1b", "-p", HUGE], f"'-p': {HUGE} is not in the range"),
        (["plan", "1f1b", "-m", HUGE], f"'-m': {HUGE} is not in the range"),
        (["plan", "gis", "-v", HUGE], f"'-v': {HUGE} is not in the range"),
        (["plan", "1f1b", "-p", "1e23"], "'1e23' is not a valid integer"),
        (["plan", "1f1b", "-m", "1e23"], "'1e23' is not a valid integer"),
        (["plan", "1f1b", "--forward", "1e308"], "'--forward': 1e+308 is not in the range"),
        (["plan", "1f1b", "--recompute", "0-99999999999"], "of a plan with 4 stages; expected 0 to 3"),
        (["plan", "1f1b", "--recompute", "0-" + "9" * 5000], "of a plan with 4 stages; expected 0 to 3"),
        (["plan", "1f1b", "--offload", "0-99999999999"], "of a plan with 4 stages; expected 0 to 3"),
        (["plan", "1f1b", "--offload", "99999999999"], "of a plan with 4 stages; expected 0 to 3"),
        (["top", ".", "--watch", "1e300"], "'--watch': 1e+300 is not in the range"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_numbers_that_are_too_large_are_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    """They were tracebacks (OverflowError, MemoryError), or the command did not end."""
    file = tmp_path / "plan.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    done = run(*(file if word == "PLAN" else word for word in arguments))
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2, done.output
    assert said in done.stderr


def test_the_functions_take_numbers_that_are_too_large(tmp_path: Path) -> None:
    """`load` and a limit of memory were an OverflowError of Python's; a schedule for more microbatches than an action can name
    gave actions of other stages."""
    file = tmp_path / "plan.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    assert load(file, limit=10**30).num_stages == 2
    assert within(1e308, [0.5, 1.0]) == 1e308
    for sizes in ((2, MAX_MICROBATCH + 2), (2**20 + 1, 1)):
        with pytest.raises(PlanError, match="expected at most 1,048,576 and 16,777,216"):
            get_schedule("1f1b")(*sizes)


@pytest.mark.parametrize("arguments", [["plan", "1f1b", "--json"], ["plan", "1f1b"], ["compare"]], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(arguments: list[str]) -> None:
    """`penstock plan ... | head -1` said "Error: [Errno 32] Broken pipe"."""
    command = subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None
    command.stdout.close()  # before anything is written, as imports take longer
    _, said = command.communicate(timeout=60)
    assert said == b""
    assert command.returncode == 1


@pytest.mark.parametrize(
    "keep",
    [copy.deepcopy, copy.copy, pickle.dumps, lambda pipe: torch.save({"pipe": pipe}, io.BytesIO())],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)
def test_a_pipeline_says_how_it_is_kept(keep: Callable[[object], object]) -> None:
    """It said "cannot pickle 'mappingproxy' object"; a shallow copy shared its modules with the pipeline."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stage = penstock.PipelineStage(model, 0, 1, "cpu")
    pipe = penstock.Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss, microbatches=2, schedule="1f1b")
    with pytest.raises(RunError, match=r"pipe\.save\(folder, optimizer=optimizer\).*copy\.deepcopy\(model\)"):
        keep(pipe)
    assert copy.deepcopy(model)[0].weight.shape == (4, 4)
