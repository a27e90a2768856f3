"""Whether the ranks of a group are all on one kind of device: told through the store before anything else is built.

A rank on an accelerator opens connections when its transport is made, and waits for the others there; one in host memory waits at
its first meeting. Each of them would wait for the other in vain.
"""

from __future__ import annotations

from penstock.comm.store import DistributedStore
from penstock.errors import RanksDisagree
from penstock.health.failure import FailureRecord


class KindsOfDevice:
    """``look`` raises as soon as two ranks are known to differ; ``meet`` waits until all ranks have said what they are on."""

    def __init__(self, store: DistributedStore, kind: str, rank: int, num_ranks: int) -> None:
        self.differ, self._store, self._num_ranks = False, store, num_ranks
        self._known = {rank: kind}
        store.set(f"kind/{rank}", kind.encode())

    def meet(self, timeout: float) -> None:
        self._store.silent = self.look
        self._store.get_all("kind", timeout, posts="its kind of device")
        self.look()

    def look(self) -> FailureRecord | None:
        """In the form of what a store asks during long waits; there is never a failure to tell of."""
        for rank in range(self._num_ranks):
            if rank not in self._known and self._store.check(f"kind/{rank}"):
                self._known[rank] = self._store.get(f"kind/{rank}", 1.0).decode(errors="replace")
        self.differ = len({*self._known.values()}) > 1
        if self.differ:
            told = ", ".join(f"rank {rank}: {self._known[rank]}" for rank in sorted(self._known))
            raise RanksDisagree(
                f"the stages of a pipeline are on different kinds of device ({told}); give the stages of every rank a device "
                "of the same kind"
            )
        return None
