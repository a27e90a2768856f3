"""What the runtime asks of data parallelism, and the adapter for a stage that has none.

    adapter = adapt(module)
    adapter.begin()
    try:
        ...  # forwards and backwards of all microbatches, in any order, full or split
        adapter.reduce_grad()
    finally:
        adapter.end()

Between `begin` and `end` the wrapped module never communicates by itself, but for layers that were told to free their
parameters after each forward. Flags are set once a step: a microbatch costs nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from penstock.comm.host_group import host_group
from penstock.errors import ReplicaFailed, RunError


class DataParallel(Protocol):
    """The data parallelism of one stage. `begin` and `end` stand around each step, of training or evaluation.

    data_parallel = adapt(stage.submod)
    data_parallel.begin(...)
    """

    @property
    def sharded(self) -> bool:
        """Whether the plan needs UNSHARD and RESHARD for this stage."""
        ...

    @property
    def reduces(self) -> bool:
        """Whether the plan needs REDUCE_GRAD for this stage."""
        ...

    def begin(self) -> None:
        """Before the first action of a step: from here on nothing is reduced until `reduce_grad`."""
        ...

    def end(self, *, failed: bool = True) -> None:
        """After a step, however it ended: every flag is as before, parameters are sharded, nothing is half done.

        With `failed=False` a stage whose gradients were not reduced raises, instead of dropping them.
        """
        ...

    def unshard(self) -> None:
        """Start to gather the parameters; whoever uses them first waits for them."""
        ...

    def reshard(self) -> None:
        """Free the gathered parameters."""
        ...

    def reduce_grad(self, *, failed: bool = False) -> None:
        """Make `.grad` the mean over the replicas.

        A rank whose step has failed must not leave the other replicas waiting: it goes on to call `unshard`, `reshard`
        and `reduce_grad(failed=True)` wherever its plan has them. On the others `reduce_grad` raises ReplicaFailed: the
        step fails everywhere, and the next one finds the replicas in agreement.
        """
        ...

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        """What an error of this step has to do with a replica whose process is stopped or gone; None: nothing."""
        ...

    def give_up(self, cause: str) -> None:
        """The pipeline of this replica can make no more steps: the other replicas must not wait for it."""
        ...


def replica_failed(group: dist.ProcessGroup, failures: list[int]) -> ReplicaFailed:
    """For a replica that was told of the failure of others, which are given by their ranks in the group."""
    return ReplicaFailed(
        f"{host_group(group).names(failures)} of the job failed in this step, in another data-parallel replica of this stage, so "
        "gradients cannot be averaged; the error that was raised there tells why"
    )


class Unwrapped:
    """A stage without data parallelism: every action is there and does nothing.

    adapt(nn.Linear(4, 4))  # no wrapper: Unwrapped
    """

    __slots__ = ()
    sharded = False
    reduces = False

    def begin(self) -> None:
        pass

    def end(self, *, failed: bool = True) -> None:
        pass

    def unshard(self) -> None:
        pass

    def reshard(self) -> None:
        pass

    def reduce_grad(self, *, failed: bool = False) -> None:
        pass

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        return None

    def give_up(self, cause: str) -> None:
        pass


class Flags:
    """Attributes changed for the time of a step.

    >>> from types import SimpleNamespace
    >>> flags, thing = Flags(), SimpleNamespace(sync=True)
    >>> flags.set(thing, "sync", False)
    >>> flags.restore()
    >>> thing.sync
    True
    """

    __slots__ = ("_old",)

    def __init__(self) -> None:
        self._old: list[tuple[object, str, object]] = []

    def set(self, thing: object, name: str, value: object) -> None:
        self._old.append((thing, name, getattr(thing, name)))
        setattr(thing, name, value)

    def restore(self) -> None:
        while self._old:
            setattr(*self._old.pop())


class StepOrder:
    """Holds the actions of one stage to their order: reduce once, unshard and reshard in turn, all within a step.

    >>> order = StepOrder()
    >>> order.begin()
    >>> order.reshard()
    Traceback (most recent call last):
    penstock.errors.RunError: RESHARD of a stage that is not unsharded; UNSHARD and RESHARD take turns in a plan
    """

    __slots__ = ("open", "reduced", "unsharded")

    def __init__(self) -> None:
        self.open = False
        self.unsharded = False
        self.reduced = False

    def begin(self) -> None:
        if self.open:
            raise RunError("a step of this stage begins while another one has not ended; call end() after each begin()")
        self.open, self.unsharded, self.reduced = True, False, False

    def end(self) -> bool:
        """Whether there was a step to end."""
        was_open, self.open = self.open, False
        return was_open

    def unshard(self) -> None:
        self._within("UNSHARD")
        if self.unsharded:
            raise RunError("UNSHARD of a stage that is unsharded already; UNSHARD and RESHARD take turns in a plan")
        self.unsharded = True

    def reshard(self) -> None:
        self._within("RESHARD")
        if not self.unsharded:
            raise RunError("RESHARD of a stage that is not unsharded; UNSHARD and RESHARD take turns in a plan")
        self.unsharded = False

    def reduce(self) -> None:
        self._within("REDUCE_GRAD")
        if self.reduced:
            raise RunError("REDUCE_GRAD twice in one step; a plan has it once for each stage, after its last backward")
        self.reduced = True

    def _within(self, action: str) -> None:
        if not self.open:
            raise RunError(f"{action} outside of a step; call begin() first and end() after the last action")
