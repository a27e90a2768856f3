"""Evaluation only: weights from a file into a pipeline, a loss over a data set, and outputs for single rows.

    torchrun --standalone --nproc-per-node 2 examples/evaluate.py

Nothing here keeps a graph or a gradient. Dropout and batch norm are in evaluation mode, and batches may have any number of
rows, also fewer than there are microbatches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import penstock


def make_model() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--weights", help="a file of torch.save(model.state_dict(), FILE)")
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model()
    state = model.state_dict() if options.weights is None else torch.load(options.weights, weights_only=True)
    x, labels = torch.randn(options.rows, 32), torch.randint(0, 10, (options.rows,))

    pipe = penstock.Pipeline(
        model, (x[:32],), loss_fn=nn.functional.cross_entropy, schedule="forward", microbatches=4, profile=False
    )
    pipe.load_state_dict(state)  # each rank takes what its stages need
    total = correct = 0.0
    for rows, targets in zip(x.split(32), labels.split(32), strict=True):
        result = pipe.evaluate(rows, target=targets)
        total += result.loss * len(rows)
        correct += (pipe.predict(rows).argmax(dim=1) == targets).sum().item()
    one = pipe.predict(x[:1])  # a single row
    if dist.get_rank() == 0:
        print(f"loss {total / len(x):.4f}, accuracy {correct / len(x):.1%} over {len(x)} rows")
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(total / len(x), nn.functional.cross_entropy(model(x), labels).item())
            torch.testing.assert_close(one, model(x[:1]))
        print("the same as the model in one piece")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
