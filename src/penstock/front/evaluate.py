"""The number of microbatches of an evaluation, which takes batches of any size."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.batch.policy import RowPolicy
from penstock.comm.collectives import same_everywhere
from penstock.errors import SplitError
from penstock.front.mesh import PipelineMesh
from penstock.nest import Value

_NOTHING = -1  # in place of a number of rows


def count_of_evaluation(
    ends: PipelineMesh,
    policy: RowPolicy,
    args: tuple[Value, ...],
    kwargs: Mapping[str, Value],
    problem: Exception | None = None,
) -> int | None:
    """Return the rows of the batch, the same on all ranks; None if no rank has any. Collective: call it on all ranks.

    `problem`: what is wrong with the call of this rank already; all ranks raise.
    """

    def look() -> int:
        if problem is not None:
            raise problem
        rows = policy.most_microbatches(args, kwargs)
        if rows == 0:
            raise SplitError("the batch has no rows; expected at least one")
        return _NOTHING if rows is None else rows

    mine = ends.ready("evaluate() or predict()", look)
    everyone = [int(number) for number in ends.own.all_gather("evaluate() or predict()", mine)]
    given = {rank: {"rows": count} for rank, count in enumerate(everyone) if count != _NOTHING}
    same_everywhere("the batches", given, "Give every rank the same")
    return next((facts["rows"] for facts in given.values()), None)
