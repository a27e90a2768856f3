"""Lightning: an ordinary Trainer around a pipeline, with a strategy of a few lines.

    pip install "penstock[lightning]"
    torchrun --standalone --nproc-per-node 2 examples/lightning_module.py

The LightningModule makes the pipeline when Lightning has started the processes (`configure_model`) and steps by hand, since
a pipeline runs forward and backward together. `PipelineStrategy` keeps Lightning from wrapping the module in DDP, which
would take each rank's stage for a replica of the others'.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import penstock


class PipelineStrategy(DDPStrategy):
    """Lightning's processes and collectives, without DDP: every rank has other parameters, and penstock connects them."""

    def configure_ddp(self) -> None:
        pass

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": 1, "rank": 0}  # every rank is given the same batches


class Module(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.width = width
        self.pipe: penstock.Pipeline | None = None

    def configure_model(self) -> None:
        if self.pipe is None:
            torch.manual_seed(0)
            layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(3)]
            model = nn.Sequential(*layers, nn.Linear(self.width, self.width))
            example = torch.randn(16, self.width)
            self.pipe = penstock.Pipeline(
                model, (example,), loss_fn=nn.functional.mse_loss, schedule="zbv", microbatches=4, profile=False
            )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(() if self.pipe is None else self.pipe.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        result = self.pipe.step(x, target=y)
        self.pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", result.loss, prog_bar=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("validation", self.pipe.evaluate(x, target=y).loss)


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
        strategy=PipelineStrategy(process_group_backend="gloo"),
        enable_model_summary=False,
        **quiet,
    )
    module = Module(options.width)
    trainer.fit(module, DataLoader(train, batch_size=16), DataLoader(valid, batch_size=16))
    module.pipe.save(options.checkpoint)
    if dist.get_rank() == 0:
        figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
        print(f"loss {figures['loss']:.4f}, validation {figures['validation']:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
