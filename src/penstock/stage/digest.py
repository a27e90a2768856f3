"""What ranks compare to know that they cut the same model: what its stages hold, and what they do with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from torch import fx, nn


def model_digest(stages: Iterable[nn.Module]) -> str:
    """All stages of a model, in a few words.

    >>> model_digest([nn.Linear(2, 2), nn.Linear(2, 1)])
    '9 parameters, 2efc8f1d7e24'
    """
    modules = list(stages)
    kept = [(module.named_parameters(), module.named_buffers()) for module in modules]
    rows = [
        [*([[name, list(t.shape), str(t.dtype)] for name, t in tensors] for tensors in tables), operators_of(module)]
        for module, tables in zip(modules, kept, strict=True)
    ]
    count = sum(p.numel() for p in {id(p): p for module in modules for p in module.parameters()}.values())
    return f"{count:,} parameters, {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]}"


def operators_of(module: nn.Module) -> list[str]:
    """Those of a captured stage, and the numbers they are given (the share of a dropout, say), sorted. Of another module what it
    is made of: the classes of its parts, and of torch's own layers what they say of themselves.

    Sizes and devices of a graph are left out: they may differ between ranks that run the same model.
    """
    graph = getattr(module, "graph", None)
    if not isinstance(graph, fx.Graph):
        return [
            f"{name} {type(part).__name__} {part.extra_repr() if type(part).__module__.startswith('torch.nn.') else ''}"
            for name, part in module.named_modules()
        ]
    return sorted(
        " ".join(
            [
                getattr(node.target, "__name__", str(node.target)),
                *(f"{value:.6g}" for value in (*node.args, *node.kwargs.values()) if isinstance(value, float)),
            ]
        )
        for node in graph.nodes
        if node.op == "call_function"
    )
