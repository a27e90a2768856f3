"""Writing a checkpoint: every rank its own parts, then the first rank the manifest, then two renames.

    pipe.save("run/checkpoint", optimizer=optimizer, scheduler=scheduler, extra={"epoch": 3}, keep=3)
    saving = pipe.save("run/checkpoint", optimizer=optimizer, wait=False)     # goes on while the next steps run
    saving.wait()                                                             # raises on every rank if it went wrong on one

Without penstock: ``dcp.load({"model": model.state_dict()}, checkpoint_id="run/checkpoint")``, or torch's own tool, which
makes one file of it: ``python -m torch.distributed.checkpoint.format_utils dcp_to_torch run/checkpoint model.pt``.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from penstock import __version__
from penstock.checkpoint import kept
from penstock.checkpoint.disk import Disk
from penstock.checkpoint.lineage import LINEAGE
from penstock.checkpoint.manifest import FILE, Entry, Manifest, Part, SmallFile
from penstock.checkpoint.parts import Block, chunk_of, write_parts
from penstock.checkpoint.torch_list import LIST, write_list
from penstock.checks import check_types
from penstock.dtypes import dtype_name
from penstock.errors import PenstockError, RunError, StepTimeout
from penstock.front.companions import Companions, optimizer_parts
from penstock.front.mesh import PipelineMesh
from penstock.front.names import StageTensors
from penstock.health.failure import NOBODY
from penstock.nest import Value

DISK = Disk()
_STAGING = 600.0  # seconds that a stager of the caller's may take for a copy
_PATIENCE = 60.0  # seconds more than ten times what it took itself that the first rank waits for the parts of others
_NAP = 0.02  # seconds between two looks whether all ranks have written
_DISK, _SLOWEST = 600.0, 10e6  # seconds for the disk, and one more for so many bytes, after which it counts as stuck


@dataclass(frozen=True)
class Order:
    """A checkpoint that all ranks have agreed to write, as seen from one of them."""

    place: Path
    fresh: Path  # where it is written
    keep: int
    blocks: list[Block]  # this rank's
    state: bytes  # this rank's
    number: int  # of this rank among all ranks of all replicas
    everyone: list[dict[str, Value]]  # what each rank holds
    manifest: Manifest  # without tensors and files yet
    claim: kept.Claim | None  # the first rank's

    def write(self) -> dict[str, object]:
        """Write this rank's parts; what the manifest says of them."""
        with kept.written_to(self.fresh):
            rows = write_parts(self.fresh / f"__{self.number}_0.distcp", self.blocks, DISK) if self.blocks else []
            DISK.write_file(self.fresh / f"rank-{self.number}.json", self.state)
        return {"parts": [[key, asdict(part)] for key, part in rows], "state": asdict(SmallFile.of(self.state))}

    def finish(self, rows: Sequence[dict[str, Value]]) -> str:
        """Make the checkpoint out of what all ranks have written; the first rank does it. Where it is comes back."""
        kinds = {key: (shape, dtype) for one in self.everyone for key, shape, dtype, _ in one["tensors"]}
        parts: dict[str, list[Part]] = {}
        for row in rows:
            for key, part in row["parts"]:
                parts.setdefault(key, []).append(Part(**part))
        tensors = {
            key: Entry(tuple(shape), dtype, tuple(sorted(parts[key], key=lambda part: part.start)))
            for key, (shape, dtype) in kinds.items()
        }
        whole = replace(self.manifest, tensors=tensors)
        files = {f"rank-{number}.json": SmallFile(**row["state"]) for number, row in enumerate(rows)}
        listed = write_list(whole)
        assert self.claim is not None, "the first rank has it"
        lineage = self.claim.lineage.dumps()
        files |= {LIST: SmallFile.of(listed), LINEAGE: SmallFile.of(lineage)}
        with kept.written_to(self.fresh):
            DISK.write_file(self.fresh / LIST, listed)
            DISK.write_file(self.fresh / LINEAGE, lineage)
            DISK.write_file(self.fresh / FILE, replace(whole, files=files).dumps())
            kept.publish(self.claim, DISK, keep=self.keep)
        return str(self.place)


def prepare(
    folder: str | Path, tensors: StageTensors, ends: PipelineMesh, companions: Companions, *, keep: int
) -> Order:
    """Agree on who writes what, and make the folder. Every rank of every replica calls it; nothing is changed if one raises."""
    place = Path(folder).absolute()
    mine: list[Block] = []
    small: list[bytes] = []

    def look() -> dict[str, object]:
        if keep < 1:
            raise RunError(f"keep={keep}; expected the number of checkpoints to keep, at least 1")
        if ends.transport.device.type != "cpu":  # what is copied from there below would wait without a bound
            ends.transport.wait_for_device()
        small.append(companions.dumps())
        extra = as_json(dict(companions.extra), "extra")
        state, facts = optimizer_parts(companions.optimizer, tensors)
        whole = {f"model.{name}": value for name, value in tensors.state.items() if name not in tensors.elsewhere}
        listed = []
        for key, value in (whole | state).items():
            chunk = chunk_of(value.detach())
            if chunk is not None:
                mine.append((key, *chunk))
                listed.append([key, list(value.shape), dtype_name(value.dtype), list(chunk[0])])
        optimizer = as_json(facts, "the optimizer")
        return {"tensors": listed, "aliases": tensors.aliases, "optimizer": optimizer, "extra": extra}

    everyone = ends.ranks.try_all("what a checkpoint holds", look)
    claims: list[kept.Claim] = []

    def claim() -> str:
        claims.append(kept.begin(place, DISK, companions.lineage))
        return str(claims[0].fresh)

    fresh = Path(ends.ranks.broadcast("a folder for the checkpoint", claim))
    owners = _owners(everyone)
    blocks = [block for block in mine if owners[block[0], tuple(block[1])] == ends.number]
    versions = {"penstock": __version__, "torch": torch.__version__}
    aliases = {name: list(others) for one in everyone for name, others in one["aliases"].items()}
    extra, ranks, replicas = everyone[0]["extra"], ends.num_ranks, ends.num_replicas
    manifest = Manifest(companions.step, ranks, replicas, versions, {}, {}, aliases, _merged(everyone), extra)
    claimed = claims[0] if claims else None
    return Order(place, fresh, keep, blocks, small[0], ends.number, everyone, manifest, claimed)


def save(order: Order, ends: PipelineMesh) -> None:
    """Write it now. It is there whole on return, or an error is raised on every rank."""
    try:
        rows = ends.ranks.gather(f"writing the checkpoint {order.place}", order.write)
        ends.ranks.broadcast("the end of a checkpoint", lambda: order.finish(rows or []))
    except PenstockError:
        if ends.is_first:
            with suppress(OSError):
                DISK.remove(order.fresh)
        raise


class Saving:
    """A checkpoint that is being written while training goes on.

        saving = pipe.save("run/checkpoint", optimizer=optimizer, wait=False)
        ...                       # steps
        saving.wait()             # every rank; or leave it: the next save waits, and a process that ends does

    The tensors were copied before `save` returned. `blocked` is how many seconds that took, `seconds` how many the
    writing took, once it is done.
    """

    def __init__(self, order: Order, ends: PipelineMesh, began: float, stager: AsyncStager | None = None) -> None:
        check_types("Saving", RunError, order=(order, Order), ends=(ends, PipelineMesh), began=(began, float))
        self._error: Exception | None = None
        blocks: list[Block] = []
        try:
            blocks = staged(order.blocks, stager)
        except Exception as error:  # noqa: BLE001  the other ranks have begun: all hear of it in `wait`
            self._error = error
        self.blocked = time.perf_counter() - began
        self.seconds = 0.0
        self.told = False  # whether `wait` has said how it ended
        self._order, self._ends = replace(order, blocks=blocks), ends
        self._written, self._given_up = threading.Event(), threading.Event()
        everybody = ends.transport.num_ranks * sum(values.nbytes for _, _, values in blocks)  # on one disk, perhaps
        self._patience = _DISK + everybody / _SLOWEST
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=True)
        _UNDER_WAY[self._thread] = self._patience
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to do for it."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end; every rank calls it, and if it went wrong on one, all raise."""
        with self._ends.transport.called(f"waiting for the checkpoint {self._order.place}"):
            stuck = not self._written.wait(self._patience)
            self.told = True
            try:
                self._ends.ranks.together(
                    f"writing the checkpoint {self._order.place}", lambda: self._outcome(stuck=stuck)
                )
                stuck = not self._ended()
                self._ends.ranks.together(
                    f"finishing the checkpoint {self._order.place}", lambda: self._outcome(stuck=stuck)
                )
            finally:
                self._given_up.set()
                if not stuck and self._ended() and self._ends.is_first:
                    with suppress(OSError):
                        DISK.remove(self._order.fresh)

    def _ended(self) -> bool:
        """Wait for what this rank does; whether the disk let it come to its end."""
        self._thread.join(self._patience)
        return self.done

    def _outcome(self, *, stuck: bool = False) -> None:
        if stuck:
            _UNDER_WAY.pop(self._thread, None)  # whoever ends does not wait for it again
            raise RunError(
                f"the disk under {self._order.fresh.parent} did not take what this rank writes for a checkpoint within "
                f"{self._patience:g} s; see whether that file system answers. The checkpoints from before are whole"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """The ranks tell one another by files that they have written: no message, which a step would have to wait for."""
        began = time.perf_counter()
        order = self._order
        try:
            self._outcome()
            self._tell(order.write())
        except Exception as error:  # noqa: BLE001  raised by `wait`, and told to the first rank if the disk lets us
            self._error = error
            with suppress(OSError):
                self._tell({"error": f"{type(error).__name__}: {error}"})
        self.seconds = time.perf_counter() - began
        self._written.set()
        if order.number == 0 and self._error is None:
            try:
                order.finish(self._collect())
            except Exception as error:  # noqa: BLE001  raised by `wait`
                self._error = error
        self._order = replace(order, blocks=[])
        _UNDER_WAY.pop(self._thread, None)

    def _file(self, number: int) -> Path:
        return self._order.fresh / f"written-{number}.json"

    def _tell(self, row: Mapping[str, object]) -> None:
        file = self._file(self._order.number)
        DISK.delete(file.with_suffix(".part"))
        DISK.write_file(file.with_suffix(".part"), json.dumps(row).encode())
        DISK.rename(file.with_suffix(".part"), file)

    def _collect(self) -> list[dict[str, object]]:
        """What all ranks have written, when they have."""
        count, patience = len(self._order.everyone), _PATIENCE + 10 * self.seconds
        rows: dict[int, dict[str, object]] = {}
        end = time.monotonic() + patience
        while missing := sorted(set(range(count)) - rows.keys()):
            if self._given_up.is_set():
                raise RunError("another rank cannot write the checkpoint")
            lost = self._ends.transport.lost()  # before a look at the files: what it wrote before that counts
            for number in (number for number in missing if self._file(number).is_file()):
                rows[number] = json.loads(self._file(number).read_bytes())
                if "error" in rows[number]:
                    raise RunError(f"rank {number} cannot write the checkpoint: {rows[number]['error']}")
            if lost is not None and lost.rank != NOBODY and (gone := self._ends.number_of(lost.rank)) not in rows:
                raise RunError(f"rank {gone} is gone before its part of the checkpoint was written: {lost.cause}")
            if time.monotonic() > end and len(rows) < count:
                raise StepTimeout(
                    f"rank 0 waited {patience:g} s for the parts of a checkpoint from ranks {missing}\n"
                    f"{self._ends.transport.everybody()}"
                )
            time.sleep(_NAP)
        for number in rows:
            DISK.delete(self._file(number))
        return [rows[number] for number in range(count)]


_UNDER_WAY: dict[threading.Thread, float] = {}  # the threads that write, and the seconds that a disk has


def let_savings_end() -> None:
    """A process that ends waits for its checkpoints, but not for a disk that is stuck."""
    for thread, patience in list(_UNDER_WAY.items()):
        thread.join(patience)


# As concurrent.futures does it: also in a process that multiprocessing has forked, where atexit is not called.
threading._register_atexit(let_savings_end)  # type: ignore[attr-defined]


def staged(blocks: Sequence[Block], stager: AsyncStager | None) -> list[Block]:
    """The blocks in memory that no step changes: copied by DCP's stager, the caller's or one for this time alone."""
    plain = {str(n): _alone(values.detach().resolve_conj().resolve_neg()) for n, (_, _, values) in enumerate(blocks)}
    simple = StagingOptions(False, False, False, False)
    with closing(DefaultStager(simple)) if stager is None else nullcontext(stager) as used:
        copied: Any = used.stage(plain)
        if isinstance(copied, Future):
            copied = copied.result(_STAGING)
    return [(key, start, copied[str(n)]) for n, (key, start, _) in enumerate(blocks)]


def _alone(block: Tensor) -> Tensor:
    """A stager copies all the memory behind a tensor: of a part of a larger one only that part."""
    return block if block.untyped_storage().nbytes() <= block.nbytes else block.clone()


def as_json(value: dict[str, Value], what: str) -> Value:
    """The value as it comes back from a file; what JSON cannot hold is an error that says what the value is of."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"{what} cannot be saved: {error}; expected numbers, texts, lists and dictionaries of them. What has tensors "
            "belongs into the model or the optimizer"
        ) from error


def _owners(everyone: Sequence[Mapping[str, Value]]) -> dict[tuple[str, tuple[int, ...]], int]:
    """Who writes which block: of the ranks that hold it, the one that has least to write so far."""
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for number, one in enumerate(everyone):
        for key, _, _, start in one["tensors"]:
            holders.setdefault((key, tuple(start)), []).append(number)
    load = [0] * len(everyone)
    sizes = {key: torch.Size(shape).numel() for one in everyone for key, shape, _, _ in one["tensors"]}
    owners = {}
    for block, numbers in sorted(holders.items(), key=lambda item: (-sizes[item[0][0]], item[0])):
        owner = min(numbers, key=lambda number: (load[number], number))
        owners[block] = owner
        load[owner] += sizes[block[0]]
    return owners


def _merged(everyone: Sequence[Mapping[str, Value]]) -> dict[str, object]:
    """One optimizer out of those of all ranks."""
    each = [one["optimizer"] for one in everyone if one["optimizer"]]
    groups = []
    for of_ranks in zip_longest(*(one["groups"] for one in each)):  # the same group of every rank that has so many
        known = [group for group in of_ranks if group is not None]
        groups.append({**known[0], "names": sorted({name for group in known for name in group["names"]})})
    values = {name: value for one in each for name, value in one["values"].items()}
    return {"kind": each[0]["kind"], "values": values, "groups": groups} if each else {}
