"""Which keyword arguments a stage takes."""

from __future__ import annotations

import inspect

import torch


def accepted_keywords(module: torch.nn.Module) -> frozenset[str] | None:
    """The keyword arguments that a module's forward takes; None: any."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
