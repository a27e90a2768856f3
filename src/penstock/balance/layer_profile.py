"""Profile: the costs of each layer, the input of `balance`, and its JSON format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.checks import check_types
from penstock.errors import BalanceError
from penstock.plan.file_io import read_text, write_text

_FORMAT = "penstock-profile"
_LARGEST = 64 * 1024 * 1024  # bytes of a file: a line for each layer
_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer (or graph node), for one microbatch.

    >>> LayerCost("embed", forward=0.2, backward_weight=0.3, parameter_bytes=4_000_000, output_bytes=65_536).total
    0.5

    Times may be in any unit (seconds, FLOPs), as long as all layers use the same one.
    """

    name: str
    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    # Bytes held for each microbatch from its forward until its input-backward; what the weight-backward needs included.
    activation_to_input: int = 0
    # Bytes still held from the input-backward until the weight-backward.
    activation_to_weight: int = 0
    # The most bytes at a time that its forward makes, what stays included; that its backward makes beside those, and the
    # two parts of a split one.
    forward_peak: int = 0
    backward_peak: int = 0
    input_peak: int = 0
    weight_peak: int = 0
    # Of what is held to the input-backward: tensors that are too small to be offloaded.
    unmoved: int = 0
    # Copies of its parameters in another type, which autocast keeps from the first forward to the end of a step.
    cast_bytes: int = 0
    # Parameters that this layer alone uses.
    parameter_bytes: int = 0
    # What the layer hands on.
    output_bytes: int = 0
    # Names of parameters that other layers use too; their sizes stand once, in Profile.shared_parameters.
    shared: frozenset[str] = frozenset()
    # Index of the last layer that reads the output; None: the next layer. A skip connection sets it further on.
    last_use: int | None = None

    def __post_init__(self) -> None:
        for name in (*_TIMES, *_BYTES):
            value = getattr(self, name)
            kind = int if name in _BYTES else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < math.inf:
                expected = "whole number of bytes" if name in _BYTES else "finite number"
                raise BalanceError(f"layer {self.name!r}: {name} is {value!r}, expected a {expected} >= 0")
        shared: object = self.shared
        if isinstance(shared, str):
            raise BalanceError(
                f"layer {self.name!r}: shared is the text {shared!r}, expected a set of names; "
                f"write shared=frozenset({{{shared!r}}})"
            )
        object.__setattr__(self, "shared", frozenset(self.shared))

    @property
    def total(self) -> float:
        """Forward and both halves of backward."""
        return self.forward + self.backward_input + self.backward_weight


_TIMES, _BYTES = ([field.name for field in fields(LayerCost) if field.type == kind] for kind in ("float", "int"))


@dataclass(frozen=True)
class Profile:
    """The layers of a model in the order in which they run, with what they cost.

    >>> profile = Profile(layers=(LayerCost("embed", forward=1.0, output_bytes=8), LayerCost("head", forward=2.0)))
    >>> Profile.loads(profile.dumps()) == profile
    True
    >>> profile.crossing
    (8,)
    """

    layers: tuple[LayerCost, ...]
    # Bytes of each parameter that several layers use (a tied embedding).
    shared_parameters: Mapping[str, int] = field(default_factory=dict)
    # Bytes over the cut before layer 1, 2, ...; None: computed from output_bytes and last_use.
    crossing_bytes: tuple[int, ...] | None = None
    # Anything worth keeping beside the numbers: device, microbatch size, date. JSON values only.
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types("Profile", BalanceError, layers=(self.layers, Sequence[LayerCost]))
        check_types("Profile", BalanceError, shared_parameters=(self.shared_parameters, Mapping[str, int]))
        check_types("Profile", BalanceError, crossing_bytes=(self.crossing_bytes, Sequence[int] | None))
        check_types("Profile", BalanceError, metadata=(self.metadata, Mapping))
        object.__setattr__(self, "layers", tuple(self.layers))
        for name in ("shared_parameters", "metadata"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if self.crossing_bytes is not None:
            object.__setattr__(self, "crossing_bytes", tuple(self.crossing_bytes))
        if not self.layers:
            raise BalanceError("the profile has no layers, expected at least one LayerCost")
        first: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer.name in first:
                raise BalanceError(f"layers {first[layer.name]} and {index} are both called {layer.name!r}; rename one")
            first[layer.name] = index
            missing = layer.shared - self.shared_parameters.keys()
            if missing:
                raise BalanceError(
                    f"layer {layer.name!r} shares {sorted(missing)}, which shared_parameters does not list "
                    f"({sorted(self.shared_parameters)}); write shared_parameters={{{min(missing)!r}: bytes}}"
                )
            if layer.last_use is not None and not index <= layer.last_use < len(self.layers):
                raise BalanceError(
                    f"layer {layer.name!r} (index {index}): last_use is {layer.last_use}, "
                    f"expected an index from {index} to {len(self.layers) - 1}"
                )
        crossing = self.crossing_bytes
        if crossing is not None and len(crossing) != len(self.layers) - 1:
            raise BalanceError(
                f"crossing_bytes has {len(crossing)} entries, expected {len(self.layers) - 1}: "
                f"one for each cut between {len(self.layers)} layers"
            )
        sizes: dict[str, object] = {f"shared parameter {name!r}": size for name, size in self.shared_parameters.items()}
        sizes |= {f"crossing_bytes[{i}]": size for i, size in enumerate(crossing or ())}
        for what, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise BalanceError(f"{what} is {size!r}, expected a whole number of bytes >= 0")

    @property
    def crossing(self) -> tuple[int, ...]:
        """Bytes over each possible cut: entry i stands for the cut before layer i + 1."""
        if self.crossing_bytes is not None:
            return self.crossing_bytes
        count = len(self.layers)
        change = [0] * (count + 1)
        for index, layer in enumerate(self.layers):
            last = index + 1 if layer.last_use is None else layer.last_use
            change[min(index + 1, count)] += layer.output_bytes
            change[min(last + 1, count)] -= layer.output_bytes
        return tuple(accumulate(change[1:count]))

    def dumps(self) -> str:
        """The profile as JSON text, one layer a line; `loads` is the inverse."""
        rows = ",\n".join("  " + json.dumps(_layer_to_json(layer)) for layer in self.layers)
        own = {"metadata": dict(self.metadata), "shared_parameters": dict(self.shared_parameters)}
        head = {"format": _FORMAT, "version": _VERSION, **own, "crossing_bytes": self.crossing_bytes}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        return "\n".join(["{", *lines, ' "layers": [', rows, " ]", "}", ""])

    @classmethod
    def loads(cls, text: str) -> Profile:
        """Read what `dumps` wrote."""
        check_types("Profile.loads", BalanceError, text=(text, str | bytes))
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BalanceError(f"this is no profile: not JSON ({error})") from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise BalanceError(f'this is no profile: expected a JSON object with "format": "{_FORMAT}"')
        if data.get("version") != _VERSION:
            raise BalanceError(f"the profile has version {data.get('version')!r}, this penstock reads {_VERSION}")
        own = {name: value for name, value in data.items() if name not in ("format", "version")}
        if own.keys() - {f.name for f in fields(cls)} or not isinstance(own.get("layers"), list):
            raise BalanceError(f"the profile needs a list 'layers' and no unknown entries, got {sorted(data)}")
        try:
            return cls(**{**own, "layers": tuple(map(_layer_from_json, own["layers"]))})
        except (TypeError, AttributeError) as error:
            raise BalanceError(f"the profile has an entry of another kind than expected: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        check_types("Profile.save", BalanceError, path=(path, str | PathLike))
        write_text(path, self.dumps(), BalanceError)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile from a JSON file."""
        check_types("Profile.load", BalanceError, path=(path, str | PathLike))
        hint = "; expected a profile, a line for each layer"
        return cls.loads(read_text(path, BalanceError, limit=_LARGEST, hint=hint))


def _layer_to_json(layer: LayerCost) -> dict[str, object]:
    """Fields that differ from their default; names first."""
    row = {each.name: value for each in fields(layer) if (value := getattr(layer, each.name)) != each.default}
    return row | {"shared": sorted(layer.shared)} if layer.shared else row


def _layer_from_json(row: object) -> LayerCost:
    known = {f.name for f in fields(LayerCost)}
    if not isinstance(row, dict) or "name" not in row or row.keys() - known:
        raise BalanceError(f"a layer of the profile is {row!r}, expected 'name' and any of {sorted(known)}")
    return LayerCost(**{**row, "shared": frozenset(row.get("shared", ()))})
