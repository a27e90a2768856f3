"""Adapters of LoRA in shards of FSDP: saved whole, so that peft loads them, and read into shards again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh

from penstock.front.loading import copy_state
from penstock.integrations.adapters import adapter_weights
from penstock.integrations.transformers import pipeline
from tests.gloo_pool import GlooPool
from tests.integrations.hf import llama, padded
from tests.integrations.test_peft import adapted

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]


def sharded(folder: str, stages: int) -> Any:
    """The adapters of each stage in shards over "dp": trained, saved, read into others, and trained on."""
    mesh = init_device_mesh("cpu", (2, stages), mesh_dim_names=("dp", "pp"))
    first = 3 * mesh["dp"].get_local_rank()
    losses, shards = [], set()
    for number in range(2):
        pipe = pipeline(adapted(layers=stages), full(0), microbatches=2, mesh=mesh, data_parallel="fsdp")
        if number:
            copy_state(pipe.tensors, adapter_weights(f"{folder}/0", pipe), strict=False)
        trained = [(name, p) for name, p in pipe.named_parameters() if p.requires_grad]
        shards |= {name.split(".")[-3] for name, p in trained if p.to_local().numel() * 2 == p.numel()}
        optimizer = torch.optim.SGD([p for _, p in trained], lr=0.5)
        for step in range(2):
            losses.append(pipe.step(**{k: v[first : first + 3] for k, v in full(2 * number + step).items()}).loss)
            optimizer.step()
            optimizer.zero_grad()
        pipe.save_pretrained(f"{folder}/{number}")
    return losses, shards


def full(step: int) -> dict[str, torch.Tensor]:
    """Rows of as many labels each: replicas count alike."""
    ids = padded(6, 8, seed=step)["labels"].clamp(min=3)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize(
    "stages", [1, pytest.param(2, marks=pytest.mark.long("one stage has its adapters in shards, too"))]
)
def test_adapters_in_shards_are_saved_whole(gloo_pool: GlooPool, tmp_path: Path, stages: int) -> None:
    model = adapted(layers=stages)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    expected, logits = [], []
    for step in range(4):
        loss = model(**full(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
        with torch.no_grad():
            logits.append(model(**full(9)).logits)
    for losses, shards in gloo_pool.run(2 * stages, sharded, str(tmp_path), stages, timeout=240.0):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert shards == {"lora_A", "lora_B"}
    for number in (0, 1):
        with torch.no_grad():
            found = (
                PeftModel.from_pretrained(llama(num_hidden_layers=stages), tmp_path / str(number))
                .eval()(**full(9))
                .logits
            )
        torch.testing.assert_close(found, logits[2 * number + 1], rtol=1e-4, atol=1e-5)
