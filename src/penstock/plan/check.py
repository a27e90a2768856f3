"""check(plan): complete, well placed, well ordered, cannot deadlock. The error shows the counterexample.

The proof is by execution. If no rank can ever be blocked for good under the semantics below, whatever the timing, then
the plan cannot deadlock, because ranks meet only through messages and each list is worked through in order:

- a rank goes through its list in order; a compute action waits for the messages that it needs;
- messages between two ranks in one direction are delivered in the order in which they were posted, on both sides;
- a message is complete only when it is posted on both sides (rendezvous; nothing is buffered).

A rank that posts a send goes on, as the runtime does. ``sends="blocking"`` proves more: that the plan runs even if a
rank stays in each send until its receive is posted at the other end. ``queues`` says which messages share a queue, and
thereby wait for one another; see `penstock.plan.queues`.
"""

from __future__ import annotations

from typing import Literal

from penstock.errors import PlanError
from penstock.misfits import takes
from penstock.plan.execution import Execution
from penstock.plan.ledger import Ledger
from penstock.plan.plan import Plan
from penstock.plan.queues import QueueLayout, QueueRun


@takes(PlanError)
def check(
    plan: Plan,
    *,
    sends: Literal["asynchronous", "blocking"] = "asynchronous",
    queues: QueueLayout = "direction",
    batches: bool = False,
) -> None:
    """Raise a PlanError that shows the counterexample, or return.

    >>> from penstock.plan import Plan
    >>> check(Plan.of({0: ["0F0", "0B0"], 1: ["1B0", "1F0"]}))
    Traceback (most recent call last):
    ...
    penstock.errors.OrderError: rank 1, position 1: 1B0 stands before 1F0, which it needs
    """
    ledger = Ledger(plan)
    ledger.read()
    Execution(plan, ledger.columns, blocking=sends == "blocking").run()
    if queues != "direction" or batches:
        QueueRun(plan, queues, blocking=sends == "blocking", batches=batches).run()
