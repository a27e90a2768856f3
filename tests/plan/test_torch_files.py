"""Plan files travel both ways: what torch lowers and writes passes here, and torch takes what is written here."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from penstock.lower import lower
from penstock.plan import Placement, Plan, check, dump, dumps, load
from penstock.plan.actions import text
from penstock.schedules import all_schedules, get_schedule
from penstock.simulate import simulate

NAMES = [recipe.name for recipe in all_schedules()]


def torch_actions(plan: Plan) -> dict[int, list[Any]]:
    """Our compute actions as torch's."""
    return {
        rank: [theirs._Action.from_str(text(code)) for code in codes]  # type: ignore[no-untyped-call]
        for rank, codes in enumerate(plan.codes)
    }


def torch_runtime(order: dict[int, list[Any]]) -> Any:
    """As much of torch's runtime as it takes to write and read files."""
    runtime = object.__new__(theirs._PipelineScheduleRuntime)
    runtime.pipeline_order = runtime.pipeline_order_with_comms = order
    return runtime


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 9)])
def test_what_torch_lowers_and_writes_loads_here(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    plan = get_schedule(name)(*sizes)
    lowered = theirs._add_send_recv(torch_actions(plan), plan.placement.rank_of, plan.num_stages)
    path = tmp_path / "torch.csv"
    torch_runtime(lowered)._dump_csv(str(path), "compute_comms")
    ours = load(path, name=name)
    assert ours.is_lowered
    assert ours.placement == plan.placement
    assert ours.num_microbatches == plan.num_microbatches
    check(ours)
    assert simulate(ours).makespan <= simulate(plan).makespan + 1e-9


@pytest.mark.parametrize("name", [name for name in NAMES if name != "forward"])  # torch wants backwards in a file
def test_what_is_written_here_is_read_by_torch(name: str, tmp_path: Path) -> None:
    plan = lower(get_schedule(name)(4, 6), shards=True, reduce=True)
    path = tmp_path / "ours.csv"
    dump(plan, path)
    schedule = torch_runtime({})
    schedule._stages, schedule.pp_group_size = [], plan.num_ranks
    schedule._num_stages, schedule._n_microbatches = plan.num_stages, plan.num_microbatches
    schedule._load_csv(str(path), format="compute_comms")  # validates, too
    assert schedule.stage_index_to_group_rank == dict(enumerate(plan.placement.ranks))
    for rank, codes in enumerate(plan.codes):
        assert [str(action) for action in schedule.pipeline_order_with_comms[rank]] == [text(code) for code in codes]


@pytest.mark.parametrize("name", NAMES)
def test_compute_only_files(name: str, tmp_path: Path) -> None:
    plan = get_schedule(name)(3, 5)
    path = tmp_path / "compute.csv"
    torch_runtime(torch_actions(plan))._dump_csv(str(path), "compute_only")
    assert load(path, name=name) == plan
    with path.open(newline="") as file:
        assert [",".join(row) for row in csv.reader(file)] == dumps(plan).splitlines()


def test_the_files_of_a_schedule_of_torch_itself(tmp_path: Path) -> None:
    """Idle slots, REDUCE_GRAD and all: as a program that uses torch today leaves them on the disk."""
    import torch

    stage = SimpleNamespace(
        submod=torch.nn.Identity(),
        num_stages=4,
        group_size=2,
        group_rank=0,
        group=None,
        is_first=False,
        is_last=False,
        has_backward=True,
        stage_index_to_group_rank={},
    )
    schedule = theirs.ScheduleInterleaved1F1B([stage, stage], 4)  # type: ignore[list-item]
    for kind in ("compute_only", "compute_comms"):
        path = tmp_path / f"{kind}.csv"
        schedule._dump_csv(str(path), kind)
        plan = load(path)
        assert plan.placement == Placement.loop(2, 2)
        assert plan.is_lowered == (kind == "compute_comms")
        check(plan)
