"""`balance`: check what was asked, and choose the solver."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

from penstock.balance import solve_chain
from penstock.balance.cuts import Cuts, StageCut
from penstock.balance.infeasible import average_excess, heaviest, no_room
from penstock.balance.integer_problem import Problem
from penstock.balance.layer_profile import Profile
from penstock.balance.repair import Objective, repaired
from penstock.checks import check_types
from penstock.errors import BalanceError
from penstock.plan import Placement
from penstock.simulate import Link

InFlight = int | tuple[int, int]


def balance(
    profile: Profile,
    num_stages: int,
    *,
    num_ranks: int | None = None,
    placement: Literal["loop", "v"] | Placement | Sequence[int] = "loop",
    objective: Literal["stage", "rank"] = "stage",
    memory_limit: int | Sequence[int] | None = None,
    microbatches_in_flight: Callable[[int], InFlight] | Sequence[InFlight] | None = None,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    bandwidth: float | None = None,
    links: Sequence[Link] = (),
    rank_times: Sequence[float] | None = None,
) -> Cuts:
    """Find the cut points that make the slowest stage as fast as possible.

    >>> from penstock.balance import LayerCost, Profile
    >>> times = {"embed": 1.0, "block.0": 4.0, "block.1": 4.0, "block.2": 4.0, "head": 3.0}
    >>> profile = Profile(layers=tuple(LayerCost(name, forward=time) for name, time in times.items()))
    >>> [stage.layers for stage in balance(profile, 2).stages]
    [('embed', 'block.0', 'block.1'), ('block.2', 'head')]

    Every layer lands in exactly one stage and every stage has a layer. Among cuts with an equally fast slowest stage
    the one with the fewest bytes between ranks wins, then the one with the smallest sum of squared stage costs.

    num_ranks: one rank for each stage unless given; for "v" half as many.
    placement: "loop" (stage s on rank s % num_ranks), "v" (there and back), a Placement, or the rank of each stage.
    objective: "stage": the slowest stage; "rank": the slowest rank, the sum over its stages.
    memory_limit: bytes of a rank, or one number for each rank: parameters, gradients, optimizer state, and the
        activations of the microbatches in flight of all its stages. What its stages share counts once.
    microbatches_in_flight: for each stage how many microbatches the schedule holds at most between F and I, or a pair:
        between F and I, and between I and W. A list (`in_flight(plan)`), or a function of the stage. 1 unless given.
    optimizer_bytes_per_parameter_byte: 2 for Adam in the precision of the parameters, 0 for plain SGD.
    bandwidth: bytes in one unit of time. Then what crosses a cut between two ranks costs its stages on either side
        bytes / bandwidth (the activation one way, its gradient the other).
    links: ordered pairs of ranks with a bandwidth of their own. Their latency is the same wherever the cuts are.
    rank_times: for each rank how many times as long as the profile says it takes; the slowest stage is then weighed so.

    The answer is proved the best (`exact`) where each rank has one stage, and where the best cut of the stages, each for
    itself, keeps to the limits of the ranks. Otherwise (objective="rank", or a memory limit that several stages of a rank
    share) all cuts are tried if they are few; else that cut is improved by local search, and `exact` is False. Raises
    BalanceError when no cut is found, and says why.
    """
    check_types("balance", BalanceError, profile=(profile, Profile), links=(links, Sequence[Link]))
    check_types("balance", BalanceError, optimizer_bytes_per_parameter_byte=(optimizer_bytes_per_parameter_byte, float))
    check_types("balance", BalanceError, memory_limit=(memory_limit, float | Sequence[float] | None))
    check_types("balance", BalanceError, bandwidth=(bandwidth, float | None))
    check_types("balance", BalanceError, rank_times=(rank_times, Sequence[float] | None))
    stage_ranks = placement_ranks(placement, num_stages, num_ranks=num_ranks)
    if num_stages > len(profile.layers):
        raise BalanceError(
            f"{len(profile.layers)} layers cannot fill {num_stages} stages: every stage needs at least one layer; "
            f"ask for num_stages <= {len(profile.layers)} or profile smaller layers"
        )
    if objective not in ("stage", "rank"):
        raise BalanceError(f'objective is {objective!r}, expected "stage" or "rank"')
    problem = Problem(
        profile,
        stage_ranks,
        _limits(memory_limit, max(stage_ranks) + 1),
        in_flight=_in_flight(microbatches_in_flight, num_stages),
        state_factor=_positive("optimizer_bytes_per_parameter_byte", optimizer_bytes_per_parameter_byte, zero=True) + 2,
        bandwidths=_bandwidths(stage_ranks, bandwidth, links),
        weights=_weights(stage_ranks, objective, rank_times),
    )
    found = _solve(problem, objective)
    if found is None:
        raise no_room(problem)
    cuts, exact = found
    costs = [problem.cost(s, cuts[s], cuts[s + 1]) for s in range(num_stages)]
    weighed = [sum(costs[s] for s in stages) for stages in problem.rank_stages] if objective == "rank" else costs
    return Cuts(
        stages=tuple(_stage(problem, stage, cuts=cuts, cost=cost) for stage, cost in enumerate(costs)),
        rank_memory=tuple(problem.rank_memory(rank, cuts) for rank in range(problem.num_ranks)),
        slowest=max(weighed) / problem.scale,
        objective=objective,
        exact=exact,
    )


def leanest(profile: Profile, placement: Placement, *, optimizer_bytes: float = 2.0) -> tuple[int, ...]:
    """Return the first layers of the stages in the cut with the smallest peak memory of a rank, within 1%.

    >>> from penstock.balance import LayerCost, Profile
    >>> profile = Profile(tuple(LayerCost(f"layers.{i}", 1.0, parameter_bytes=size) for i, size in enumerate((1, 1, 1, 9))))
    >>> leanest(profile, Placement.loop(2)), balance(profile, 2).boundaries
    ((3,), (2,))
    """
    check_types("leanest", BalanceError, profile=(profile, Profile), placement=(placement, Placement))
    check_types("leanest", BalanceError, optimizer_bytes=(optimizer_bytes, float))
    factor = _positive("optimizer_bytes", optimizer_bytes, zero=True) + 2
    ranks, in_flight = placement.ranks, _in_flight(None, placement.num_stages)
    ways, weights = _bandwidths(ranks, None, ()), _weights(ranks, "stage", None)
    problem = Problem(profile, ranks, None, in_flight=in_flight, state_factor=factor, bandwidths=ways, weights=weights)
    low, high, best = 0, heaviest(problem), None
    while best is None or high - low > max(1, high // 100):
        limit = high if best is None else (low + high) // 2
        found = _solve(problem.within((max(limit, 1),) * problem.num_ranks), "stage")
        if found is None:
            assert best is not None, "so much holds everything"
            low = limit
        else:
            best, high = found[0][1:-1], limit
    return best


def placement_ranks(
    placement: Literal["loop", "v"] | Placement | Sequence[int], num_stages: int, *, num_ranks: int | None = None
) -> tuple[int, ...]:
    """The rank of each stage.

    >>> placement_ranks("loop", 4, num_ranks=2), placement_ranks("v", 4, num_ranks=2)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    check_types("placement_ranks", BalanceError, num_stages=(num_stages, int), num_ranks=(num_ranks, int | None))
    check_types("placement_ranks", BalanceError, placement=(placement, str | Placement | Sequence[int]))
    if num_stages < 1:
        raise BalanceError(f"num_stages is {num_stages}, expected at least 1")
    if num_ranks is not None and not 1 <= num_ranks <= num_stages:
        raise BalanceError(f"num_ranks is {num_ranks}, expected 1 to {num_stages} (num_stages): a rank needs a stage")
    if isinstance(placement, str):
        if placement not in ("loop", "v"):
            raise BalanceError(f'placement is {placement!r}, expected "loop", "v" or a list: the rank of each stage')
        make, each = (Placement.loop, 1) if placement == "loop" else (Placement.v, 2)
        count = num_ranks or max(1, num_stages // each)
        return make(count, -(-num_stages // count)).ranks[:num_stages]
    given = placement.ranks if isinstance(placement, Placement) else tuple(placement)
    if len(given) != num_stages:
        raise BalanceError(f"placement lists {len(given)} ranks, num_stages is {num_stages}; write one for each stage")
    if set(given) != set(range(num_ranks or max(given) + 1)):
        raise BalanceError(f"placement uses ranks {sorted(set(given))}, expected every rank from 0 on to have a stage")
    return given


def _bandwidths(
    ranks: Sequence[int], usual: float | None, links: Sequence[Link]
) -> tuple[tuple[float | None, float | None], ...]:
    """For each stage: of the way to the next stage, and to the one before."""
    known = {link[:2]: link.bandwidth for link in links}
    if known and max(map(max, known)) > max(ranks):
        raise BalanceError(f"links={list(links)} on {max(ranks) + 1} ranks; expected ranks from 0 to {max(ranks)}")

    def of(stage: int, other: int) -> float | None:
        if not 0 <= other < len(ranks) or ranks[stage] == ranks[other]:
            return None
        found = known.get((ranks[stage], ranks[other]), usual)
        return None if found is None else float(_positive("bandwidth", found))

    return tuple((of(stage, stage + 1), of(stage, stage - 1)) for stage in range(len(ranks)))


def _weights(ranks: Sequence[int], objective: str, rank_times: Sequence[float] | None) -> tuple[int, ...]:
    """For each stage: the time of its rank, in whole numbers; 1 where all ranks are equally fast."""
    if rank_times is None or len(set(rank_times)) < 2:
        return (1,) * len(ranks)
    if objective != "stage" or len(rank_times) != max(ranks) + 1 or min(rank_times) <= 0:
        raise BalanceError(
            f"rank_times={list(rank_times)} with objective={objective!r}; expected a number above 0 for each of the "
            f'{max(ranks) + 1} ranks, and objective="stage"'
        )
    exact = [_positive("rank_times", time) for time in rank_times]
    scale = math.lcm(*(time.denominator for time in exact))
    return tuple(int(exact[rank] * scale) for rank in ranks)


def _limits(given: int | Sequence[int] | None, num_ranks: int) -> tuple[int, ...] | None:
    if given is None:
        return None
    limits = (given,) * num_ranks if isinstance(given, int | float) else tuple(given)
    if len(limits) != num_ranks:
        raise BalanceError(f"memory_limit has {len(limits)} entries, expected {num_ranks}: one for each rank")
    return tuple(math.floor(_positive("memory_limit", limit)) for limit in limits)


def _in_flight(
    given: Callable[[int], InFlight] | Sequence[InFlight] | None, num_stages: int
) -> tuple[tuple[int, int], ...]:
    if given is None:
        return ((1, 0),) * num_stages
    entries = [given(stage) for stage in range(num_stages)] if callable(given) else list(given)
    if len(entries) != num_stages:
        raise BalanceError(f"microbatches_in_flight has {len(entries)} entries, expected {num_stages}: one a stage")
    pairs = tuple((entry, 0) if isinstance(entry, int) else entry for entry in entries)
    for stage, pair in enumerate(pairs):
        if len(pair) != 2 or any(not isinstance(n, int) or n < 0 for n in pair):
            raise BalanceError(
                f"microbatches_in_flight of stage {stage} is {entries[stage]!r}, expected a count, or two: held to I, held to W"
            )
    return pairs


def _positive(name: str, value: float, *, zero: bool = False) -> Fraction:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise BalanceError(f"{name} is {value!r}, expected a finite number {'>= 0' if zero else '> 0'}")
    return Fraction(value)


def _solve(problem: Problem, objective: Objective) -> tuple[tuple[int, ...], bool] | None:
    """The cuts, and True if they are proved the best; None if no cut was found that keeps to the limits."""
    single = problem.num_ranks == problem.num_stages
    window = solve_chain.windows(problem, problem.limits)
    least = solve_chain.slowest(problem, window)
    if least is None or average_excess(problem) > 0:
        return None
    if objective == "stage" or single:
        cuts = solve_chain.settle(problem, least, window)
        if single or problem.fits(cuts):
            return cuts, True
    cuts, excess, exact = repaired(problem, objective)
    return None if excess else (cuts, exact)


def _stage(problem: Problem, stage: int, *, cuts: tuple[int, ...], cost: int) -> StageCut:
    start, stop = cuts[stage], cuts[stage + 1]
    layers = problem.profile.layers[start:stop]
    shared = sum(problem.profile.shared_parameters[name] for name in problem.groups(start, stop))
    return StageCut(
        stage=stage,
        rank=problem.ranks[stage],
        start=start,
        stop=stop,
        layers=tuple(layer.name for layer in layers),
        forward=math.fsum(layer.forward for layer in layers),
        backward_input=math.fsum(layer.backward_input for layer in layers),
        backward_weight=math.fsum(layer.backward_weight for layer in layers),
        activation_to_input=sum(layer.activation_to_input for layer in layers),
        activation_to_weight=sum(layer.activation_to_weight for layer in layers),
        parameter_bytes=sum(layer.parameter_bytes for layer in layers) + shared,
        output_bytes=problem.profile.crossing[stop - 1] if stop < problem.num_layers else 0,
        cost=cost / problem.scale,
        memory=problem.stage_memory(stage, start, stop),
    )
