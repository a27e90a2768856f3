"""Time to capture a transformer of 12 layers and cut it into 4 stages, side by side with torch's own `pipeline`.

    python benchmarks/capture.py [--rounds 5]

Both start from a fresh copy of the model and an example, in turns; the medians and their ratio are printed. penstock
keeps the batch size open, torch fixes it, so penstock is also timed with fixed sizes. The last line is for cuts that
are chosen by measured costs, which torch does not offer: its layers are run, too.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed.pipelining as theirs
from torch import Tensor, nn

from penstock import capture as ours
from penstock.capture.cost_cuts import forget

CUTS = ("layers.3", "layers.6", "layers.9")


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm_attention(x)
        q, k, v = (
            layer(y).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm_forward(x)))))


class Transformer(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, layers: int = 12, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _measured(ids: Tensor) -> Callable[[nn.Module], object]:
    def capture(model: nn.Module) -> object:
        forget()  # what was measured in the turn before
        return ours.pipeline(model, (ids,), num_stages=4)

    return capture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model, ids = Transformer(), torch.randint(0, 100, (4, 32))
    mine = dict.fromkeys(CUTS, ours.SplitPoint.BEGINNING)
    other = dict.fromkeys(CUTS, theirs.SplitPoint.BEGINNING)
    ways: dict[str, Callable[[nn.Module], object]] = {
        "penstock, open batch size": lambda m: ours.pipeline(m, (ids,), split_spec=mine),
        "penstock, fixed sizes": lambda m: ours.pipeline(m, (ids,), split_spec=mine, dynamic_shapes={}),
        "torch, fixed sizes": lambda m: theirs.pipeline(m, (ids,), split_spec=other),
        "penstock, by measured cost": _measured(ids),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            fresh = copy.deepcopy(model)
            start = time.process_time()
            way(fresh)
            if turn:  # the first turn warms up
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print("12 layers into 4 stages, seconds of processor time, median of", rounds)
    for name, median in medians.items():
        print(f"  {name:28} {median:6.2f}   {median / medians['torch, fixed sizes']:5.2f} x torch")


if __name__ == "__main__":
    main()
