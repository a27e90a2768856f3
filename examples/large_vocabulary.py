"""A large vocabulary: the logits of one slice of rows at a time, under a limit of memory.

    torchrun --standalone --nproc-per-node 2 examples/large_vocabulary.py
    torchrun --standalone --nproc-per-node 2 examples/large_vocabulary.py --vocabulary 50000 --slice 128

The head and the loss of a language model hold the logits of all tokens, which is often more than all layers hold together.
`penstock.chunked_loss` computes both for one slice of tokens at a time, forwards and backwards. The program trains the same
model both ways and prints what the last rank holds in a step, as planned and as counted; and the smallest `memory_limit` that
the planner would take for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock


class Model(nn.Module):
    """Returns its own loss, so the pipeline needs no loss_fn. `slice_rows=0`: all logits at once."""

    def __init__(self, *, vocabulary: int, width: int, slice_rows: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.slice_rows = slice_rows

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.blocks(self.tokens(tokens))
        if self.slice_rows:
            return penstock.chunked_loss(hidden, labels, self.head, rows=self.slice_rows)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def train(options: argparse.Namespace, slice_rows: int) -> tuple[float, int, int, int]:
    """The last loss; what the last rank holds in a step, planned and counted; and the smallest limit that would do."""
    torch.manual_seed(0)
    model = Model(vocabulary=options.vocabulary, width=options.width, slice_rows=slice_rows)
    tokens = torch.randint(options.vocabulary, (options.rows, options.length + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    pipe = penstock.Pipeline(
        model,
        batch,
        schedule="1f1b",
        microbatches=4,
        memory_limit="16GiB",
        output_loss_value_spec=True,  # what the model returns is its loss
        split_spec={"blocks.2": penstock.SplitPoint.BEGINNING},  # so that both models are cut alike
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for _ in range(options.steps):
        with pipe.watch_memory():
            loss = pipe.step(*batch).loss
        optimizer.step()
        optimizer.zero_grad()
    last = pipe.memory().ranks[-1]
    assert loss is not None, "every rank is told the loss"
    assert pipe.choice is not None, "a model was cut, so there is a choice"
    return loss, last.planned_peak, last.measured_peak, pipe.choice.smallest_limit or 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--slice", type=int, default=64, help="tokens whose logits are there at a time")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(arguments)
    dist.init_process_group()
    try:
        losses = []
        for name, slice_rows in (("all logits at once", 0), (f"{options.slice} tokens at a time", options.slice)):
            loss, planned, counted, smallest = train(options, slice_rows)
            losses.append(loss)
            if dist.get_rank() == 0:
                print(
                    f"{name}: loss {loss:.4f}; the last rank holds {counted / 2**20:.1f} MiB in a step "
                    f"({planned / 2**20:.1f} MiB planned); the smallest memory_limit is {smallest / 2**20:.1f} MiB"
                )
        if dist.get_rank() == 0 and abs(losses[0] - losses[1]) < 1e-3:
            print("the losses are the same")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
