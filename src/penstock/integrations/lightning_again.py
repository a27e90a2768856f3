"""A step that runs once more: what it does besides its result is taken back.

    with left_alone([module.accuracy]):
        module.training_step(batch, 0)

The first part of a step runs before the pipeline does, which shows what the model is called with, and the rest of it runs again
where the last stage is recomputed. What is counted there would count twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def left_alone(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards modules have the attributes that they had, and these hold what they held: lists, sets, dictionaries, tensors.

    All stay the same objects, since others may refer to them, as metrics of one collection do.
    """
    undo = [_undoing(vars(part), depth=2) for part in parts]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _undoing(value: object, *, depth: int) -> Callable[[], None]:
    """What makes a value as it is now; a dictionary with its values, down to this depth."""
    if type(value) is Tensor and not value.is_inference():
        version, values = value._version, value.detach().clone()

        def copy_back() -> None:
            if value._version != version:
                with torch.no_grad():
                    value.copy_(values)

        return copy_back
    if isinstance(value, dict) and depth:
        held = dict(value)
        inner = [_undoing(one, depth=depth - 1) for one in held.values()]

        def put_back() -> None:
            for name in value.keys() - held.keys():
                del value[name]
            value.update(held)
            for undo in inner:
                undo()

        return put_back
    if isinstance(value, list | deque | set):
        elements = list(value)

        def refill() -> None:
            value.clear()
            value.update(elements) if isinstance(value, set) else value.extend(elements)

        return refill
    return lambda: None
