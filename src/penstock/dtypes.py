"""The names of tensor types, both ways: what stands for a dtype in JSON and in texts.

>>> dtype_name(torch.bfloat16)
'bfloat16'
>>> dtype_named("bfloat16")
torch.bfloat16
"""

from __future__ import annotations

import torch

from penstock.errors import StageError

_NAMES = {value: str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` is called "float32"."""
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The inverse. A name that this version of torch does not know is a StageError: names come from other ranks."""
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise StageError(
            f"{name!r:.80} is no type of tensors here; expected a name such as 'float32'. Do all ranks have one torch?"
        )
    return found
