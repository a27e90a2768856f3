"""Costs as a small file: one JSON object whose names are the fields of `Costs`.

    {
      "format": "penstock-costs", "version": 1,
      "forward": [1.0, 1.2], "backward_input": [1.0, 1.1], "backward_weight": [0.8, 0.9],
      "held_to_input": [1.0, 1.0], "held_to_weight": [0.4, 0.4],
      "latency": 0.1, "links": [{"sender": 0, "receiver": 1, "latency": 3.0, "bandwidth": null}],
      "microbatches": [1.0, 0.5], "ranks": [1.0, 1.3]
    }

The first three lists, one number a stage, must be there. Without `held_to_input` every stage holds 1, without `held_to_weight` as
much as before. All else may be left out, and means what it means in `Costs`. A file is read strictly: anything that is not in
this description is refused, and nothing is read beyond `LARGEST` bytes.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from os import PathLike
from pathlib import Path
from typing import Any, Final

from penstock.checks import check_types
from penstock.errors import ParseError
from penstock.plan.file_io import read_text, write_text
from penstock.simulate.costs import Costs, Link

FORMAT: Final = "penstock-costs"
VERSION: Final = 1
LARGEST: Final = 16 * 1024 * 1024
_NAMES: Final = {field.name: field for field in fields(Costs)}
_LISTS: Final = frozenset(name for name, field in _NAMES.items() if "tuple[" in str(field.type))
_NEEDED: Final = ("forward", "backward_input", "backward_weight")


def load_costs(path: Path | str) -> Costs:
    """Read a file of costs; see the top of this file for its format.

    simulate(plan, load_costs("costs.json"))
    """
    check_types("load_costs", ParseError, path=(path, str | PathLike))
    text = read_text(path, ParseError, limit=LARGEST, hint="; expected a file of costs, which is small")
    try:
        return loads_costs(text)
    except ParseError as error:
        raise ParseError(f"{path}: {error}") from None


def dump_costs(costs: Costs, path: Path | str) -> None:
    """Write a file that `load_costs` and `penstock ... --costs` read.

    dump_costs(Costs.unit(plan), "costs.json")
    """
    check_types("dump_costs", ParseError, path=(path, str | PathLike))
    write_text(path, dumps_costs(costs), ParseError)


def dumps_costs(costs: Costs) -> str:
    """The text of such a file; what is as it would be anyway is left out.

    >>> loads_costs(dumps_costs(Costs.per_rank(num_stages=2, latency=0.5))).latency
    0.5
    """
    check_types("dumps_costs", ParseError, costs=(costs, Costs))
    data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for name, field in _NAMES.items():
        value = getattr(costs, name)
        if field.default is MISSING or value != field.default:
            data[name] = [link._asdict() for link in value] if name == "links" else value
    return json.dumps(data) + "\n"


def loads_costs(text: str) -> Costs:
    """Read costs from the text of a file. Raises ParseError with what is wrong and what was expected.

    loads_costs(Path("costs.json").read_text())
    """
    check_types("loads_costs", ParseError, text=(text, str | bytes))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"no JSON: {error}; expected an object with {', '.join(_NEEDED)}") from None
    if not isinstance(data, dict) or data.pop("format", FORMAT) != FORMAT or data.pop("version", VERSION) != VERSION:
        raise ParseError(f'no costs; expected a JSON object with "format": "{FORMAT}" and "version": {VERSION}')
    unknown = sorted(set(data) - set(_NAMES))
    if unknown:
        raise ParseError(f"costs have no {', '.join(map(repr, unknown[:8]))}; expected some of {', '.join(_NAMES)}")
    missing = [name for name in _NEEDED if name not in data]
    if missing:
        raise ParseError(f"{missing[0]} is missing; expected a list with one number a stage")
    found: dict[str, Any] = {name: _value(name, value) for name, value in data.items()}
    found.setdefault("held_to_input", (1.0,) * len(found["forward"]))
    found.setdefault("held_to_weight", found["held_to_input"])
    try:
        return Costs(**found)
    except ValueError as error:
        raise ParseError(str(error)) from None


def _value(name: str, value: object) -> Any:
    if value is None and _NAMES[name].default is None:
        return None
    if name not in _LISTS:
        return _number(name, value)
    if not isinstance(value, list):
        raise ParseError(f"{name}={value!r:.60}; expected a list of {'objects' if name == 'links' else 'numbers'}")
    return tuple(_link(one) if name == "links" else _number(name, one) for one in value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParseError(f"{name}: {value!r:.60}; expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ParseError(f"{name}: a number of {len(str(value))} digits; expected a finite one") from None


def _link(value: object) -> Link:
    if not isinstance(value, dict) or not {"sender", "receiver", "latency"} <= set(value) <= set(Link._fields):
        raise ParseError(f"links: {value!r:.60}; expected an object with sender, receiver, latency and bandwidth")
    if not type(value["sender"]) is type(value["receiver"]) is int:
        raise ParseError(f"links: {value!r:.60}; expected the numbers of two ranks")
    numbers = {name: _number(name, value[name]) for name in ("latency", "bandwidth") if value.get(name) is not None}
    return Link(**(value | numbers))
