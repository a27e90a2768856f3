"""torchtitan with penstock underneath: its Llama, cut, parallelized and scheduled by its own code, which penstock runs.

    torchrun --standalone --nproc-per-node 2 examples/torchtitan_llama.py --schedule ZBVZeroBubble

torchtitan asks torch.distributed.pipelining for stages and schedules. `penstock.compat` stands in for that, so its whole
trainer runs too, on the accelerators that it needs: `torchrun ... -m penstock.compat -m torchtitan.train ...`. Here is what
of it also runs on processors. It needs `pip install torchtitan triton`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist

import penstock.compat


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedule", default="ZBVZeroBubble", help="a schedule, by the name that torchtitan has for it"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    options = parser.parse_args(arguments)

    penstock.compat.install()  # before torchtitan imports torch.distributed.pipelining
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.tools import utils

    utils.device_type = device = "cuda" if torch.cuda.is_available() else "cpu"  # torchtitan itself knows no processors
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)  # the same model on every rank
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[: options.layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=dist.get_world_size(),
        pipeline_parallel_schedule=options.schedule,
        spmd_backend="partial_dtensor",
    )
    training = TrainingConfig(
        local_batch_size=8, seq_len=options.length, mixed_precision_param="float32", disable_cuda_graphs=True
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    schedule, parts, is_first, is_last = spec.pipelining_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device(device),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=lambda scores, labels: (cross_entropy_loss(scores, labels) / labels.numel() / 8, None),
    )
    for part in parts:
        part.to_empty(device=device)
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        part.train()
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)

    tokens = torch.randint(0, 2048, (8, options.length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    for step in range(options.steps):
        losses: list[torch.Tensor] = []
        given = (tokens[:, :-1],) if is_first else ()
        schedule.step(*given, target=tokens[:, 1:] if is_last else None, losses=losses if is_last else None)
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            print(f"step {step}: loss {sum(losses).item():.3f} by {type(schedule).__module__.partition('.')[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
