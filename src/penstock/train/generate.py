"""Text from a trained model, byte by byte, through the pipeline."""

from __future__ import annotations

import torch

from penstock.front import Pipeline
from penstock.train.text import Text

_TEMPERATURE = 0.7


def generate(pipe: Pipeline, text: Text, count: int, *, length: int, seed: int) -> str:
    """So many bytes after the beginning of the validation text; every rank draws the same."""
    generator = torch.Generator().manual_seed(seed)
    window = text.validation[:length].long().unsqueeze(0)
    made = bytearray()
    for _ in range(count):
        scores = pipe.predict(window)[0, -1].float() / _TEMPERATURE
        following = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        made.append(int(following))
        window = torch.cat([window[:, 1:], following.unsqueeze(0)], dim=1)
    return made.decode("utf-8", errors="replace")
