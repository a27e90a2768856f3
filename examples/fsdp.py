"""FSDP2 x pipeline: each stage sharded over its replicas, gathered when it runs.

    torchrun --standalone --nproc-per-node 4 examples/fsdp.py

The plan says when a stage is gathered (UNSHARD), dropped (RESHARD) and when its gradients are reduced (REDUCE_GRAD): once a
step, not once a microbatch. The program prints how much of the model each rank keeps between steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import penstock


def kept_here(pipe: penstock.Pipeline) -> int:
    """The numbers that this rank keeps of the model."""
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in pipe.parameters())


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    shape = (options.shards, dist.get_world_size() // options.shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(7)), nn.Linear(width, 10))
    whole = sum(p.numel() for p in model.parameters())

    rows = torch.randn(options.shards, 32, width)[mesh["dp"].get_local_rank()]  # each shard its own rows
    labels = rows[:, :10].argmax(dim=1)
    pipe = penstock.Pipeline(
        model,
        (rows,),
        loss_fn=loss_fn,
        schedule="interleaved1f1b",
        microbatches=8,
        mesh=mesh,
        data_parallel="fsdp",
        profile=False,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for step in range(options.steps):
        result = pipe.step(rows, target=labels)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, options.steps - 1):
            print(f"step {step}: loss {result.loss:.4f}")
    kept: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(kept, kept_here(pipe))
    if dist.get_rank() == 0:
        print(f"of {whole:,} numbers the ranks keep {kept}")
        assert sum(count or 0 for count in kept) >= whole, "nothing is missing"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
