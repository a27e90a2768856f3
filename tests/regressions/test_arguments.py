"""Nonsense as arguments of everything that is public: an error of penstock's that says which, and never one of Python's."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.checks import check_types, fits
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError, PlanError, RunError
from penstock.plan import pack, unpack
from penstock.run.lookout import FOLDER, read_folder
from penstock.simulate import simulate
from tests.checkpoint.pipes import make

NONSENSE: list[Any] = [
    *(None, 0, -1, 3, 1.5, float("nan"), float("inf"), True, "", "x", "1f1b", b"x", 2j, type, object(), {1}, print),
    *([], [1], ["x"], {}, {"a": 1}, (), (1, 2), torch.ones(2), torch.ones(0, 4), nn.Linear(2, 2)),
    *(Path("/nonexistent/x"), Path("/")),
]
ROOMS = (
    *("plan", "schedules", "simulate", "lower", "show", "balance", "search", "batch", "capture", "stage", "run"),
    *("comm", "parallel", "front", "train", "studio"),
)
LEFT = {"LocalWorld"}  # as many threads as it is told
PLAN = penstock.get_schedule("1f1b")(2, 4)


def callables() -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for room in ("penstock", *(f"penstock.{one}" for one in ROOMS)):
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, BaseException | enum.Enum):
                continue
            if getattr(value, "_is_protocol", False) or inspect.isabstract(value):
                continue  # what a user derives from; Python itself says that it cannot be called
            if callable(value) and name not in LEFT:
                found[f"{room}.{name}"] = value
    for owner in (penstock.Plan, penstock.Placement, penstock.plan.StageGraph, penstock.Costs, penstock.Profile):
        found |= {f"{owner.__name__}.{n}": v for n, v in vars(owner).items() if isinstance(v, classmethod)}
        found |= {name: v.__get__(None, owner) for name, v in found.items() if isinstance(v, classmethod)}
    costs = penstock.Costs.unit(PLAN)
    for one in (PLAN, PLAN.placement, PLAN.graph, PLAN.rules, costs, simulate(PLAN, costs)):
        methods = [name for name in vars(type(one)) if not name.startswith("_") and callable(getattr(one, name))]
        found |= {f"{type(one).__name__}().{name}": getattr(one, name) for name in methods}
    return list(found.items())


def drawn(function: Callable[..., Any], chance: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the number that the function takes, and nothing more that fits."""
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in plain)
    args = [chance.choice(NONSENSE) for _ in range(chance.randint(needed, len(plain)))]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY and (p.default is p.empty or chance.random() < 0.3)]
    return args, {p.name: chance.choice(NONSENSE) for p in named}


def raw_errors(name: str, function: Callable[..., Any], *, tries: int) -> list[str]:
    chance, found = random.Random(name), []
    for _ in range(tries):
        args, kwargs = drawn(function, chance)
        try:
            function(*args, **kwargs)
        except PenstockError as error:
            found += [] if str(error).strip() else [f"{name}: an error without a word"]
        except Exception as error:  # noqa: BLE001  that is what is looked for
            found.append(f"{name}(*{args!r:.80}, **{kwargs!r:.80}): {type(error).__name__}: {error!s:.80}")
    return found


@pytest.mark.filterwarnings("ignore")
def test_nonsense_is_named_by_every_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """43 of the public names let AttributeError, TypeError, KeyError or OverflowError out: "'str' object has no attribute
    'stage_index'" for a schedule without a stage."""
    monkeypatch.chdir(tmp_path)
    found = [line for name, function in callables() for line in raw_errors(name, function, tries=12)]
    assert found == []


@pytest.mark.filterwarnings("ignore")
def test_nonsense_is_named_by_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that the user's module does not take is the module's error, and comes as it is."""
    monkeypatch.chdir(tmp_path)
    pipe, _ = make()
    of_pipe = "calibrate clip_grad_norm_ load load_state_dict recut run_plan save save_pretrained train whole"
    calls = {name: getattr(pipe, name) for name in of_pipe.split()} | {
        "any": pipe.ranks.any,
        "all": pipe.ranks.all_gather,
    }
    assert [line for name, call in calls.items() for line in raw_errors(name, call, tries=20)] == []
    x, y = torch.ones(2, 4, 4)
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(RunError, match="loss_kwargs is a Tensor"):
            call(x, target=y, loss_kwargs=torch.ones(2))
    assert pipe.evaluate(x[:1], target=y[:1]).loss is not None, "a plan that was refused is not half taken"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: PLAN.placement.rank_of(2), "rank_of(stage=2); expected a stage from 0 to 1"),
        (lambda: PLAN.placement.rank_of(-1), "rank_of(stage=-1)"),
        (lambda: PLAN.placement.stages_of(7), "stages_of(rank=7); expected a rank from 0 to 1"),
        (lambda: PLAN.graph.producers(9), "producers(stage=9)"),
        (lambda: PLAN.actions(2), "actions(rank=2); expected a rank from 0 to 1"),
        (lambda: PLAN.actions(-1), "actions(rank=-1)"),
        (lambda: unpack(30), "unpack(30); expected a packed action"),
        (lambda: unpack("2F0"), "unpack('2F0')"),  # type: ignore[arg-type]
        (lambda: pack("2F0"), "pack('2F0'); expected an action"),  # type: ignore[arg-type]
        (lambda: pack(penstock.Action(penstock.Op.F, 1 << 20, 0)), "stages go from 0 to 1048575"),
        (lambda: pack(penstock.Action(penstock.Op.F, 0, -1)), "microbatches from 0 to"),
        (lambda: PLAN.rules.carrier(0, 0), "no stage on rank 0 uses the output of stage 0"),
        (lambda: PLAN.rules.requires(penstock.Action(penstock.Op.UNSHARD, 0)), "requires(0UNSHARD)"),
        (lambda: PLAN.of_first(0), "a plan for 0 microbatches"),
        (lambda: penstock.batch.microbatch_sizes(4, 0), "0"),
    ],
)
def test_numbers_of_the_right_kind_that_are_none_of_the_plan(call: Callable[[], object], said: str) -> None:
    """They were IndexError, StopIteration and AssertionError, or the last stage for -1, or another action for a large stage."""
    with pytest.raises(PenstockError) as raised:
        call()
    assert said in str(raised.value)


def test_a_value_that_cannot_be_told_fails_on_every_rank() -> None:
    """It was a TypeError of json's on its rank, and the others waited for that rank."""

    def rank(transport: LocalTransport) -> None:
        pipe, _ = make(transport)
        with pytest.raises(RunError, match="not JSON serializable"):
            pipe.ranks.all_gather("something", object() if transport.rank == 1 else 3)
        assert pipe.ranks.all_gather("something", transport.rank) == [0, 1]

    LocalWorld(2).run(rank)


def test_numbers_without_end(tmp_path: Path) -> None:
    """`penstock search -v 99999999999999999999` was an OverflowError, and `penstock top` made a row for each of the ranks up to
    the one that a file named."""
    with pytest.raises(PlanError, match="at most 1,048,576 stages"):
        penstock.Costs.per_rank(num_stages=10**20)
    with pytest.raises(PlanError, match="stages_per_rank=0"):
        penstock.Costs.per_rank(num_stages=2, stages_per_rank=0)
    (tmp_path / FOLDER).mkdir()
    for numbers in ({"rank": 10**12}, {"rank": -1}, {"rank": 0, "seconds": 10**400}, {"rank": 0, "at": -1}):
        (tmp_path / FOLDER / "rank-0.json").write_text(json.dumps(numbers))
        with pytest.raises(PenstockError, match="does not say where a rank is"):
            read_folder(tmp_path)


def test_only_what_does_not_fit_is_blamed() -> None:
    def halve(number: int, *, names: list[str] | None = None) -> float:
        check_types("halve", PlanError, number=(number, int), names=(names, list[str] | None))
        raise ZeroDivisionError("inside")

    with pytest.raises(PlanError, match=r"halve\(number='x'\); expected int"):
        halve("x")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"halve\(names=\[1\]\); expected list\[str\] \| None"):
        halve(3, names=[1])  # type: ignore[list-item]
    with pytest.raises(ZeroDivisionError):
        halve(3, names=["a"])
    with pytest.raises(PlanError, match=r"draw\(plan=3\); expected Plan \| None"):
        check_types("draw", PlanError, plan=(3, penstock.Plan | None))
    assert fits((1, "a"), tuple[int, str])
    assert not fits((1, 2), tuple[int, str])
    assert not fits("ab", list[str])
    assert fits({"a": 1.0}, dict[str, float])
