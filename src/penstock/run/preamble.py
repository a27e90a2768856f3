"""The two small exchanges around every step: what is about to run, and whether it ran.

The *preamble* goes down the ranks in the order of the stages, ahead of the first activation: the number of the step, its
mode, its signature, whether it is cold. So ranks that are about to do different things find out before the first
activation is sent. In some steps checksums of what the ranks were given come after it (`penstock.run.checksums`). The
*verdict* goes up and down a tree after the last action: a step succeeds on all ranks or on none, so no rank steps its
optimizer on gradients that another rank does not have; and if it fails, all ranks have the same record of the failure.

Note "Ctrl-C". A wait of the backend cannot be broken off: Python hears of Ctrl-C when the wait is over and its message is
there. So both exchanges are carried to their end, and KeyboardInterrupt comes after them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from itertools import product

import torch

from penstock.batch.batch import UNKNOWN
from penstock.comm.framing import LONGEST
from penstock.comm.messages import Work
from penstock.comm.transport import Transport
from penstock.errors import PenstockError, TransportError
from penstock.health.failure import NOBODY, FailureRecord
from penstock.plan import Placement
from penstock.run.checksums import MOST, Known, from_numbers, to_numbers

FAILED = -1  # in place of a signature: the first stage's rank failed before it knew one


@dataclass(frozen=True, slots=True)
class Preamble:
    """What the first stage's rank is about to run."""

    epoch: int
    mode: int  # which program: 0 training, 1 forward only; 2 and 3 the same with other handlers
    signature: int  # a number for the shapes of the first stage's input, or FAILED
    cold: int  # 1: messages describe themselves
    num_microbatches: int
    rows: int = UNKNOWN  # of the model's arguments
    target_rows: int = UNKNOWN
    checksums: int = 0  # how many of what ranks were given come after it

    @property
    def failed(self) -> bool:
        return self.signature == FAILED

    def __str__(self) -> str:
        mode, own = ("a training step", "an evaluation")[self.mode % 2], " with handlers of its own" * (self.mode > 1)
        return f"{mode}{own} (number {self.epoch}) of {self.num_microbatches} microbatches"


class Preambles:
    """Each rank hears from the rank of the stage before its first one, and tells the ranks that follow it."""

    def __init__(self, transport: Transport, placement: Placement) -> None:
        self.transport = transport
        first = [placement.stages_of(rank)[0] for rank in range(placement.num_ranks)]
        parents = [None if stage == 0 else placement.rank_of(stage - 1) for stage in first]
        self.parent = parents[transport.rank]
        control = transport.control
        self.receive = None if self.parent is None else control.receiver(self.parent)
        self.send = {child: control.sender(child) for child, parent in enumerate(parents) if parent == transport.rank}
        self.wait = control.waiter()

    def hear(self) -> tuple[Preamble | None, Known, BaseException | None]:
        """What the parent tells, None if it cannot be reached; checksums of ranks before this one; and what went wrong."""
        numbers, problem = self._received(len(fields(Preamble)))
        if numbers is None:
            return None, {}, problem
        preamble, known = Preamble(*numbers), None
        if not preamble.checksums:
            return preamble, {}, problem
        if 0 < preamble.checksums <= MOST:
            known, later = self._received(3 * preamble.checksums)
            problem = problem or later
        if known is None:
            announced = f"rank {self.parent} announced {preamble.checksums} checksums; expected up to {MOST}"
            return None, {}, problem or TransportError(announced)
        return preamble, from_numbers(known), problem

    def _received(self, count: int) -> tuple[list[int] | None, BaseException | None]:
        """So many numbers of the parent, None if it cannot be reached; and what went wrong."""
        assert self.receive is not None and self.parent is not None, "the first rank has nobody to hear from"  # noqa: PT018
        numbers = torch.empty(count, dtype=torch.int64)
        interrupt = None
        self.transport.awaited = self.parent
        try:
            self.wait(self.receive([numbers]))
        except RuntimeError as error:
            return None, self.transport.explain(error, peer=self.parent, what="the preamble of the step")
        except KeyboardInterrupt as error:  # see the note "Ctrl-C"
            interrupt = error
        return numbers.tolist(), interrupt

    def tell(self, preamble: Preamble, known: Known, error: BaseException | None) -> BaseException | None:
        """Tell the children. When all know, the error comes back, or what went wrong with a child that cannot be reached."""
        failed: BaseException | None = None
        if self.send:
            told = [torch.tensor(astuple(replace(preamble, checksums=len(known))), dtype=torch.int64)]
            if known:
                told.append(torch.tensor(to_numbers(known), dtype=torch.int64))
            for child, numbers in product(self.send, told):
                try:
                    work = self.send[child]([numbers])
                    if work is not None:
                        self.transport.awaited = child
                        self.wait(work)
                except RuntimeError as caught:
                    failed = self.transport.explain(caught, peer=child, what="the preamble of the step")
                except KeyboardInterrupt as caught:
                    failed = caught
        return error or failed


@dataclass
class Verdict:
    """Whether all ranks are fine; if not, the failure that all of them name; and what this rank met when it asked."""

    fine: bool
    record: FailureRecord | None = None  # None where no rank knows why
    unreachable: PenstockError | None = None
    interrupt: KeyboardInterrupt | None = None


def verdict(
    transport: Transport, *, ok: bool, record: FailureRecord | None = None, lost: frozenset[int] = frozenset()
) -> Verdict:
    """Ask all ranks. A rank that cannot be reached is not fine; the others are told all the same.

    Each message is a number, 0: fine, else the length of the record that follows, or UNKNOWN. Of several records the one of the
    lowest rank stands, and comes down the tree to every rank.
    """
    found = Verdict(ok, record)
    if transport.num_ranks == 1:
        return found
    send, receive, unreached = transport.control.isend, transport.control.irecv, set(lost)

    def exchange(post: Callable[[torch.Tensor, int], Work], tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Send or receive. Whatever goes wrong with that counts as a failure."""
        try:
            if peer not in unreached:
                post(tensor, peer).wait()
        except PenstockError as error:
            unreached.add(peer)
            found.fine, found.unreachable = False, found.unreachable or error
            found.record = standing(found.record, FailureRecord.of(error, transport.rank))
        except KeyboardInterrupt as error:  # see the note "Ctrl-C"
            found.interrupt = error
        return tensor

    def learn(size: int, peer: int) -> None:
        """The peer is not fine: receive its record, if it has one."""
        found.fine = False
        if 0 < size <= LONGEST and peer not in unreached:
            data = exchange(receive, torch.zeros(size, dtype=torch.uint8), peer).numpy().tobytes()
            if peer not in unreached:
                found.record = standing(found.record, FailureRecord.decode(data))

    def told(*peers: int) -> None:
        """This rank, or one of those that have told it so, is not fine."""
        data = b"" if found.record is None else found.record.encode()
        for peer in peers:
            exchange(send, torch.tensor([len(data) or UNKNOWN]), peer)
            if data:
                exchange(send, torch.frombuffer(bytearray(data), dtype=torch.uint8), peer)

    parent, children = transport.family()
    for child in children:
        if size := int(exchange(receive, torch.tensor([UNKNOWN]), child)):
            learn(size, child)
    if transport.failed is not None:  # news that came while this rank asked
        found.fine, found.record = False, standing(found.record, transport.failed)
    if parent is not None:
        exchange(send, torch.tensor([0]), parent) if found.fine else told(parent)
        if size := int(exchange(receive, torch.tensor([UNKNOWN]), parent)):
            learn(size, parent)
    for child in children if found.fine else ():
        exchange(send, torch.tensor([0]), child)
    if not found.fine:
        told(*children)
    return found


def standing(one: FailureRecord | None, other: FailureRecord | None) -> FailureRecord | None:
    """Which of two records all ranks name: that of the lower rank; one that names a rank before one that names none."""
    known = [record for record in (one, other) if record is not None]
    return min(known, key=lambda record: (record.rank == NOBODY, record.rank), default=None)
