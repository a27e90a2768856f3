"""JSON that every reader takes: it knows no NaN and no infinity, and a loss may become either.

>>> dumps({"step": 3, "loss": float("nan"), "ranks": [{"seconds": 0.5}]})
'{"step": 3, "loss": null, "ranks": [{"seconds": 0.5}], "not_finite": {"loss": "nan"}}'
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite


def dumps(said: Mapping[str, object]) -> str:
    """One object. Numbers that are not finite are null; `not_finite` tells what those at the top were: nan, inf or -inf."""
    strange = {
        name: repr(float(value)) for name, value in said.items() if isinstance(value, float) and not isfinite(value)
    }
    whole = {**said, "not_finite": strange} if strange else said
    return json.dumps(finite(whole), allow_nan=False)


def finite(value: object) -> object:
    """The same with None in the place of each number that is not finite."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value
