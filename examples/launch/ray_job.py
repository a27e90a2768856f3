"""A run whose ranks are workers of Ray Train: `ray job submit -- python ray_job.py`.

Ray makes the process group, so that each worker is a rank; a worker that is lost is started again with all others, and they
go on from the last checkpoint.
"""

from __future__ import annotations

import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

OUTPUT = "/shared/runs/launched"  # a folder that every host sees


def rank() -> None:
    import torch

    import penstock

    torch.manual_seed(0)  # the same model and data on every rank
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    x, y = torch.randn(2, 32, 64)
    pipe = penstock.Pipeline(model, (x,), loss_fn=torch.nn.functional.mse_loss, microbatches=8)
    optimizer = torch.optim.Adam(pipe.parameters())
    done = pipe.load(OUTPUT, optimizer=optimizer)["step"] if os.path.isdir(OUTPUT) else 0  # noqa: PTH112
    for step in range(done, 1000):
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            pipe.save(OUTPUT, optimizer=optimizer, extra={"step": step + 1})


if __name__ == "__main__":
    TorchTrainer(
        rank,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
