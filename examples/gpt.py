"""A GPT from scratch: the model, the data, the training loop and some text at the end, in one file.

    torchrun --standalone --nproc-per-node 2 examples/gpt.py
    torchrun --standalone --nproc-per-node 4 examples/gpt.py --schedule zbv --steps 500

Every process runs this file. `penstock.Pipeline` measures the layers, picks a schedule, cuts the model and gives each
process its part; from then on `step` is a training step of the whole model. The text is the source of Python itself.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, *, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight  # tied: first and last stage share it
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def read_text() -> Tensor:
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8).long()


def batch_of(text: Tensor, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """The rows of a step; every process draws the same."""
    starts = torch.randint(len(text) - length - 1, (rows,), generator=torch.Generator().manual_seed(step))
    found = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return found[:, :-1], found[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """A factor: up over the first tenth, then down along a cosine."""
    warm = max(1, steps // 10)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))


def generate(pipe: penstock.Pipeline, prompt: bytes, *, count: int, length: int) -> bytes:
    """The likeliest byte, again and again. Every rank gets the outputs, so every rank draws the same.

    A window shorter than `length` is filled up behind its end, where a causal model does not look.
    """
    found = bytearray(prompt)
    for _ in range(count):
        window = found[-length:]
        logits = pipe.predict(torch.tensor([list(window.ljust(length, b"\0"))]))
        found.append(int(logits[0, len(window) - 1].argmax()))
    return bytes(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--checkpoint", default="runs/gpt")
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")  # "nccl" with GPUs
    torch.manual_seed(0)  # the same model on every rank
    text = read_text()
    model = GPT(layers=options.layers, width=options.width, heads=4, length=options.length)
    example, target = batch_of(text, 0, options.rows, options.length)
    pipe = penstock.Pipeline(
        model, (example,), example_target=target, loss_fn=loss_fn, schedule=options.schedule, microbatches=8
    )
    pipe.explain()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))
    first = dist.get_rank() == 0
    for step in range(options.steps):
        tokens, following = batch_of(text, step, options.rows, options.length)
        result = pipe.step(tokens, target=following)
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        if first and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {result.loss:.3f}, gradient norm {norm:.2f}")
    pipe.save(options.checkpoint, optimizer=optimizer, extra={"step": options.steps})
    written = generate(pipe, b"def ", count=20, length=options.length)
    if first:
        print(written.decode("utf-8", "replace"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
