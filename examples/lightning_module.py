"""Lightning: an ordinary LightningModule in a pipeline, by naming a strategy.

    pip install "penstock[lightning]"
    torchrun --standalone --nproc-per-node 2 examples/lightning_module.py

The module knows nothing of pipelines. `PipelineStrategy("net")` cuts its attribute `net` into stages; where a step calls it, the
pipeline runs, and the rest of the step runs on the last stage. docs/integrations/lightning.md says more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.integrations.lightning import PipelineStrategy


class Module(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same model on every rank
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(*layers, nn.Linear(width, width))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--checkpoint", default="runs/lightning")
    options = parser.parse_args(arguments)

    x = torch.randn(128, options.width, generator=torch.Generator().manual_seed(1))
    train, valid = TensorDataset(x[:96], x[:96].sin()), TensorDataset(x[96:], x[96:].sin())
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        strategy=PipelineStrategy("net", process_group_backend="gloo", microbatches=4, schedule="zbv", profile=False),
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(Module(options.width), DataLoader(train, batch_size=16), DataLoader(valid, batch_size=16))
    trainer.save_checkpoint(options.checkpoint)
    if dist.get_rank() == 0:
        figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
        print(f"loss {figures['loss']:.4f}, validation {figures['validation']:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
