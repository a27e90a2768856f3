"""Orders and passes over orders, side by side with torch's own: the same actions in the same places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining._schedule_visualizer as torch_visualizer
import torch.distributed.pipelining.schedules as torch_schedules

from penstock.compat import _schedule_visualizer, schedules

SIZES = [(2, 2, 2), (2, 4, 4), (2, 8, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5), (2, 3, 4), (2, 15, 4)]
CASES = [
    (name, *sizes)
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    for sizes in SIZES
    if not (name in ("ZBVZeroBubble", "DualPipeV") and sizes[0] != 2)  # a V has two stages a rank
    and not (name == "DualPipeV" and sizes[1] < sizes[0] * sizes[2])  # torch refuses, penstock does not
]
Rows = dict[int, list[str]]


def texts(rows: Any) -> Rows:
    by_rank = dict(enumerate(rows)) if isinstance(rows, list) else rows
    return {rank: [str(action) for action in row if action is not None] for rank, row in by_rank.items()}


def actions(package: Any, rows: Rows) -> dict[int, list[Any]]:
    return {rank: [package._Action.from_str(text) for text in row] for rank, row in rows.items()}


def both(rows: Rows, change: Callable[[Any, dict[int, list[Any]]], Any]) -> tuple[Rows, Rows]:
    """What a pass makes of the same rows in penstock and in torch."""
    ours, theirs = (texts(change(package, actions(package, rows))) for package in (schedules, torch_schedules))
    return ours, theirs


def each(name: str, *options: Any) -> Callable[[Any, dict[int, list[Any]]], Any]:
    """A pass over the list of one rank."""
    return lambda package, order: {rank: getattr(package, name)(row, *options) for rank, row in order.items()}


@pytest.mark.parametrize(("name", "per_rank", "microbatches", "ranks"), CASES)
def test_orders_and_their_lowering(name: str, per_rank: int, microbatches: int, ranks: int) -> None:
    stages = per_rank * ranks
    place = (lambda s: s if s < ranks else stages - 1 - s) if name in ("ZBVZeroBubble", "DualPipeV") else None
    rank_of = place or (lambda s: s % ranks)
    rows = texts(_schedule_visualizer.get_schedule_ops(name, ranks, microbatches, per_rank))
    assert rows == texts(torch_visualizer.get_schedule_ops(name, ranks, microbatches, per_rank))
    ours, theirs = both(rows, each("_merge_bw"))
    assert ours == theirs
    gathered, theirs = both(rows, each("_add_unshard_reshard"))
    assert gathered == theirs
    reduced, theirs = both(gathered, each("_add_reduce_grad", microbatches))
    assert reduced == theirs
    lowered, theirs = both(reduced, lambda package, order: package._add_send_recv(order, rank_of, stages))
    assert lowered == theirs
    ours, theirs = both(lowered, lambda package, order: package._defer_recv_ops(order, rank_of))
    assert ours == theirs


def simulated(package: Any, rows: Rows, rank_of: Callable[[int], int]) -> int:
    stages = 1 + max(int(text[0]) for row in rows.values() for text in row)
    order = package._add_send_recv(actions(package, rows), rank_of, stages)
    return max(map(len, package._simulate_comms_compute(order, rank_of, stages).values()))


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
def test_a_simulation_takes_as_many_slots(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = texts(_schedule_visualizer.get_schedule_ops(name, 2, 4))
    ours, theirs = (simulated(package, rows, lambda s: s % 2) for package in (schedules, torch_schedules))
    assert ours == theirs


@pytest.mark.parametrize(
    ("first", "second", "ranks"),
    [
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            (0, 1),
        ),
        (
            "0RECV_B0 0F0 0SEND_F0 0I0 0W0 0RECV_B1 0F1 0SEND_F1 0I1 0W1",
            "1RECV_F0 1RECV_F1 1F0 1I0 1SEND_B0 1W0 1F1 1I1 1SEND_B1 1W1",
            (0, 1),
        ),
        (
            "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0",
            "1RECV_F0 1RECV_F1 2RECV_B0 1F0 2F0 2SEND_F0 (1F1;2B0)OVERLAP_F_B",
            (0, 1, 1, 0),
        ),
    ],
)
def test_receives_put_off(first: str, second: str, ranks: tuple[int, ...]) -> None:
    """A receive moves down to its use, but on the lower of two ranks not past a send to the other."""
    rows = {0: first.split(), 1: second.split()}
    ours, theirs = both(rows, lambda package, order: package._defer_recv_ops(order, ranks.__getitem__))
    assert ours == theirs


@pytest.mark.parametrize("kind", ["PipelineScheduleMulti", "_PipelineScheduleRuntime"])
def test_files_hold_what_torchs_do(kind: str, tmp_path: Path) -> None:
    """Computations with their idle slots, or, of a runtime, everything that it does."""
    rows = [["0F0", "0F1", "", "0B0", "0B1"], ["", "1F0", "1B0", "1F1", "1B1"]]
    written = []
    for package in (schedules, torch_schedules):
        stage = SimpleNamespace(submod=None, group=None, stage_index=0, group_rank=0, group_size=2, num_stages=2)
        schedule = getattr(package, kind)([stage], 2)
        source, file = tmp_path / "source.csv", tmp_path / f"{package.__name__}.csv"
        source.write_text("".join(",".join(row) + "\n" for row in rows))
        schedule._load_csv(str(source))
        assert schedule.pipeline_order[1][0] is None
        schedule._dump_csv(str(file))
        written.append(file.read_text())
    ours, theirs = written
    assert ours == theirs


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_the_rows_of_a_schedule_with_their_messages(name: str, defer: bool) -> None:
    """Receives as early as their sends allow, or as late as their use."""
    options: dict[str, Any] = {"with_comms": True, "defer_pp_recv": defer}
    packages = _schedule_visualizer, torch_visualizer
    ours, theirs = (texts(package.get_schedule_ops(name, 2, 4, **options)) for package in packages)
    assert ours == theirs
