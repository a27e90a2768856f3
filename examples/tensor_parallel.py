"""Tensor parallel stages: two stages, each split over two ranks by torch's `parallelize_module`.

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py

The stages are made by hand: cut the model, split each part over its "tp" group, give it to `PipelineStage` with its "pp"
group. What travels from stage to stage is a DTensor that is sharded over the hidden dimension: each rank sends its shard to
the same place in the next stage, and nothing is gathered on the way. At the end the gradients are compared with those of
the model in one piece.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def split(module: Block, mesh: DeviceMesh, *, first: bool, last: bool) -> nn.Module:
    """The first layer by columns, the second by rows; shards at the boundary, plain tensors at both ends."""
    plan = {
        "up": ColwiseParallel(input_layouts=Replicate() if first else Shard(-1)),
        "down": RowwiseParallel(output_layouts=Replicate() if last else Shard(-1), use_local_output=last),
    }
    return parallelize_module(module, mesh, plan)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    place = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    blocks = [Block(options.width) for _ in range(2)]
    whole = copy.deepcopy(nn.Sequential(*blocks))  # to compare with
    module = split(blocks[place], mesh["tp"], first=place == 0, last=place == 1)
    stage = penstock.PipelineStage(module, place, 2, "cpu", group=mesh["pp"].get_group())
    schedule = penstock.Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)

    x, y = torch.randn(2, 16, options.width)
    for step in range(options.steps):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(x, target=y, losses=losses)
        if step == 0:
            nn.functional.mse_loss(whole(x), y).backward()
            for ours, theirs in zip(module.parameters(), whole[place].parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        optimizer.step()
        if losses and mesh["tp"].get_local_rank() == 0 and step in (0, options.steps - 1):
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        print("the gradients are those of the model in one piece")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
