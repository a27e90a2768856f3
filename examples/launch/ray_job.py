"""A run whose ranks are workers of Ray Train: `ray job submit -- python ray_job.py`.

Ray makes the process group, so that each worker is a rank; a worker that is lost is started again with all others, and they
go on from the last checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

OUTPUT = os.environ.get("OUTPUT", "/shared/runs/launched")  # a folder that every host sees
STEPS, WORKERS = int(os.environ.get("STEPS", "1000")), int(os.environ.get("WORKERS", "4"))


def rank(given: dict[str, Any]) -> None:
    import torch

    import penstock

    torch.manual_seed(0)  # the same model and data on every rank
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    x, y = torch.randn(2, 32, 64)
    pipe = penstock.Pipeline(model, (x,), loss_fn=torch.nn.functional.mse_loss, microbatches=8)
    optimizer = torch.optim.Adam(pipe.parameters())
    folder, steps = Path(given["output"]), given["steps"]
    done = pipe.load(folder, optimizer=optimizer)["step"] if folder.is_dir() else 0
    for step in range(done, steps):
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99 or step + 1 == steps:
            pipe.save(folder, optimizer=optimizer, extra={"step": step + 1})


if __name__ == "__main__":
    TorchTrainer(
        rank,
        train_loop_config={"output": OUTPUT, "steps": STEPS},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
