"""Public calls of a pipeline, one at a time: a second thread is refused before anything has changed.

class Pipeline:
    @one_call
    def save(self, folder): ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., object])


def one_call(method: _Method) -> _Method:
    """Refuse the call while another thread is in one, or a step is under way."""

    @wraps(method)
    def call(self: Any, /, *args: object, **kwargs: object) -> object:
        with self.transport.called(f"{method.__name__}()"):
            return method(self, *args, **kwargs)

    return cast("_Method", call)
