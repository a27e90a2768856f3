"""Random cases, each from one number: which kinds of blocks, how they are spread, what is done with them.

generate(7)                      # the same case every time
generate(7, only="captured")     # of one run: "hand", "captured", "compiled", "replicas", "tensor"
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from penstock.schedules import all_schedules
from tests.fuzz.blocks import KINDS
from tests.fuzz.cases import Case
from tests.fuzz.models import weight_of

THREADS = {"hand": 10, "captured": 5, "compiled": 1}  # how often each comes
PROCESSES = {"replicas": 3, "tensor": 2}
RUNS = (*THREADS, *PROCESSES)
RECIPES = {recipe.name: recipe for recipe in all_schedules() if recipe.name != "forward"}
SMALL = 5  # blocks
UNTRACED = {"python", "data", "tensor hook", "generator", "differentiates"}
BY_ROWS = {"batch", "state", "random", "half", "batch sizes", "python", "data", "some", "routed"}


def generate(seed: int, *, only: str | None = None, size: str = "usual") -> Case:
    """The case of a number. `size`: "small", "usual", or "long" with what takes too long for a minute, such as inductor."""
    dice = Random(f"{seed} {only} {size}")
    run = only or dice.choices(list(THREADS), list(THREADS.values()))[0]
    case = Case(seed=seed % 100_000, captured=run in ("captured", "compiled"))
    for _ in range(50):
        found = _spread(dice, case, run)
        if size != "small" or len(found.blocks) <= SMALL:
            break
    case = _options(dice, found, run, long=size == "long")
    case = _model(dice, case, run)
    return replace(case, actions=_actions(dice, case, run))


# -- how it is spread


def _spread(dice: Random, case: Case, run: str) -> Case:
    """Schedule, ranks, stages and microbatches."""
    if run in PROCESSES:
        return _on_a_mesh(dice, case, run)
    ranks = dice.choice((1, 2, 2, 2, 3, 3, 4))
    microbatches = dice.choice((1, 2, 3, 3, 4, 4, 5, 7))
    name = dice.choice([*RECIPES, *RECIPES, "searched", "searched", "searched"])
    if case.captured and dice.random() < 0.1:
        name = dice.choice(("auto", "search"))
    placement: tuple[int, ...] = ()
    if name == "searched":
        stages = ranks * dice.choice((1, 2, 2))
        if dice.random() < 0.6:
            stages = ranks + dice.randrange(3)
            where = [*range(ranks), *(dice.randrange(ranks) for _ in range(stages - ranks))]
            dice.shuffle(where)
            placement = tuple(where)
    else:
        stages = ranks * _per_rank(dice, name)
    return _cut(dice, replace(case, schedule=name, ranks=ranks, microbatches=microbatches, placement=placement), stages)


def _per_rank(dice: Random, name: str) -> int:
    return (RECIPES[name].stages_per_rank if name in RECIPES else 0) or dice.choice((1, 2, 2, 3))


def _on_a_mesh(dice: Random, case: Case, run: str) -> Case:
    """Replicas of a pipeline, or tensor parallel stages, over at most four processes."""
    if run == "tensor":
        dp, pp, tp = dice.choice(((1, 2, 2), (1, 2, 2), (1, 1, 2), (2, 1, 2)))
        mesh: dict[str, Any] = {"dp": dp, "tp": tp, "kind": "fsdp" if dp > 1 else "none"}
    else:
        dp, pp = dice.choice(((2, 2), (2, 2), (2, 2), (2, 1)))
        kind = dice.choice(("ddp", "ddp", "fsdp", "fsdp", "replicate", "replicate_with_fsdp", "hsdp", "fsdp_mixed"))
        dp, pp = (4, 1) if kind == "hsdp" else (dp, pp)
        mesh = {"dp": dp, "tp": 1, "kind": kind}
    name = dice.choice(list(RECIPES))
    captured = dice.random() < (0.5 if run == "tensor" else 0.2) and mesh["kind"] in ("ddp", "fsdp", "none")
    microbatches = dice.choice((1, 2, 3, 4))
    case = replace(case, captured=captured, schedule=name, ranks=pp, microbatches=microbatches, mesh=mesh)
    return _cut(dice, case, pp * min(2, _per_rank(dice, name)))


def _cut(dice: Random, case: Case, stages: int) -> Case:
    count = stages + dice.choice((0, 1, 1, 2, 3))
    cuts = tuple(sorted(dice.sample(range(1, count), stages - 1)))
    blocks = ("linear",) * count
    marked = not case.captured or dice.random() < 0.6 or case.schedule == "searched"
    return replace(case, blocks=blocks, cuts=cuts, marked=marked and case.schedule not in ("auto", "search"))


# -- options


def _options(dice: Random, case: Case, run: str, *, long: bool) -> Case:
    """A few of the options, which then say what the model may have."""
    found: dict[str, Any] = {}

    def likely(share: float) -> bool:
        return dice.random() < share

    threads = run not in PROCESSES
    if likely(0.3):
        found["recompute"] = _some_stages(dice, case)
    if likely(0.3):
        found["offload"] = _some_stages(dice, case)
        found["offload_to"] = {"to": dice.choice(("host", "disk")), "threshold": dice.choice((0, 0, 256, 1 << 14))}
    if likely(0.3) and (case.marked or not case.captured) and run != "tensor":
        found |= {"rng": "per-microbatch", "seed": dice.randrange(100)}
    if likely(0.15):
        found["dynamic"] = True
    if likely(0.15):
        found["share_loss"] = False
    if likely(0.1):
        found["collect_every"] = dice.choice((1, 2))
    if likely(0.15):
        found["receives"] = dice.choice(("early", "ahead", "late"))
    if likely(0.12) and threads:
        found["few_rows"] = True
    if likely(0.1) and "rng" not in found and threads and case.captured is False:
        found["group_rows"] = True
    if likely(0.15) and "group_rows" not in found and threads:
        found["loss_scale"] = True
    if likely(0.15) and threads and not found.keys() & {"few_rows", "group_rows"}:
        found["count_hooks"] = True
    if case.captured and threads and not case.marked and likely(0.3):
        found["memory_limit"] = dice.choice((1.0, 1.02, 1.1, 1.3))
        found = {name: value for name, value in found.items() if name not in ("recompute", "offload", "offload_to")}
    if case.captured and threads and likely(0.15):
        found["profile"] = True
    if run == "compiled":
        found["compile"] = dice.choice(("aot_eager", "inductor")) if long else "aot_eager"
    if likely(0.04) and threads:
        found["replan"] = 0.05
    optimizer = dice.choice(("sgd", "momentum", "adam"))
    if likely(0.08) and threads and not found.keys() & {"group_rows", "few_rows", "loss_scale", "count_hooks"}:
        optimizer = "backward"
    return replace(case, options=found, optimizer=optimizer)


def _some_stages(dice: Random, case: Case) -> Any:
    stages = sorted(dice.sample(range(case.num_stages), dice.randint(1, case.num_stages)))
    picked = {
        str(stage): sorted(dice.sample(range(case.microbatches), dice.randint(1, case.microbatches)))
        for stage in stages
    }
    return dice.choice((True, True, stages, picked))


# -- the model


def _model(dice: Random, case: Case, run: str) -> Case:
    kinds = _allowed(case, run)
    plain = [kind for kind in kinds if not KINDS[kind].traits & {"tokens", "head", "slow"}]
    odd = dice.sample(plain, min(len(plain), 6))  # a case has a theme, so that kinds meet themselves too
    blocks = [dice.choice(odd if dice.random() < 0.7 else plain) for _ in case.blocks]
    if dice.random() < 0.04 and "compiled" in kinds:
        blocks[dice.randrange(len(blocks))] = dice.choice(("compiled", "compiledfunction"))
    tokens = dice.random() < 0.35
    if tokens:
        blocks[0] = dice.choice([kind for kind in kinds if "tokens" in KINDS[kind].traits])
    loss = "mse"
    if len(blocks) > 1 and dice.random() < (0.7 if tokens else 0.15):
        blocks[-1], loss = (
            "head",
            dice.choice(("cross", "cross", "cross", "own", "own", "chunked", "chunked", "padded")),
        )
    elif dice.random() < 0.1 and run not in PROCESSES and "group_rows" not in case.options:
        loss = "sum"
    if loss in ("padded", "own", "chunked") and (run in PROCESSES or case.options.keys() & {"group_rows"}):
        loss = "cross"
    if loss == "chunked" and case.cuts and case.cuts[-1] == len(blocks) - 1 and case.captured:
        loss = "own"
    case = replace(case, blocks=tuple(blocks), loss=loss, nest=dice.choice(("tuple", "tuple", "dict")))
    if "sparse" in case.traits:
        case = replace(case, optimizer="backward" if case.optimizer == "backward" else "sgd")
        if case.options.get("loss_scale"):
            case = replace(case, options={k: v for k, v in case.options.items() if k != "loss_scale"})
    case = replace(case, skips=_skips(dice, case))
    return _shared_and_frozen(dice, case)


def _allowed(case: Case, run: str) -> list[str]:
    """The kinds that this case may have."""
    without: set[str] = set()
    if case.captured:
        without |= UNTRACED
    if case.options.get("rng") is None:
        without |= {"random"}
    if case.options.get("group_rows"):
        without |= BY_ROWS
    if case.optimizer == "backward":
        without |= {"some", "routed"}
    if case.options.get("loss_scale"):
        without |= {"complex"}  # which torch's scaler does not know
    if run in PROCESSES:  # each replica has its own state, which the loop has not
        without |= {"state", "batch", "python", "generator", "some", "unused", "routed", "slow", "sparse", "random"}
        without |= (
            {"complex", "parameter hook", "scalar"} if case.mesh["kind"] != "ddp" else set()
        )  # fully_shard makes other parameters
        without |= {"half"} if case.mesh["kind"] == "fsdp_mixed" else set()
    if case.mesh.get("tp", 1) > 1:
        shared = ["linear", "mlp", "layernorm", "embed", "head", "plain"]
        return [*shared, *(("gated",) if case.captured else ("gru", "experts", "custom", "wide"))]
    return [name for name, kind in KINDS.items() if not kind.traits & without]


def _skips(dice: Random, case: Case) -> tuple[tuple[int, int], ...]:
    if len(case.blocks) < 3 or dice.random() < 0.5:
        return ()
    pairs = [(a, b) for a in range(len(case.blocks) - 2) for b in range(a + 2, len(case.blocks))]
    return tuple(sorted(dice.sample(pairs, min(len(pairs), dice.choice((1, 1, 2, 3))))))


def _shared_and_frozen(dice: Random, case: Case) -> Case:
    ties: list[tuple[int, int]] = []
    if dice.random() < 0.35 and not (case.options.get("count_hooks") or case.optimizer == "backward"):
        by_shape: dict[str, list[int]] = {}
        for index, kind in enumerate(case.blocks):
            if shape := _tied_shape(kind):
                by_shape.setdefault(shape, []).append(index)
        groups = [group for group in by_shape.values() if len(group) > 1]
        if groups:
            first, *others = dice.choice(groups)
            ties = [(first, other) for other in dice.sample(others, min(len(others), dice.choice((1, 1, 2))))]
            if case.mesh.get("tp", 1) > 1 and not case.captured:
                ties = [pair for pair in ties if _apart(case, pair)][:1]
    frozen: list[int] = []
    if dice.random() < 0.25:
        frozen = dice.sample(range(len(case.blocks)), dice.randint(1, max(1, len(case.blocks) - 1)))
    case = replace(case, ties=tuple(sorted(ties)), frozen=tuple(sorted(frozen)))
    return case if _trains(case) else replace(case, frozen=())


def _apart(case: Case, pair: tuple[int, int]) -> bool:
    """Return True if two blocks are in stages of their own: torch's parallelize_module takes apart a tie within a module."""
    return case.stage_of(pair[0]) != case.stage_of(pair[1])


@cache
def _tied_shape(kind: str) -> str | None:
    """What the weight of a kind can be tied to, if it can be."""
    name = weight_of(kind)
    if name is None or kind == "parameterhook" or "sparse" in KINDS[kind].traits:
        return None
    return str(list(KINDS[kind].make().get_parameter(name).shape))


@cache
def _has_parameters(kind: str) -> bool:
    return any(p.requires_grad for p in KINDS[kind].make().parameters())


def _trains(case: Case) -> bool:
    """Whether something is left to train; blocks that are tied to a frozen one may be frozen by it."""
    free = [i for i, kind in enumerate(case.blocks) if _has_parameters(kind) and i not in case.frozen]
    return bool(free) and not (case.ties and case.frozen and len(free) < 3)


# -- what is done with it


def _actions(dice: Random, case: Case, run: str) -> tuple[dict[str, Any], ...]:
    """A training step or two, then what comes, and a step at the end."""
    few = case.options.get("few_rows", False)
    lengths = (3,) if case.captured or run in PROCESSES else (3, 3, 3, 2, 5)
    length = 3

    def rows() -> int:
        count = case.microbatches * dice.choice((1, 1, 2, 2)) + dice.choice((0, 0, 1))
        return dice.randint(1, case.microbatches) if few and dice.random() < 0.3 else count

    def train(**more: Any) -> dict[str, Any]:
        nonlocal length
        length = dice.choice((length, dice.choice(lengths)))
        found = {"do": "train", "rows": rows(), **more}
        if length != 3:
            found["length"] = length
        if dice.random() < 0.25 and not _changes_rows(case):
            found["outputs"] = dice.choice(("all", "last"))
        return found

    found = [train()]
    for _ in range(dice.choice((1, 2, 3, 4))):
        found += _some_action(dice, case, run, train)
    return (*found, train())


def _changes_rows(case: Case) -> bool:
    return bool(case.options.get("group_rows")) and bool(case.traits & BY_ROWS)


def _some_action(dice: Random, case: Case, run: str, train: Any) -> list[dict[str, Any]]:
    """One thing that users do between steps."""
    in_backward = case.optimizer == "backward"
    # Norms below 1 have tests of their own: the root of a gradient that is 0 but for rounding is no number to compare.
    clip = {"do": "clip", "norm": dice.choice((1.0, 1.0, 2.0, 2.0, 3.0, float("inf"))), "max": dice.choice((0.1, 1.0))}
    optimize: list[dict[str, Any]] = [] if in_backward else [{"do": "optimize"}]
    wrapped = case.mesh.get("kind") in ("replicate", "replicate_with_fsdp", "hsdp", "fsdp_mixed")
    choices: list[list[dict[str, Any]]] = [
        optimize,
        [train(zero=False), train(zero=False), *optimize],
        [{"do": "evaluate", "rows": train()["rows"]}],
        [train(), *optimize],
    ]
    if not in_backward and "sparse" not in case.traits and not wrapped:
        choices += [[train(), clip, *optimize]] * 2
    if not wrapped:
        beside = dice.random() < 0.4
        choices.append([{"do": "save", **({"beside": True} if beside else {})}, train(), *optimize, {"do": "load"}])
        choices.append([{"do": "save"}, *optimize])
    if case.mesh.get("kind") == "ddp":
        choices += [[{"do": "unsynced", "rows": train()["rows"]}, train(zero=False), *optimize]] * 2
    if run not in PROCESSES:
        choices.append([_replan(dice, case)])
        if "python" not in case.traits and not in_backward and "count_hooks" not in case.options:
            choices.append([_rebuild(dice, case)])
        fixed = case.options.keys() & {"count_hooks", "memory_limit", "compile"}
        if case.captured and not in_backward and not fixed:
            choices.append([{"do": "calibrate", "rows": 2 * case.microbatches}])
    return dice.choice(choices)


def _replan(dice: Random, case: Case) -> dict[str, Any]:
    """Another plan for the same placement: another schedule's, or the same with everything recomputed."""
    if case.schedule in RECIPES and dice.random() < 0.6 and (case.marked or not case.captured):
        per_rank = case.num_stages // case.ranks
        mine = RECIPES[case.schedule]
        others = [
            recipe.name
            for recipe in RECIPES.values()
            if recipe.stages_per_rank in (None, per_rank) and recipe.placement == mine.placement
        ]
        return {"do": "replan", "schedule": dice.choice(others), "recompute": dice.random() < 0.3}
    return {"do": "replan", "recompute": True}


def _rebuild(dice: Random, case: Case) -> dict[str, Any]:
    """Another cut of the same model, and maybe another schedule."""
    names = [name for name, recipe in RECIPES.items() if recipe.stages_per_rank in (None, 1, 2)]
    name = dice.choice(names)
    stages = case.ranks * (RECIPES[name].stages_per_rank or dice.choice((1, 2)))
    same = case.options.get("rng") is not None or case.options.keys() & {"recompute", "offload"}
    if stages > len(case.blocks) or same or not case.marked:
        return {"do": "rebuild", "to": {}}
    cuts = sorted(dice.sample(range(1, len(case.blocks)), stages - 1))
    return {"do": "rebuild", "to": {"schedule": name, "cuts": cuts, "placement": []}}
