"""Options that differ between ranks are found before anything else is done, whichever they are.

`group_rows` on one rank alone paired rows with the wrong targets (a loss of 1.0029 for 0.9718). `dynamic` ended in KeyError '0';
`run_folder`, `profile`, `memory_limit`, "auto" and "search" in "TypeError: list indices ..."; `share_loss` waited for the timeout
of the group; `loss_scale` mixed up messages.
"""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.balance import LayerCost, Profile
from penstock.batch import Replicate, TensorChunkSpec, sum_reducer
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import RanksDisagree
from penstock.front.compared import COMPARED, OWN, described
from penstock.front.pipeline_options import FIRST, GROUPS
from penstock.lower import Ahead
from penstock.plan import Placement
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.gloo_pool import GlooPool

WIDTH, ROWS = 4, 8
SECONDS = 30.0  # within which every rank has raised, on a busy machine; a timeout of the group would be longer


def lengths(x: Tensor) -> list[int]:
    return list(range(len(x)))


def other_lengths(x: Tensor) -> list[int]:
    return [1] * len(x)


PLAN = get_schedule("1f1b")(2, 4)
COSTS = Profile((LayerCost("0", 1.0, 1.0, 1.0),))
# For each option that is compared: what the first rank gives and what the second, and how these are told.
PAIRS: dict[str, tuple[Any, Any, str, str]] = {
    "model": (nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4), "Sequential", "Linear"),
    "example": ((torch.ones(8, 4),), (torch.ones(4, 4),), "(float32[8, 4],)", "(float32[4, 4],)"),
    "loss_fn": (nn.functional.mse_loss, None, "given", "none"),
    "schedule": ("auto", "search", "'auto'", "'search'"),
    "microbatches": (4, 8, "4", "8"),
    "example_kwargs": (
        {"mask": torch.ones(2)},
        {"mask": torch.ones(3)},
        "{'mask': float32[2]}",
        "{'mask': float32[3]}",
    ),
    "example_target": (torch.ones(2), None, "float32[2]", "None"),
    "weights": ({}, None, "given", "none"),
    "init": (lambda name, tensor: None, None, "given", "none"),
    "stages": (2, 4, "2", "4"),
    "num_stages": (2, 4, "2", "4"),
    "placement": ("v", Placement.loop(2), "'v'", "Placement(ranks=(0, 1))"),
    "memory_limit": ("1GB", 2000, "1000000000", "2000"),
    "optimizer_bytes": (2.0, 0.0, "2.0", "0.0"),
    "optimizer": (torch.optim.AdamW, None, "given", "none"),
    "profile": (COSTS, False, "a Profile", "False"),
    "split_spec": ({"0": "end"}, {"1": "end"}, "{'0': 'end'}", "{'1': 'end'}"),
    "split_policy": (lengths, other_lengths, "lengths", "other_lengths"),
    "dynamic_shapes": ({"x": {0: "rows"}}, None, "{'x': {0: 'rows'}}", "None"),
    "output_loss_value_spec": (True, None, "True", "None"),
    "multi_use_param_spec": ("replicate", None, "'replicate'", "None"),
    "compile": ({"backend": "eager"}, False, "{'backend': 'eager'}", "False"),
    "data_parallel": ("ddp", "fsdp", "'ddp'", "'fsdp'"),
    "loss_scale": (torch.amp.GradScaler("cpu"), None, "given", "none"),
    "loss_weight": (len, None, "given", "none"),
    "run_folder": ("somewhere", None, "given", "none"),
    "collect_every": (10, None, "10", "None"),
    "share_loss": (True, False, "True", "False"),
    "few_rows": (True, False, "True", "False"),
    "group_rows": (lengths, other_lengths, "GroupRows(lengths=lengths", "GroupRows(lengths=other_lengths"),
    "replan": (0.05, None, "0.05", "None"),
    "scale_grads": (True, False, "True", "False"),
    "seed": (0, 1, "0", "1"),
    "rng": ("per-microbatch", None, "'per-microbatch'", "None"),
    "recompute": ([0], [1], "[0]", "[1]"),
    "offload": (True, {0: [1, 3]}, "True", "{0: [1, 3]}"),
    "offload_to": ("somewhere", None, "given", "none"),
    "ties": ([[(0, "a"), (1, "b")]], [], "[[(0, 'a'), (1, 'b')]]", "[]"),
    "dynamic": (True, False, "True", "False"),
    "receives": (Ahead(2), None, "Ahead(count=2)", "None"),
    "args_chunk_spec": ((TensorChunkSpec(0),), (Replicate(),), "(TensorChunkSpec(", "(Replicate"),
    "kwargs_chunk_spec": ({"x": Replicate()}, None, "{'x': Replicate", "None"),
    "target_chunk_spec": (TensorChunkSpec(1), None, "TensorChunkSpec(", "None"),
    "output_merge_spec": (sum_reducer, None, "CustomReducer", "None"),
}
WITH_PROCESSES = {"parallelize"}  # which wants a mesh of processes


def test_every_option_is_in_one_table_and_in_these_tests() -> None:
    every = {*FIRST, *(f.name for group in GROUPS for f in fields(group))}
    assert set(COMPARED) | set(OWN) == every
    assert not set(COMPARED) & set(OWN)
    assert set(PAIRS) | WITH_PROCESSES == set(COMPARED)


def disagreement(transport: LocalTransport | None, options: dict[str, Any]) -> str:
    began = time.monotonic()
    settings = {"example": (torch.ones(ROWS, WIDTH),), "microbatches": 4, "profile": False, **options}
    model = settings.pop("model", None) or nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(RanksDisagree) as caught:
        penstock.Pipeline(model, group=transport, **settings)
    assert time.monotonic() - began < SECONDS
    return str(caught.value)


@pytest.mark.parametrize("name", PAIRS)
def test_an_option_that_differs_is_named_on_every_rank(name: str) -> None:
    first, second, told, other = PAIRS[name]

    def run(transport: LocalTransport) -> str:
        return disagreement(transport, {name: first if transport.rank < 2 else second})

    everyone = LocalWorld(3).run(run)
    assert len(set(everyone)) == 1
    lines = [line.strip() for line in everyone[0].splitlines()]
    assert any(line.startswith(f"{name}={told}") and line.endswith(" on ranks 0, 1") for line in lines), everyone[0]
    assert any(line.startswith(f"{name}={other}") and line.endswith(" on rank 2") for line in lines), everyone[0]


def test_stages_made_by_hand_on_one_rank_only() -> None:
    def run(transport: LocalTransport) -> str:
        made = [PipelineStage(nn.Linear(4, 4), transport.rank, 2, "cpu", group=transport)]
        return disagreement(transport, {"stages": made if transport.rank else 2})

    told, _ = LocalWorld(2).run(run)
    assert "stages=2 on rank 0" in told
    assert "stages=made by hand on rank 1" in told


def test_a_number_of_stages_may_be_said_in_either_way() -> None:
    x, y = torch.randn(2, ROWS, WIDTH)

    def run(transport: LocalTransport) -> float | None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        said: dict[str, Any] = {"stages": 2} if transport.rank else {"num_stages": 2}
        pipe = penstock.Pipeline(
            model, (x,), loss_fn=nn.MSELoss(), schedule="1f1b", microbatches=4, profile=False, group=transport, **said
        )
        return pipe.step(x, target=y).loss

    first, second = LocalWorld(2).run(run)
    assert first == second


def test_words_for_values_have_no_addresses_and_are_short() -> None:
    assert described(object()) == "object"
    assert described(nn.Linear(2, 2)) == "Linear"
    assert described(lengths) == "lengths"
    long = described(list(range(100)))
    assert len(long) < 64
    assert long != described([*range(99), 0])


@pytest.mark.parametrize("option", [{"dynamic": True}, {"rng": "per-microbatch"}, {"receives": Ahead(2)}])
def test_a_plain_schedule_compares_what_its_messages_depend_on(option: dict[str, Any]) -> None:
    x, y = torch.randn(2, ROWS, WIDTH)

    def run(transport: LocalTransport) -> str:
        stage = PipelineStage(nn.Linear(WIDTH, WIDTH), transport.rank, 2, "cpu", group=transport)
        mine = option if transport.rank else {}
        schedule = penstock.Schedule1F1B(stage, 4, loss_fn=nn.MSELoss(), **mine)
        with pytest.raises(RanksDisagree) as caught:
            schedule.step(x, target=y)
        return str(caught.value)

    (name,) = option
    assert all(name in told for told in LocalWorld(2).run(run))


def in_processes(option: str) -> str:
    rank = torch.distributed.get_rank()
    options: dict[str, Any] = {"share_loss": rank > 0, "profile": None, "group_rows": lengths if rank else None}
    return disagreement(None, {option: options[option], "schedule": "1f1b"})


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("option", ["share_loss", "group_rows"])
def test_processes_are_told_as_well(gloo_pool: GlooPool, option: str) -> None:
    first, second = gloo_pool.run(2, in_processes, option)
    assert first == second
    assert f"{option}=" in first
    assert "on rank 0\n" in first
