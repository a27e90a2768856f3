"""`torch.distributed.pipelining._debug`."""

from __future__ import annotations

from torch import Tensor, fx

from penstock.compat._siblings import found_in
from penstock.nest import Value

__getattr__ = found_in(__name__)


def friendly_debug_info(v: object) -> str:
    """A value in a few words: of a tensor its shape, its type and whether it requires a gradient.

    >>> friendly_debug_info(3)
    '3'
    """
    if not isinstance(v, Tensor):
        return str(v)
    return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"


def map_debug_info(a: Value) -> Value:
    """The same for everything in a nest of lists, tuples and dicts."""
    return fx.node.map_aggregate(a, friendly_debug_info)
