"""Reading what other ranks wrote: plain JSON of known form, and an error of penstock's own for everything else.

>>> with reading("a departure"):
...     epoch, cause = loads(b"[7, \\"it left\\"]", list)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from penstock.errors import PenstockError, TransportError

Form = TypeVar("Form")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around the reading of something from another rank: whatever is wrong with it becomes a TransportError that names it."""
    try:
        yield
    except PenstockError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise TransportError(
            f"{what} cannot be read ({type(error).__name__}: {str(error)[:200]}); does everybody run the same penstock, and "
            "does nobody else write into the store of this job?"
        ) from error


def loads(data: bytes, form: type[Form]) -> Form:
    """JSON of this form."""
    found: object = json.loads(data)
    if not isinstance(found, form):
        raise ValueError(f"expected a {form.__name__}, got {str(found)[:80]}")
    return found


def whole(*numbers: object) -> None:
    """Raise unless all are whole numbers."""
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise ValueError(f"expected a whole number, got {str(number)[:80]}")


def texts(*words: object) -> None:
    """Raise unless all are texts."""
    for word in words:
        if not isinstance(word, str):
            raise ValueError(f"expected a text, got {str(word)[:80]}")
