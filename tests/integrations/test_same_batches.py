"""All ranks of a pipeline train on the same batches, whatever draws them, and whatever the stages of a rank draw."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from penstock.integrations.transformers import PipelineTrainer
from penstock.run.checksums import checksums_of
from tests.gloo_pool import GlooPool
from tests.integrations.hf import as_torchrun, llama

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]
OPTIONS = {"microbatches": 2, "schedule": "1f1b", "profile": False}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of different lengths."""

    def __init__(self, drawn: bool = False) -> None:
        self.drawn = drawn

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if row >= len(self):
            raise IndexError(row)  # whoever asks for the lengths of all rows goes on until then
        shift = int(torch.randint(5, ())) if self.drawn else 0
        return {"input_ids": (torch.arange(3 + row % 5) * (row + 3) + shift) % 37 + 3}


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Rows in an order that is drawn while they are read."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(64):
            yield {"input_ids": torch.randint(3, 40, (6,))}


def collate(rows: list[dict[str, Tensor]], *, draws: bool = False) -> dict[str, Tensor]:
    """Pads; a collator that draws replaces tokens, by torch's, numpy's and Python's random numbers."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = ids.masked_fill(ids == 0, -100)
    if draws:
        ids = ids.masked_fill(torch.rand(ids.shape) < 0.3, 1)
        ids[np.random.randint(len(ids)), 0], ids[random.randrange(len(ids)), 1] = 2, 2
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def collate_and_draw(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return collate(rows, draws=True)


CASES: dict[str, dict[str, Any]] = {
    "collator": {"collator": collate_and_draw},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "unseeded sampler": {"accelerator_config": {"use_seedable_sampler": False}},
    "seed by rank": {"seeds": True},
    "iterable": {"data": Stream(), "max_steps": 8},
}


def trained(kind: Any, folder: str, case: str, *, dropout: float, resume: str | None = None, **more: Any) -> list[Any]:
    """Train for two epochs; what the model was given in each step, and the losses."""
    changes = CASES.get(case, {}) | more
    options = {"pipeline_options": OPTIONS} if kind is PipelineTrainer else {}
    seeds, data = changes.pop("seeds", False), changes.pop("data", Rows())
    collator = changes.pop("collator", collate)
    given = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 3, "seed": 3}
    given |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    args = transformers.TrainingArguments(output_dir=folder, **(given | {"learning_rate": 1e-2} | changes))
    model = llama(num_hidden_layers=3, attention_dropout=dropout)
    trainer = kind(model=model, args=args, train_dataset=data, eval_dataset=Rows(), data_collator=collator, **options)
    seen: list[Any] = []
    whole = trainer.training_step
    trainer.training_step = lambda model, inputs, *rest: (seen.append(bits(inputs)), whole(model, inputs, *rest))[1]
    if not args.dataloader_num_workers:
        trainer.evaluate()
    if seeds:
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    trainer.train(resume_from_checkpoint=resume)
    return [seen, [log["loss"] for log in trainer.state.log_history if "loss" in log]]


def bits(inputs: dict[str, Tensor]) -> dict[str, int]:
    return checksums_of({name: inputs[name] for name in ("input_ids", "labels", "attention_mask")})


@contextmanager
def as_parent() -> Iterator[None]:
    """Processes of the pool are daemons, which may not start the workers of a loader."""
    config: Any = multiprocessing.current_process()
    config, before = config._config, dict(config._config)
    config["daemon"] = False
    try:
        yield
    finally:
        config.update(before)


def pipelined(folder: str, case: str, dropouts: tuple[float, ...]) -> list[Any]:
    with as_torchrun():
        return [trained(PipelineTrainer, f"{folder}/{dropout}", case, dropout=dropout) for dropout in dropouts]


def with_workers(folder: str) -> list[Any]:
    given = {"data": Rows(drawn=True), "collator": collate_and_draw, "dataloader_num_workers": 1, "max_steps": 3}
    with as_torchrun(), as_parent():
        return trained(PipelineTrainer, folder, "workers", dropout=0.3, save_strategy="no", **given)


def test_workers_of_all_ranks_draw_alike(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """A Trainer seeds its workers by the rank of their process."""
    first, second = gloo_pool.run(2, with_workers, str(tmp_path), timeout=240.0)
    assert first == second
    assert len({str(step) for step in first[0]}) == 3


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_gives_all_ranks_the_same_batches(gloo_pool: GlooPool, tmp_path: Path, case: str) -> None:
    """Dropout on one rank drew more numbers than on the other, and what draws batches from them (a collator that masks tokens,
    group_by_length, a sampler without a seed of its own, the seeds of workers) gave each rank batches of its own: the inputs of
    one were trained with the labels of another. Where the model draws nothing, batches and losses are those of a Trainer."""
    first, second = gloo_pool.run(2, pipelined, str(tmp_path), case, (0.0, 0.3), timeout=240.0)
    assert first == second
    assert [len(seen) for seen, _ in first] == [8, 8]
    assert len({str(step) for step in first[1][0]}) == 8
    expected = trained(transformers.Trainer, str(tmp_path / "plain"), case, dropout=0.0)
    assert first[0][0] == expected[0]
    assert first[0][1] == pytest.approx(expected[1], rel=1e-4)


def resumed(folder: str) -> list[Any]:
    """Two epochs of four steps; and the same from the third step, and from the end of the first epoch, on."""
    with as_torchrun():
        whole = trained(PipelineTrainer, folder, "collator", dropout=0.3, save_steps=1)
        steps = (3, 4)
        return [whole] + [
            trained(PipelineTrainer, f"{folder}/{step}", "collator", dropout=0.3, resume=f"{folder}/checkpoint-{step}")
            for step in steps
        ]


def test_a_resumed_trainer_gives_all_ranks_the_same_batches(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """The random state of each rank came out of its own file. From the end of an epoch on it is the same run; within one a
    Trainer draws the first batch before it has read its random state."""
    first, second = gloo_pool.run(2, resumed, str(tmp_path), timeout=240.0)
    assert first == second
    (seen, losses), (within, _), (later, same) = first
    assert later == seen[4:]
    assert same == pytest.approx(losses, abs=1e-5)  # the log has the first half out of the checkpoint
    assert within[2:] == seen[5:]
    assert [step["labels"] for step in within] == [step["labels"] for step in seen[3:]]
