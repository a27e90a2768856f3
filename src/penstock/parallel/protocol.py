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

from contextlib import ExitStack

import torch.distributed as dist

from penstock.comm.host_group import HostGroup, host_group
from penstock.errors import ReplicaFailed, RunError


class DataParallel:
    """The data parallelism of one stage. `begin` and `end` stand around each step, of training or evaluation. Here
    every action is there and does nothing.

    data_parallel = adapt(stage.submod)
    data_parallel.begin(...)
    """

    @property
    def sharded(self) -> bool:
        """Whether the plan needs UNSHARD and RESHARD for this stage."""
        return False

    @property
    def reduces(self) -> bool:
        """Whether the plan needs REDUCE_GRAD for this stage."""
        return False

    def begin(self) -> None:
        """Before the first action of a step: from here on nothing is reduced until `reduce_grad`."""

    def end(self, *, failed: bool = True) -> None:
        """After a step, however it ended: every flag is as before, parameters are sharded, nothing is half done.

        With `failed=False` a stage whose gradients were not reduced raises, instead of dropping them.
        """

    def unshard(self) -> None:
        """Start to gather the parameters; whoever uses them first waits for them."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def reduce_grad(self, *, failed: bool = False) -> None:
        """Make `.grad` the mean over the replicas.

        A rank whose step has failed must not leave the other replicas waiting: it goes on to call `unshard`, `reshard`
        and `reduce_grad(failed=True)` wherever its plan has them. On the others `reduce_grad` raises ReplicaFailed: the
        step fails everywhere, and the next one finds the replicas in agreement.
        """

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        """What an error of this step has to do with a replica whose process is stopped or gone; None: nothing."""
        return None

    def give_up(self, cause: str) -> None:
        """The pipeline of this replica can make no more steps: the other replicas must not wait for it."""


def replica_failed(group: dist.ProcessGroup, failures: list[int]) -> ReplicaFailed:
    """For a replica that was told of the failure of others, which are given by their ranks in the group."""
    return ReplicaFailed(
        f"{host_group(group).names(failures)} of the job failed in this step, in another data-parallel replica of this stage, so "
        "gradients cannot be averaged; the error that was raised there tells why"
    )


class Unwrapped(DataParallel):
    """A stage without data parallelism.

    adapt(nn.Linear(4, 4))  # no wrapper: Unwrapped
    """


def change(flags: ExitStack, thing: object, name: str, value: object) -> None:
    """Change an attribute for the time of a step: until the flags are closed.

    >>> from types import SimpleNamespace
    >>> flags, thing = ExitStack(), SimpleNamespace(sync=True)
    >>> change(flags, thing, "sync", False)
    >>> flags.close()
    >>> thing.sync
    True
    """
    flags.callback(setattr, thing, name, getattr(thing, name))
    setattr(thing, name, value)


class Adapter(DataParallel):
    """What adapters of wrapped modules share: flags, the replicas, and the order of actions, which is reduce once, unshard and
    reshard in turn, all within a step.

    >>> adapter = Adapter()
    >>> adapter.begin()
    >>> adapter.reshard()
    Traceback (most recent call last):
    penstock.errors.RunError: RESHARD of a stage that is not unsharded; UNSHARD and RESHARD take turns in a plan
    """

    reduces = True

    def __init__(self) -> None:
        self._flags = ExitStack()
        self._replicas: list[HostGroup] = []
        self._open = self._unsharded = self._reduced = False

    def begin(self) -> None:
        if self._open:
            raise RunError("a step of this stage begins while another one has not ended; call end() after each begin()")
        self._open, self._unsharded, self._reduced = True, False, False
        self._replicas = []

    def _meet(self, group: dist.ProcessGroup) -> HostGroup:
        """From here on the processes of this group are waited for in the step."""
        replicas = host_group(group)
        replicas.begin()
        self._replicas.append(replicas)
        return replicas

    def _close(self) -> bool:
        """Whether there was a step to end."""
        was_open, self._open = self._open, False
        for replicas in self._replicas if was_open else ():
            replicas.end()
        return was_open

    def unshard(self) -> None:
        self._turn("UNSHARD", unsharded=True)

    def reshard(self) -> None:
        self._turn("RESHARD", unsharded=False)

    def _turn(self, action: str, *, unsharded: bool) -> None:
        self._within(action)
        if self._unsharded == unsharded:
            state = "unsharded already" if unsharded else "not unsharded"
            raise RunError(f"{action} of a stage that is {state}; UNSHARD and RESHARD take turns in a plan")
        self._unsharded = unsharded

    def reduce_grad(self, *, failed: bool = False) -> None:
        self._within("REDUCE_GRAD")
        if self._reduced:
            raise RunError("REDUCE_GRAD twice in one step; a plan has it once for each stage, after its last backward")
        self._reduced = True

    def _within(self, action: str) -> None:
        if not self._open:
            raise RunError(f"{action} outside of a step; call begin() first and end() after the last action")

    def explain(self, error: BaseException) -> ReplicaFailed | None:
        return next(filter(None, (replicas.explain(error) for replicas in self._replicas)), None)

    def give_up(self, cause: str) -> None:
        for replicas in self._replicas:
            replicas.give_up(cause)
