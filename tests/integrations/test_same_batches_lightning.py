"""All ranks of a PipelineStrategy train on the same batches, whatever draws them, and whatever the stages of a rank draw."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from penstock.integrations.lightning import PipelineStrategy
from penstock.run.checksums import checksums_of
from tests.gloo_pool import GlooPool
from tests.integrations.hf import as_torchrun
from tests.integrations.test_lightning import IN_LIGHTNING, WIDTH

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]
ROWS, SIZE = 24, 6


def drawn(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    x[random.randrange(len(x))] += torch.rand(WIDTH)
    y[np.random.randint(len(y))] = 0.0
    return x, y


def loader(kind: str) -> Any:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sin())
    match kind:
        case "weighted":
            return DataLoader(data, SIZE, sampler=WeightedRandomSampler(torch.ones(ROWS), ROWS))
        case "subset":
            return DataLoader(data, SIZE, sampler=SubsetRandomSampler(range(ROWS)))
        case "batch_sampler":
            return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), SIZE, drop_last=False))
        case "collate_fn":
            return DataLoader(data, SIZE, collate_fn=drawn)
        case _:
            return DataLoader(data, SIZE, shuffle=True)


class Dropping(lightning.LightningModule):
    """Dropout where the first stage is, which then draws more numbers than the last. The step draws too, before its model."""

    def __init__(self, share: float) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Dropout(share), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            )
        self.batches: list[dict[str, int]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.batches.append(checksums_of({"batch": batch}))

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def fitted(folder: str, kind: str, share: float, *, piped: bool, resume: str | None = None) -> tuple[Any, ...]:
    torch.manual_seed(dist.get_rank() if piped and kind == "seed by rank" else 0)
    random.seed(0)
    np.random.seed(0)
    options: dict[str, Any] = {"devices": 1}
    if piped:
        made = PipelineStrategy(microbatches=3, schedule="1f1b", profile=False, process_group_backend="gloo")
        options = {"devices": 2, "strategy": made, "plugins": [LightningEnvironment()]}
    kept = ModelCheckpoint(dirpath=f"{folder}/kept", filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, callbacks=[kept], enable_progress_bar=False, **options,
        enable_model_summary=False,
    )  # fmt: skip
    module = Dropping(share)
    trainer.fit(module, loader(kind), ckpt_path=resume)
    return module.batches, module.losses


def all_kinds(folder: str, kinds: tuple[str, ...], share: float) -> list[Any]:
    with as_torchrun():
        return [fitted(f"{folder}/{kind}-{share}", kind, share, piped=True) for kind in kinds]


KINDS = ("shuffle", "weighted", "subset", "batch_sampler", "collate_fn", "seed by rank")


@pytest.mark.filterwarnings(*IN_LIGHTNING)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_lightning_gives_all_ranks_the_same_batches(gloo_pool: GlooPool, tmp_path: Path, share: float) -> None:
    """Only a loader with a RandomSampler was made to shuffle alike. With any other sampler, or a collate_fn that draws,
    ranks trained on different rows once dropout had drawn more numbers on one of them than on another, or from the beginning if
    the program seeds by rank. Where the model draws nothing, batches and losses are those of Lightning without a pipeline."""
    first, second = gloo_pool.run(2, all_kinds, str(tmp_path), KINDS, share, timeout=240.0)
    assert first == second
    for kind, (batches, losses) in zip(KINDS, first, strict=True):
        assert len(batches) == 8, kind
        assert len({str(batch) for batch in batches}) == 8, kind
        if share == 0:
            expected = fitted(str(tmp_path / "plain" / kind), kind, share, piped=False)
            assert batches == expected[0], kind
            assert losses == pytest.approx(expected[1], rel=1e-4), kind
