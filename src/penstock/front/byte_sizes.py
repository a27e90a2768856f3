"""Sizes in bytes as people write them, and the state of an optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from penstock.errors import PlanError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate(("k", "M", "G", "T"))}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_PROBED = 4096  # numbers in the parameter that an optimizer is tried on


def byte_limits(given: object) -> int | tuple[int, ...]:
    """A limit of a rank, or of each.

    >>> byte_limits("1.5 GiB"), byte_limits(["6GB", 100])
    (1610612736, (6000000000, 100))
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(_bytes(one, given) for one in given)
    return _bytes(given, given)


def _bytes(size: object, given: object) -> int:
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match and match[2] in _UNITS:
            size = float(match[1]) * _UNITS[match[2]]
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
        units = ", ".join(unit for unit in _UNITS if unit)
        raise PlanError(
            f'memory_limit={given!r}; expected bytes of a rank (6_000_000_000, or "6GiB"; units {units}), or a list with '
            "those of each"
        )
    return round(size)


def state_of(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype) -> float:
    """Bytes of state that an optimizer keeps for each byte of parameters: it takes one step on a small one.

    >>> state_of(torch.optim.AdamW, torch.float32), state_of(lambda p: torch.optim.SGD(p, lr=0.1), torch.float32)
    (2.0, 0.0)
    """
    parameter = torch.nn.Parameter(torch.zeros(_PROBED, dtype=dtype))
    optimizer = make([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state.get(parameter, {})
    sizes = [value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.numel() >= _PROBED]
    return sum(sizes) / parameter.nbytes
