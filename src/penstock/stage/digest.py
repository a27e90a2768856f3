"""What ranks compare to know that they cut the same model: names, shapes and types of all that its stages hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from torch import nn


def model_digest(stages: Iterable[nn.Module]) -> str:
    """All stages of a model, in a few words.

    >>> model_digest([nn.Linear(2, 2), nn.Linear(2, 1)])
    '9 parameters, 7a2e22f395cf'
    """
    modules = list(stages)
    rows = [
        [[name, list(value.shape), str(value.dtype)] for name, value in found]
        for module in modules
        for found in (module.named_parameters(), module.named_buffers())
    ]
    count = sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())
    return f"{count:,} parameters, {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]}"
