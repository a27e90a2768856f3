"""Tiny models of transformers, made from configs, and batches for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def padded(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows of different lengths: the labels of what is padding do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (rows, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(rows: int, length: int) -> dict[str, Tensor]:
    """Two texts in each row, one after the other: positions begin again, and no token sees the other text."""
    ids = torch.arange(rows * length).reshape(rows, length) % 37 + 3
    positions = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)])
    labels = ids.clone()
    labels[:, length // 2] = -100
    return {"input_ids": ids, "position_ids": positions.expand(rows, length).contiguous(), "labels": labels}


@contextmanager
def as_torchrun() -> Iterator[None]:
    """The environment that torchrun gives, which accelerate reads; what it remembers is forgotten afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
