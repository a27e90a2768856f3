"""Data parallel x pipeline: two replicas (DDP), each a pipeline of two ranks.

    torchrun --standalone --nproc-per-node 4 examples/data_parallel.py

`Pipeline` takes a mesh with the dimensions "dp" and "pp" and wraps each stage. Each replica draws its own rows with torch's
`DistributedSampler`; the loss, clipping and checkpoints are those of all replicas together.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import penstock


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    shape = (options.replicas, dist.get_world_size() // options.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    width = options.width
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(width, width))
    x = torch.randn(256, width)
    data = TensorDataset(x, torch.sin(x))

    pipe = penstock.Pipeline(
        model, (x[:32],), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=8, mesh=mesh, profile=False
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    sampler = DistributedSampler(data, num_replicas=options.replicas, rank=mesh["dp"].get_local_rank())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for rows, targets in DataLoader(data, batch_size=32, sampler=sampler, drop_last=True):
            result = pipe.step(rows, target=targets)  # each replica its own rows
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {result.loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
