"""Cases as data: a model in words, how it is spread, and what is done with it. JSON is its text.

    case = Case(seed=3, blocks=("linear", "mlp"), cuts=(1,), schedule="1f1b", ranks=2)
    assert Case.loads(case.dumps()) == case

Shrinking is leaving out parts of a case; everything has a default for that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

from tests.fuzz import blocks_state  # noqa: F401 - fills the table
from tests.fuzz.blocks import KINDS


@dataclass(frozen=True)
class Case:
    """One run of a pipeline that a plain loop can do as well."""

    seed: int = 0  # of parameters and data
    blocks: tuple[str, ...] = ("linear", "linear")  # names in KINDS, in order
    frozen: tuple[int, ...] = ()  # blocks without gradients
    skips: tuple[tuple[int, int], ...] = ()  # what the first gives is added to what the second takes
    ties: tuple[tuple[int, int], ...] = ()  # blocks whose weight is one
    nest: str = "tuple"  # how stages made by hand hand over: "tuple" or "dict"
    loss: str = "mse"  # "mse", "cross", "sum", "padded", "own" (the model's own), "chunked" (likewise, in slices)
    captured: bool = False  # cut by penstock; else stages are made by hand
    cuts: tuple[int, ...] = (1,)  # blocks that begin a stage, but for the first
    marked: bool = True  # for captured models: cut where `cuts` says, else where penstock likes
    schedule: str = "1f1b"  # a name; "auto", "search" (chosen by Pipeline); "searched" (a plan of penstock.search)
    placement: tuple[int, ...] = ()  # rank of each stage, for "searched"; () leaves it to the schedule
    ranks: int = 2
    microbatches: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)  # of Pipeline, in JSON
    optimizer: str = "sgd"  # "sgd", "momentum", "adam", "backward" (steps inside of the backward)
    actions: tuple[Mapping[str, Any], ...] = ({"do": "train", "rows": 4},)
    mesh: Mapping[str, Any] = field(default_factory=dict)  # {"dp": 2, "tp": 1, "kind": "ddp"}; {}: ranks are threads

    @property
    def num_stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First block, and one past the last, of each stage."""
        ends = [0, *self.cuts, len(self.blocks)]
        return list(pairwise(ends))

    @property
    def replicas(self) -> int:
        return int(self.mesh.get("dp", 1))

    @property
    def world_size(self) -> int:
        return self.ranks * self.replicas * int(self.mesh.get("tp", 1))

    @property
    def traits(self) -> frozenset[str]:
        return frozenset().union(*(KINDS[kind].traits for kind in self.blocks))

    @property
    def has_own_loss(self) -> bool:
        return self.loss in ("own", "chunked")

    def stage_of(self, block: int) -> int:
        return sum(cut <= block for cut in self.cuts)

    def does(self, *names: str) -> bool:
        """Whether one of these is among the actions."""
        return any(action["do"] in names for action in self.actions)

    def dumps(self) -> str:
        """The case in one line, without what is as usual."""
        usual = {f.name: getattr(Case(), f.name) for f in fields(Case)}
        return json.dumps({k: v for k, v in asdict(self).items() if v != usual[k]})

    @classmethod
    def loads(cls, text: str) -> Case:
        return cls(**{name: _frozen(value) for name, value in json.loads(text).items()})


def _frozen(value: Any) -> Any:
    """Lists as tuples, to any depth but inside of dictionaries."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value
