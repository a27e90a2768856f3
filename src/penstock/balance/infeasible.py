"""Error for memory limits that no cut meets: the layer that is too large, or the smallest sufficient limit."""

from __future__ import annotations

from bisect import bisect_left

from penstock.balance import solve_chain
from penstock.balance.cuts import size_text
from penstock.balance.integer_problem import Problem
from penstock.errors import BalanceError


def no_room(problem: Problem) -> BalanceError:
    """Say which layer is too large, or the least memory that would do."""
    assert problem.limits is not None, "without a limit there is always room"
    profile, limits = problem.profile, problem.limits

    def of(size: int) -> str:
        return f"{size} bytes ({size_text(size)})"

    for index, layer in enumerate(profile.layers):
        alone = [problem.stage_memory(stage, index, index + 1) for stage in range(problem.num_stages)]
        over, stage, rank = min((alone[s] - limits[r], s, r) for s, r in enumerate(problem.ranks))
        if over > 0:
            return BalanceError(
                f"layer {layer.name!r} alone needs {of(alone[stage])} even on stage {stage}, and rank {rank} may hold "
                f"{of(limits[rank])}; raise memory_limit, split the layer, or hold fewer microbatches"
            )
    excess, sure = _least_excess(problem)
    given, needed = f"{list(limits)} bytes", f"each rank needs at least {of(excess)} more"
    if len(set(limits)) == 1:
        least = "the least possible is" if sure else "it takes at least"
        given, needed = f"{of(limits[0])} a rank", f"{least} {of(limits[0] + excess)}"
    if not sure and not excess:
        needed = "each stage fits for itself, but no cut was found in which the stages of every rank fit together"
    return BalanceError(
        f"no cut of {len(profile.layers)} layers into {problem.num_stages} stages fits the memory limit of {given}: "
        f"{needed}; raise memory_limit or use more ranks"
    )


def average_excess(problem: Problem) -> int:
    """Bytes that are missing on each rank on average, however the layers are placed."""
    if problem.limits is None:
        return 0
    lightest: int = sum(map(min, zip(*map(problem.layer_memory, problem.in_flight), strict=True)))
    return -(-(lightest - sum(problem.limits)) // problem.num_ranks)


def heaviest(problem: Problem) -> int:
    """Bytes that hold everything, however the layers are placed."""
    heaviest: int = sum(map(max, zip(*map(problem.layer_memory, problem.in_flight), strict=True)))
    return heaviest + sum(problem.group_states.values())


def _least_excess(problem: Problem) -> tuple[int, bool]:
    """The bytes by which every limit must grow at least before a cut fits; True if that is also enough."""
    most = heaviest(problem)

    def fits(excess: int) -> bool:
        grown = tuple(limit + excess for limit in problem.limits or ())
        return solve_chain.sweep(problem, None, solve_chain.windows(problem, grown)) is not None

    least = max(0, average_excess(problem))
    return least + bisect_left(range(least, most), True, key=fits), problem.num_ranks == problem.num_stages
