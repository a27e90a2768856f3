"""The lineage of a checkpoint: which run saved it, and which checkpoints that run and the runs before it went on from.

    lineage = Lineage.of(folder)               # None if nothing can be known of it
    lineage.follows(Lineage.of(other))         # whether the one came out of the other

A run is a pipeline from when it was made, or from its last `load` on. The numbers of checkpoints only grow: in a run, and among
those that lie in one place. They stand in a small file beside the manifest, which says its size and SHA-256 as of all others. A
checkpoint without that file is of a penstock that wrote none: its number is its step, its run has no name.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from reprlib import repr as short
from uuid import uuid4

from penstock.checkpoint.manifest import Damaged, Manifest, known_object, read_small

LINEAGE = "lineage.json"
_LIMIT = 1 << 20  # bytes of that file
_MOST = 10_000  # runs that went on from one another; of those before, nothing is known
_HIGHEST = (1 << 62) - 1  # what a manifest may hold
_RUN = re.compile(r"[0-9a-f]{32}")
_UNNAMED = ""  # the run of a checkpoint that says none


@dataclass(frozen=True)
class Lineage:
    """Where a checkpoint comes from."""

    run: str
    number: int
    ancestors: tuple[
        tuple[str, int], ...
    ] = ()  # the run and number of each that a run went on from; the last: the parent

    @classmethod
    def new(cls) -> Lineage:
        """A run that went on from nothing, and has saved nothing."""
        return cls(uuid4().hex, 0)

    def gone_on(self) -> Lineage:
        """A new run that goes on from this checkpoint, and has saved nothing."""
        return Lineage(uuid4().hex, self.number, (*self.ancestors, (self.run, self.number))[-_MOST:])

    def next(self, highest: int) -> Lineage:
        """The next checkpoint of this run, where the highest number is that."""
        return replace(self, number=min(max(self.number, highest) + 1, _HIGHEST))

    def follows(self, other: Lineage) -> bool:
        """Whether it came out of the other one, or is the same."""
        known = (*self.ancestors, (self.run, self.number))
        return any(run == other.run and other.number <= number for run, number in known)

    def dumps(self) -> bytes:
        body = asdict(self)
        return json.dumps({"digest": _digest(body), "lineage": body}).encode()

    @classmethod
    def loads(cls, data: bytes, *, source: str = "the lineage") -> Lineage:
        try:
            whole = known_object(json.loads(data), {"digest": str, "lineage": dict}, "it")
            facts = known_object(whole["lineage"], {"run": str, "number": int, "ancestors": list}, "the lineage")
            if whole["digest"] != _digest(facts):
                raise Damaged(f"{source} is damaged: its contents do not have the digest that stands in it")
            ancestors = facts["ancestors"]
            if len(ancestors) > _MOST:
                raise ValueError(f"it has {len(ancestors)} ancestors; expected at most {_MOST}")
            return cls(*_one((facts["run"], facts["number"])), tuple(_one(one, unnamed=True) for one in ancestors))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{source} is no lineage of a checkpoint: {error}") from error

    @classmethod
    def of(cls, folder: Path, *, step: int | None = None) -> Lineage | None:
        """That of a checkpoint, whose other files may be damaged; `step`: where it has none, known without its manifest."""
        try:
            file = folder / LINEAGE
            if file.exists():
                return cls.loads(read_small(file, _LIMIT), source=str(file))
            return cls(_UNNAMED, Manifest.read(folder).step if step is None else step)
        except Damaged:
            return None

    @classmethod
    def checked(cls, folder: Path, manifest: Manifest) -> Lineage:
        """That of a checkpoint, if it is what the manifest says."""
        if LINEAGE not in manifest.files:
            return cls(_UNNAMED, manifest.step)
        if manifest.files[LINEAGE].size > _LIMIT:
            raise Damaged(f"{folder / LINEAGE} has {manifest.files[LINEAGE].size:,} bytes; at most {_LIMIT:,} are read")
        return cls.loads(manifest.small(folder, LINEAGE), source=str(folder / LINEAGE))

    @property
    def is_named(self) -> bool:
        return self.run != _UNNAMED


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def _one(value: object, *, unnamed: bool = False) -> tuple[str, int]:
    if isinstance(value, list | tuple) and len(value) == 2:
        run, number = value
        named = isinstance(run, str) and (_RUN.fullmatch(run) is not None or (unnamed and run == _UNNAMED))
        if named and type(number) is int and 0 <= number <= _HIGHEST:
            return run, number
    raise ValueError(f"{short(value)} is no run and number; expected 32 hexadecimal digits and a number from 0")
