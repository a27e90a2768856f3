"""A run with a slow rank: it is cut anew at a checkpoint, and the losses go on as they would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.balance import Profile
from penstock.cli.main import main
from penstock.train.history import PROFILE
from penstock.train.train_job import Job, batches_of
from penstock.train.train_options import TrainOptions
from penstock.train.update import Unpipelined, Update
from tests.train.test_train import losses, run

JOB = """
import os, time
import torch
from torch import nn

SLOW = os.environ.get("RANK") == "1"

@torch.library.custom_op("penstock_recutting::work", mutates_args=())
def work(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.006 if SLOW else 0.001)  # time is the subject
    return x.clone()

work.register_fake(lambda x: torch.empty_like(x))
work.register_autograd(lambda _, grad: grad)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return work(torch.tanh(self.linear(x)))

def build():
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    data = [(x, x.flip(1)), (-x, -x.flip(1))]
    model = nn.Sequential(*(Layer() for _ in range(6)))
    return model, data, nn.functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("own")
@pytest.mark.long("ranks as threads are cut anew")
def test_a_run_is_cut_anew_for_a_slow_rank(tmp_path: Path) -> None:
    (tmp_path / "slow_rank.py").write_text(JOB)
    fixed = ("--microbatches", "4", "--schedule", "1f1b", "--no-measure", "--check-steps", "0", "--validate-every", "0")
    options = (*fixed, "--checkpoint-every", "4", "--recut", "0.2", "--log", "jsonl", "-o", "run")
    output = run(tmp_path, "slow_rank:build", *options, "--steps", "6")
    assert output.count("the model is cut anew") == 1
    assert "step 4: the ranks take 1, " in output
    times = Profile.load(tmp_path / "run" / PROFILE).metadata["rank_times"]
    assert times[0] == 1.0 < 2.0 < times[1], "a resumed run is cut by this"
    scope: dict[str, Any] = {}
    exec(JOB, scope)
    model, data, loss_fn, optimizer = scope["build"]()
    job = Job(model, batches_of(data)[0], loss_fn, optimizer)
    update = Update(TrainOptions.of_file(tmp_path / "run" / "options.json"), job)
    expected = update.first_losses(Unpipelined(update, model, range(4)), 6)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)


def test_what_recut_needs() -> None:
    given = ["train", "--recut", "0.1", "--checkpoint-every", "0"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code != 0
    assert "expected a share of a step such as 0.1" in result.output
