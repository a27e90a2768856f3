"""Who takes part: the ranks of the pipeline, the data-parallel replicas beside it, and how they agree on a text."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock import errors
from penstock.checkpoint.manifest import Damaged
from penstock.comm.host_group import host_group
from penstock.comm.transport import Transport
from penstock.errors import PeerFailed, PenstockError, ReplicaFailed, RunError, StageError, StepTimeout, TransportError
from penstock.health.decoding import reading
from penstock.nest import Value
from penstock.run.meeting import transport_of
from penstock.stage.pipeline_stage import Group, place_in

Made = TypeVar("Made")


@dataclass(frozen=True)
class Ends:
    """This rank's place. `replica` and `num_replicas` count the data-parallel copies of the pipeline."""

    transport: Transport
    group: Group  # what stages are built with: a transport, a process group, or None
    device: torch.device
    mesh: DeviceMesh | None = None  # the ranks that hold the same stages, of one dimension
    data: DeviceMesh | None = None  # of these the data-parallel dimension

    @classmethod
    def of(cls, group: Group, mesh: DeviceMesh | None, device: torch.device, *, beside: bool = False) -> Ends:
        """`beside`: the mesh has dimensions beside "dp" and "pp", over which the user spreads each stage."""
        same, data = None, None
        if mesh is not None:
            names = mesh.mesh_dim_names or ()
            if group is not None or "pp" not in names or (set(names) <= {"pp", "dp"}) == beside:
                raise StageError(
                    f"mesh has the dimensions {names}{' and group is given too' if group is not None else ''}; expected "
                    'init_device_mesh(type, (replicas, ranks), mesh_dim_names=("dp", "pp")) and no group; with other '
                    'dimensions, such as "tp", also parallelize=function'
                )
            group = mesh["pp"].get_group()
            data = mesh["dp"] if "dp" in names else None
            others = tuple(name for name in names if name != "pp")
            if others:  # a slice is a new object each time
                same = data if others == ("dp",) else mesh[others[0]] if len(others) == 1 else mesh[others]._flatten()
        elif beside:
            raise StageError("parallelize=function without a mesh; expected one with dimensions beside dp and pp")
        elif group is None:
            _refuse_early()
        return cls(transport_of(group, device), group, device, same, data)

    @property
    def beside(self) -> bool:
        """Whether a stage is spread over dimensions of its own."""
        return self.mesh is not self.data

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def num_ranks(self) -> int:
        return place_in(self.group)[1]

    @property
    def replica(self) -> int:
        return 0 if self.mesh is None else int(self.mesh.get_local_rank())

    @property
    def num_replicas(self) -> int:
        return 1 if self.mesh is None else int(self.mesh.size())

    @property
    def copies(self) -> dist.ProcessGroup:
        """The ranks that hold the same stages; asked for only where there are several."""
        assert self.mesh is not None, "one replica has no others"
        return self.mesh.get_group()

    @property
    def is_first(self) -> bool:
        """Whether this rank decides for all, and speaks for them."""
        return self.rank == 0 and self.replica == 0

    @property
    def number(self) -> int:
        """The place of this rank among all ranks of all replicas."""
        return self.number_of(self.rank)

    def number_of(self, rank: int) -> int:
        """The place of another rank of this pipeline among all ranks of all replicas."""
        return self.replica * self.num_ranks + rank

    def decide(self, what: str, make: Callable[[], str]) -> str:
        """The text that the first rank makes, on every rank. If it raises, every rank raises."""
        return str(self.agree(what, make if self.is_first else str)[0])

    def agree(self, what: str, make: Callable[[], object]) -> list[Value]:
        """What each rank of each replica makes, on all of them, by `number`. If it raises on one, all raise."""
        with self.transport.called(what):
            raised, post = _attempt(make)
            with self.among_replicas():
                posts = self._gather(what, post)
                if self.num_replicas > 1:
                    everyone = host_group(self.copies).gather(json.dumps(posts).encode())
                    posts = [one for replica in everyone for one in json.loads(replica)]
        return _value(what, raised, posts)

    def each(self, what: str, make: Callable[[], Made]) -> Made:
        """What this rank makes, once every rank of every replica has made its own. If one raises, all raise."""
        made: list[Made] = []
        self.agree(what, lambda: made.append(make()))
        return made[0]

    def ready(self, what: str, make: Callable[[], Made], facts: Callable[[], Mapping[str, object]] = dict) -> Made:
        """What this rank makes, once all ranks know that each has made its own and was given the same. If one raises, all raise.

        It is quicker than `each`: where all is well one number of each rank is told. For calls that are made after each step.
        """
        if self.num_ranks * self.num_replicas == 1:
            return make()
        made: list[Made] = []
        given: dict[str, object] = {}
        raised: Exception | None = None
        with self.transport.called(what):
            try:
                made.append(make())
                given.update(facts())
            except Exception as error:  # noqa: BLE001  the others must hear of it, whatever it is
                raised = error
            if self._all_have(what, None if raised is not None else zlib.crc32(repr(given).encode())):
                return made[0]

            def tell() -> dict[str, object]:
                if raised is not None:
                    raise raised
                return given

            everyone = dict(enumerate(self.agree(what, tell)))
            same_everywhere(f"the arguments of {what}", everyone, "Give every rank the same")
        return made[0]

    def together(self, what: str, run: Callable[[], Made]) -> Made:
        """What a run gives that succeeds or fails on all ranks of a pipeline; if it fails in one replica, all raise."""
        if self.num_replicas == 1:
            return run()
        own: list[Exception] = []

        def attempt() -> Made:
            try:
                return run()
            except Exception as error:
                own.append(error)
                raise

        try:
            return self.ready(what, attempt)
        except PenstockError as error:
            raise own[0] if own else error from None

    def _all_have(self, what: str, code: int | None) -> bool:
        """Whether all ranks of all replicas have the same number, below 2 ** 32; None: this one has none."""
        mine = -1.0 if code is None else float(code)
        with self.among_replicas():
            if self.num_replicas > 1:
                total = torch.tensor([code is None, mine], dtype=torch.float64)
                host_group(self.copies).sum(total)
                mine = mine if total.tolist() == [0.0, self.num_replicas * mine] else -1.0
            everyone = {*self.of_each(what, mine)}
        return everyone == {mine} != {-1.0}

    def gather(self, what: str, value: object) -> list[Value]:
        """A small value of each rank of this pipeline, on each of them."""
        return self._gather(what, json.dumps(value).encode())

    def _gather(self, what: str, post: bytes) -> list[Value]:
        with self.transport.alone(what), self.among_replicas():
            posts = self.transport.collectives.all_bytes(what, post)
        with reading(f"what a rank posted for {what}"):
            return [json.loads(post) for post in posts]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank of any replica."""
        with self.among_replicas():
            total = torch.tensor([sum(self.of_each("any()", float(flag)))], dtype=torch.float64)
            self.mean_over_replicas(total)
        return total.item() > 0

    def of_each(self, what: str, number: float) -> list[float]:
        """A number of each rank of this pipeline, on each of them."""
        if self.transport.num_ranks == 1:
            return [number]
        with self.transport.alone(what), self.among_replicas():
            return self.transport.collectives.all_gather(what, number)

    def mean_over_replicas(self, values: torch.Tensor) -> None:
        """Make numbers their mean over the replicas; the host waits for the others if they are in host memory."""
        if self.num_replicas > 1:
            with self.among_replicas():
                if values.device.type == "cpu":
                    host_group(self.copies).sum(values)
                else:
                    dist.all_reduce(values, group=self.copies)
            values /= self.num_replicas

    @contextmanager
    def among_replicas(self) -> Iterator[None]:
        """Around all that the replicas tell one another outside a step, and what must come before it: none waits for one that
        is stopped, gone, or without its pipeline. All replicas come here, and those that wait raise ReplicaFailed."""
        if self.num_replicas == 1:
            yield
            return
        replicas = host_group(self.copies)
        replicas.begin()
        try:
            with replicas.explained():
                yield
        except ReplicaFailed as error:  # the ranks of this pipeline wait for this one, or will
            self.transport.give_up(f"ReplicaFailed: {error}")
            raise
        except (PeerFailed, StepTimeout, TransportError) as error:  # and so do the other replicas
            replicas.give_up(f"{type(error).__name__}: {error}")
            raise
        finally:
            replicas.end()


def same_everywhere(what: str, everyone: Mapping[int, Mapping[str, object]], advice: str) -> None:
    """Raise on every rank if the facts of one differ; the text shows which, and on which ranks."""
    names = dict.fromkeys(name for facts in everyone.values() for name in facts)
    unlike = [name for name in names if len({facts[name] for facts in everyone.values()}) > 1]
    if unlike:
        listed = {number: ", ".join(f"{name} {facts[name]}" for name in unlike) for number, facts in everyone.items()}
        rows = "".join(f"\n  rank {number}: {text}" for number, text in listed.items())
        raise errors.RanksDisagree(f"{what} differ between the ranks:{rows}\n{advice}")


def _attempt(make: Callable[[], object]) -> tuple[Exception | None, bytes]:
    """What the others are told: the value, or the error. A value that cannot be told is an error like any other."""
    try:
        return None, json.dumps({"value": make()}).encode()
    except Exception as error:  # noqa: BLE001  the others must hear of it, whatever it is
        return error, json.dumps({"error": str(error), "kind": type(error).__name__}).encode()


def _value(what: str, raised: Exception | None, posts: list[dict[str, Value]]) -> list[object]:
    """The values; or an error of the kind that the first rank which failed raised, since what every rank does next depends on it.

    A rank whose own error is of that kind raises its own.
    """
    number, failed = next(((number, post) for number, post in enumerate(posts) if "error" in post), (0, None))
    if failed is None:
        return [post["value"] for post in posts]
    if type(raised).__name__ != failed["kind"]:
        raise _kind(failed["kind"])(f"rank {number} failed at {what}: {failed['kind']}: {failed['error']}") from raised
    if isinstance(raised, PenstockError):
        raise raised
    raise RunError(f"{what}: {failed['kind']}: {raised}") from raised


def _kind(name: str) -> type[PenstockError]:
    """An error of penstock's that another rank raised, so that every rank's program can catch the same.

    What goes wrong in the run itself is told as a RunError, but for a checkpoint that is not what was written.
    """
    found: object = Damaged if name == "Damaged" else getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, PenstockError):
        return found if found is Damaged or not issubclass(found, RunError) else RunError
    return RunError


def _refuse_early() -> None:
    """A process that a launcher has started beside others would go through the whole model alone, and meet nobody."""
    named = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    if not dist.is_initialized() and all(named.values()) and named["WORLD_SIZE"].strip() not in ("0", "1"):
        raise StageError(
            f"this process was started as rank {named['RANK']} of {named['WORLD_SIZE']}, and there is no process group yet. "
            "Before the pipeline call torch.distributed.init_process_group(), or whatever makes the group in your program "
            "(transformers.TrainingArguments, accelerate.PartialState); for a pipeline of this process alone give "
            "group=penstock.LocalWorld(1).transports[0]"
        )
