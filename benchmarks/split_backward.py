"""What splitting the backward costs: (forward + input + weight) / (forward + full backward), one core.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/split_backward.py

`calls` counts the functions, of Python or C, that one microbatch calls, as sys.setprofile sees them. The variants
alternate; ratios are medians of paired rounds of process CPU time. 1.0 is the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.stage.backward import (
    Deferral,
    backward_input,
    backward_weight,
    intercepted,
    run_backward_full,
    run_deferred,
)

Run = Callable[[], None]


class Block(nn.Module):
    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def workloads() -> dict[str, tuple[nn.Module, Tensor]]:
    def layers(count: int, width: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    return {
        "8 x Linear(16)": (layers(8, 16), torch.randn(4, 16)),
        "32 x Linear(64)": (layers(32, 64), torch.randn(8, 64)),
        "2 blocks of 256": (nn.Sequential(*(Block(256, bias=True) for _ in range(2))), torch.randn(1, 128, 256)),
        "2 blocks, no bias": (nn.Sequential(*(Block(256, bias=False) for _ in range(2))), torch.randn(1, 128, 256)),
    }


def variants(module: nn.Module, batch: Tensor, *, with_torch: bool) -> dict[str, Run]:
    grad = torch.randn_like(module(batch))
    deferral = Deferral(module)
    parameters = list(module.parameters())

    def full() -> None:
        x = batch.detach().requires_grad_()
        run_backward_full((module(x),), (grad,))

    def split() -> None:
        x = batch.detach().requires_grad_()
        output, pending = run_deferred(deferral, module, (x,), {})
        backward_input((output,), (grad,), pending, inputs=(x,))
        del output
        backward_weight(pending)

    def split_by_torch() -> None:
        x = batch.detach().requires_grad_()
        output = module(x)
        _, groups = stage_backward_input([output], [grad], [x], iter(parameters))
        stage_backward_weight(iter(parameters), groups)

    return {"full": full, "split": split} | ({"torch": split_by_torch} if with_torch else {})


def count_calls(run: Run) -> int:
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def measure(run: Run, times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'workload':20s}{'variant':10s}{'µs':>10s}{'ratio':>8s}{'calls':>8s}")
    for name, (module, batch) in workloads().items():
        runs = variants(module, batch, with_torch=not options.no_torch)
        once = max(measure(runs["full"], 3), measure(runs["full"], 3))
        times = max(1, int(0.03 / once))
        for run in runs.values():
            run()
        samples: dict[str, list[float]] = {key: [] for key in runs}
        for _ in range(options.rounds):
            for key, run in runs.items():
                with intercepted() if key == "split" else nullcontext():
                    samples[key].append(measure(run, times))
        for key, run in runs.items():
            ratio = statistics.median(a / b for a, b in zip(samples[key], samples["full"], strict=True))
            print(f"{name:20s}{key:10s}{min(samples[key]) * 1e6:10.0f}{ratio:8.3f}{count_calls(run):8d}")


if __name__ == "__main__":
    main()
