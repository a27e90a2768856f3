"""PipelineMesh: the place of this rank among the stages of the pipeline and its data-parallel replicas, and their collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.comm.collectives import Collectives, Edge, Tree
from penstock.comm.host_group import host_group
from penstock.comm.transport import Transport
from penstock.errors import PeerFailed, PenstockError, ReplicaFailed, StageError, StepTimeout, TransportError
from penstock.run.meeting import transport_of
from penstock.stage.pipeline_stage import Group, place_in

Made = TypeVar("Made")


@dataclass(frozen=True)
class PipelineMesh:
    """This rank's place. `replica` and `num_replicas` count the data-parallel copies of the pipeline."""

    transport: Transport
    group: Group  # what stages are built with: a transport, a process group, or None
    device: torch.device
    mesh: DeviceMesh | None = None  # the ranks that hold the same stages, of one dimension
    data: DeviceMesh | None = None  # of these the data-parallel dimension

    @classmethod
    def of(cls, group: Group, mesh: DeviceMesh | None, device: torch.device, *, beside: bool = False) -> PipelineMesh:
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

    @cached_property
    def ranks(self) -> Collectives:
        """What all ranks of all replicas do together, by `number`: the tree of the pipeline below each first rank, and a tree of
        the replicas above these."""
        tree = self.transport.collectives.tree
        if self.num_replicas > 1 and self.rank == 0:
            messages, place = host_group(self.copies).messages, self.replica
            above = None if place == 0 else Edge(messages, (place - 1) // 2)
            below = [Edge(messages, one) for one in (2 * place + 1, 2 * place + 2) if one < self.num_replicas]
            tree = Tree(above, [*tree.children, *below])
        return Collectives(tree, self, number=self.number, count=self.num_ranks * self.num_replicas)

    @cached_property
    def own(self) -> Collectives:
        """What the ranks of this pipeline do together, by rank."""
        return Collectives(self.transport.collectives.tree, self, number=self.rank, count=self.num_ranks)

    def called(self, what: str) -> AbstractContextManager[None]:
        """Around a call of one of these."""
        return self.transport.called(what)

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Around the messages of one of these."""
        with self.transport.alone(what), self.among_replicas(), self.transport.collective(what):
            yield

    def ready(self, what: str, make: Callable[[], Made], facts: Callable[[], Mapping[str, object]] = dict) -> Made:
        """What this rank makes, once each rank has made its own and was given the same. If one raises, all raise."""
        return make() if self.ranks.count == 1 else self.ranks.together(what, make, facts)

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
