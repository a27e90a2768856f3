"""The profiler's view of all ranks in one file, read back: every action of the plan, on one clock, and the plan beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def trace_two_steps(file: str) -> list[list[str]]:
    """The actions of each rank, as the schedule says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)
    loss = nn.functional.mse_loss
    pipe = penstock.Pipeline(model, (x,), loss_fn=loss, schedule="1f1b", microbatches=2, profile=False)
    pipe.step(x, target=x)
    with penstock.train.traced(pipe, file):
        for _ in range(2):
            pipe.step(x, target=x)
    lowered = pipe.schedule.lowered_plan()
    return [[str(action) for action in lowered.actions(rank)] for rank in range(lowered.num_ranks)]


def test_all_ranks_and_the_plan_are_in_one_file(gloo_pool: GlooPool, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "trace.json"
    actions = gloo_pool.run(2, trace_two_steps, str(file))[0]
    events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}

    def rows(process: str) -> list[dict[str, Any]]:
        [pid] = [pid for pid, name in names.items() if name == process]
        return sorted((e for e in events if e["pid"] == pid and e["ph"] == "X"), key=lambda event: event["ts"])

    ends: list[dict[str, float]] = []
    for rank, expected in enumerate(actions):
        [seen] = [name for name in names.values() if name.startswith(f"rank {rank}: ") and "planned" not in name]
        ranges = [e for e in rows(seen) if e["name"].startswith("penstock:") and e["name"] != "penstock:anchor"]
        assert [e["name"].removeprefix("penstock:") for e in ranges] == expected * 2
        assert any(e["name"] == "aten::addmm" and inside(e, ranges) for e in rows(seen)), "kernels are inside actions"
        planned = [e["name"] for e in rows(f"rank {rank}: planned") if e["cat"] in ("forward", "backward")]
        assert sorted(planned) == sorted([name for name in expected if "_" not in name] * 2)
        ends.append({e["name"]: e["ts"] + e["dur"] for e in ranges[: len(expected)]})
    assert ends[0]["penstock:0F0"] < ends[1]["penstock:1F0"], "both ranks are on one clock"
    assert ends[1]["penstock:1B1"] < ends[0]["penstock:0B1"]


def inside(event: dict[str, Any], ranges: list[dict[str, Any]]) -> bool:
    return any(r["ts"] <= event["ts"] and event["ts"] + event["dur"] <= r["ts"] + r["dur"] for r in ranges)
