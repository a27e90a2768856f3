"""Reading what other ranks wrote: plain JSON of known form, and an error of penstock's own for everything else.

>>> read(b"[7, \\"it left\\"]", tuple[int, str], "a departure")
(7, 'it left')
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

from penstock.checks import fits
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
    """JSON of this form: a tuple of known kinds, or the fields of a dataclass."""
    found: object = json.loads(data)
    if is_dataclass(form) and isinstance(found, dict):
        kinds = get_type_hints(form)
        if all(name in kinds and _is(one, kinds[name]) for name, one in found.items()):
            return form(**found)
    elif get_origin(form) is tuple and isinstance(found, list):
        if len(found) == len(get_args(form)) and all(map(_is, found, get_args(form))):
            return cast("Form", tuple(found))
    raise ValueError(f"expected a {getattr(form, '__name__', form)}, got {str(found)[:80]}")


def _is(value: object, kind: object) -> bool:
    """Whether it is of that kind; to Python a truth is a number as well."""
    return fits(value, kind) and (kind in (bool, object) or not isinstance(value, bool))


def read(data: bytes, form: type[Form], what: str) -> Form:
    """JSON of this form; what is not of it is an error that names what was read."""
    with reading(what):
        return loads(data, form)
