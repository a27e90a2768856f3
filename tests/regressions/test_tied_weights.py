"""Weights that stages share, beside other kinds of parallelism: gradients, norms and updates are those of a plain loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

import penstock
from penstock.errors import PenstockError, StageError
from penstock.run import Schedule
from penstock.stage.dtensors import whole_tensor
from tests.gloo_pool import GlooPool
from tests.run.pipes import on_ranks

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

VOCABULARY, WIDTH, ROWS, LENGTH, STEPS = 12, 8, 4, 3, 2
NORMS = (1.0, 2.0, float("inf"), 0.5)
TIED = {"head.weight": "embed.weight"}  # what a rank that holds both stages may hold twice
SHARDS = {
    "by words": {"*embed.weight": 0, "*head.weight": 0, "*up.weight": 0, "*up.bias": 0, "*down.weight": 1},
    "by columns": {"*embed.weight": 1, "*head.weight": 1, "*up.weight": 0, "*up.bias": 0, "*down.weight": 1},
    "not at all": {"*up.weight": 0, "*up.bias": 0, "*down.weight": 1},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Language(nn.Module):
    """Embedding, blocks, and a head whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> Language:
    torch.manual_seed(0)
    return Language().double()


def loss_fn(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    return tokens, labels


Found = tuple[list[float], list[dict[str, Tensor]], list[list[float]], dict[str, Tensor]]


def one_process() -> Found:
    """Losses, gradients and norms of each step, and the parameters after the last one."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads, norms = [], [], []
    for step in range(STEPS):
        tokens, labels = batch(step)
        loss = loss_fn(model(tokens), labels)
        loss.backward()
        losses.append(loss.item())
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        norms.append([nn.utils.clip_grad_norm_(model.parameters(), 1e9, kind).item() for kind in NORMS])
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, norms, {name: p.detach() for name, p in model.named_parameters()}


def trained(pipe: penstock.Pipeline, mine: slice) -> Found:
    """The same of what this rank holds."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    losses, grads, norms = [], [], []
    for step in range(STEPS):
        tokens, labels = batch(step)
        losses.append(pipe.step(tokens[mine], target=labels[mine]).loss)
        grads.append({name: whole_tensor(p.grad).clone() for name, p in pipe.named_parameters()})
        norms.append([pipe.clip_grad_norm_(1e9, kind) for kind in NORMS])
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, norms, {name: whole_tensor(p) for name, p in pipe.named_parameters()}


def assert_same(everyone: list[Found]) -> None:
    losses, grads, norms, parameters = one_process()
    held = set()
    for found in everyone:
        assert found[0] == pytest.approx(losses, rel=1e-9)
        for got, want in zip([*found[1], found[3]], [*grads, parameters], strict=True):
            for name, value in got.items():
                name = TIED.get(name, name)
                torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        for got, want in zip(found[2], norms, strict=True):
            assert got == pytest.approx(want, rel=1e-9)
        held |= {TIED.get(name, name) for name in found[3]}
    assert held == set(parameters)


def captured(sizes: dict[str, int], shards: str, schedule: str, kind: str = "fsdp") -> Found:
    """A captured model over a mesh of these dimensions."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    count = sizes.get("dp", 1)
    place = mesh["dp"].get_local_rank() if count > 1 else 0
    mine = slice(place * ROWS // count, (place + 1) * ROWS // count)
    pipe = penstock.Pipeline(
        make(),
        (batch(0)[0][mine],),
        mesh=mesh,
        parallelize=lambda module, mesh: penstock.shard_parameters(module, mesh["tp"], SHARDS[shards]),
        data_parallel=kind,
        loss_fn=loss_fn,
        schedule=schedule,
        microbatches=2,
        profile=False,
    )
    return trained(pipe, mine)


PLACES = [{"pp": 2, "tp": 2}, {"pp": 1, "tp": 2}, {"dp": 2, "pp": 1, "tp": 2}, {"dp": 2, "pp": 2, "tp": 1}]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("sizes", PLACES, ids=str)
def test_tied_weights_beside_tensor_parallelism(gloo_pool: GlooPool, sizes: dict[str, int], shards: str) -> None:
    """Gradients of holders were exchanged as each rank had them, where they may be terms of a sum, and were added to a parameter
    that was spread in another way. Within one stage the parameter was spread under one of its names, and the other kept the old
    one, which `fully_shard` could not take. And a stage under `fully_shard` found no mesh for the DTensors that arrived."""
    assert_same(gloo_pool.run(math.prod(sizes.values()), captured, sizes, shards, "1f1b"))


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.filterwarnings("ignore::penstock.errors.NotDeferred")
def test_a_rank_that_holds_a_tied_weight_in_two_stages(gloo_pool: GlooPool, shards: str) -> None:
    """Each of its stages made a DTensor of the weight. Where it was not sharded both had the same memory: their gradients were
    taken for one, and an optimizer moved the weight twice."""
    assert_same(gloo_pool.run(4, captured, {"pp": 2, "tp": 2}, shards, "zbv"))


class Words(nn.Module):
    def __init__(self, whole: Language) -> None:
        super().__init__()
        self.embed, self.position, self.block = whole.embed, whole.position, whole.blocks[0]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embed(tokens) + self.position)


class Scores(nn.Module):
    def __init__(self, whole: Language) -> None:
        super().__init__()
        self.block, self.head = whole.blocks[1], whole.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def by_modules(module: nn.Module, mesh: Any, names: Sequence[str] = ("embed", "block", "head")) -> nn.Module:
    """torch's own plan for those of the parts with these names that a stage has."""
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parts = [name for name in plan if name.split(".")[0] in names and hasattr(module, name.split(".")[0])]
    return parallelize_module(module, mesh["tp"], {name: plan[name] for name in parts})


def but_the_embedding(module: nn.Module, mesh: Any) -> nn.Module:
    return by_modules(module, mesh, ("block", "head"))


def by_hand(num_ranks: int, parallelize: Any) -> Any:
    mesh = init_device_mesh("cpu", (num_ranks, 2), mesh_dim_names=("pp", "tp"))
    place, whole = mesh["pp"].get_local_rank(), make()
    module = (Words, Scores)[place](whole) if num_ranks > 1 else whole
    stage = penstock.PipelineStage(module, place, num_ranks, "cpu", group=mesh["pp"].get_group())
    given: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "loss_fn": loss_fn}
    if num_ranks > 1:
        given["ties"] = [penstock.tie([(0, "embed.weight"), (1, "head.weight")])]
    return trained(penstock.Pipeline(stages=[stage], mesh=mesh, parallelize=parallelize, **given), slice(None))


def test_tied_weights_of_stages_made_by_hand(gloo_pool: GlooPool) -> None:
    found = gloo_pool.run(4, by_hand, 2, by_modules)
    for _, grads, _, parameters in found:  # their names are those of the stages
        for held in (*grads, parameters):
            for name in list(held):
                place, _, own = name.removeprefix("stages.").partition(".")
                held[own.replace("block.", f"blocks.{place}.")] = held.pop(name)
    assert_same(found)


def test_tied_weights_that_are_spread_in_two_ways_are_refused(gloo_pool: GlooPool) -> None:
    """Each rank took the other's part of the weight for its own."""
    for outcome in gloo_pool.outcomes(4, by_hand, 2, but_the_embedding):
        assert outcome.error == "StageError"
        assert (
            "float64[12, 8] on rank 0, float64[12, 8] placed (Shard(dim=0),) on a mesh of (2,) on rank 1"
            in outcome.details
        )


def test_a_tie_that_comes_apart_within_a_stage_is_refused(gloo_pool: GlooPool) -> None:
    """`parallelize_module` makes a parameter of its own of each name, and each would be trained for itself."""
    for outcome in gloo_pool.outcomes(2, by_hand, 1, by_modules):
        assert outcome.error == "StageError"
        assert "tie them again: module.head.weight = module.embed.weight" in outcome.details


def test_a_pattern_fits_a_parameter_by_any_of_its_names() -> None:
    """Only the first of its names was looked at: a pattern for the other one did nothing."""
    with pytest.raises(StageError, match=r"head.weight has the shape \[12, 8\], and no dimension 2"):
        penstock.shard_parameters(make(), None, {"head.*": 2})
    with pytest.raises(
        StageError, match=r"embed.weight along dimension 0, head.weight along dimension 1: these are names"
    ):
        penstock.shard_parameters(make(), None, {"head.*": 1, "embed.*": 0})


def test_ddp_beside_tensor_parallelism_is_refused(gloo_pool: GlooPool) -> None:
    """It ended in "Operator c10d.broadcast_.default does not have a sharding strategy registered"."""
    for outcome in gloo_pool.outcomes(4, captured, {"dp": 2, "pp": 1, "tp": 2}, "by words", "1f1b", "ddp"):
        assert outcome.error == "StageError"
        assert 'Write data_parallel="fsdp"' in outcome.details


def accumulated(kind: str, synced: list[bool], sparse: bool) -> list[dict[str, Tensor]]:
    """The gradients after steps of which some are under the wrapper's `no_sync`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    mine, model = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2), make()
    model.embed.sparse = sparse
    given: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "loss_fn": loss_fn, "profile": False}
    pipe = penstock.Pipeline(model, (batch(0)[0][mine],), mesh=mesh, data_parallel=kind, **given)
    wrapper: Any = pipe.stages[0].submod
    for step, sync in enumerate(synced):
        tokens, labels = batch(step)
        if kind == "fsdp":
            wrapper.set_requires_gradient_sync(sync)
        with nullcontext() if sync or kind == "fsdp" else wrapper.no_sync():
            pipe.step(tokens[mine], target=labels[mine])
    return [{name: whole_tensor(p.grad) for name, p in pipe.named_parameters()}]


@pytest.mark.parametrize("synced", [[False, True], [True, False, False, True]], ids=str)
@pytest.mark.parametrize(("kind", "sparse"), [("ddp", False), ("ddp", True), ("fsdp", False)])
def test_steps_under_no_sync_count_for_tied_weights(
    gloo_pool: GlooPool, kind: str, sparse: bool, synced: list[bool]
) -> None:
    """What a step under `no_sync` had left in the gradient of a tied weight was kept apart from what the next step averaged over
    the replicas, and so it was never averaged: the replicas went apart."""
    model = make()
    for step in range(len(synced)):
        tokens, labels = batch(step)
        loss_fn(model(tokens), labels).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for (got,) in gloo_pool.run(4, accumulated, kind, synced, sparse):
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_that_fails_leaves_what_a_tied_weight_had_gathered() -> None:
    """The owner adds to a copy of its gradient: neither a step that fails nor one that succeeds gives it another tensor."""
    modules: list[nn.Module] = [nn.Linear(4, 4, bias=False).double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)

    def rank(schedule: Schedule, rank: int) -> None:
        weight: Any = modules[rank].weight
        schedule.step(x, target=y)
        first, values = weight.grad, weight.grad.clone()
        with pytest.raises((PenstockError, ZeroDivisionError)), modules[1].register_forward_hook(lambda *_: 1 / 0):
            schedule.step(x, target=y)
        assert weight.grad is first
        assert torch.equal(first, values)
        schedule.step(x, target=y)
        assert weight.grad is first
        torch.testing.assert_close(first, 2 * values, rtol=1e-12, atol=0.0)

    on_ranks("1f1b", 2, 4, rank, modules=modules, ties=[penstock.tie([(0, "weight"), (1, "weight")])])


def fine_tuned(kind: str, frozen: Sequence[str], thawed: Sequence[str]) -> list[dict[str, Tensor]]:
    """The gradients of a step with parameters frozen since before the pipeline was made, and of one with some thawed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    mine, model = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2), make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    given: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "loss_fn": loss_fn, "profile": False}
    pipe = penstock.Pipeline(model, (batch(0)[0][mine],), mesh=mesh, data_parallel=kind.removesuffix(", hook"), **given)
    if kind == "ddp, hook":
        for stage in pipe.stages:
            stage.submod.register_comm_hook(mesh["dp"].get_group(), allreduce_hook)
    found = []
    for step in range(2):
        tokens, labels = batch(step)
        pipe.step(tokens[mine], target=labels[mine])
        held = [(name, p) for name, p in pipe.named_parameters() if p.grad is not None]
        found.append({name: whole_tensor(p.grad) for name, p in held})
        pipe.zero_grad()
        for name, parameter in pipe.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)) or name.startswith(tuple(thawed)))
    return found


@pytest.mark.parametrize("kind", ["ddp", "ddp, hook", "fsdp"])
@pytest.mark.parametrize("thawed", [("blocks.0",), ("embed", "position", "blocks.0")], ids=["half", "whole"])
def test_fine_tuning_with_a_frozen_first_stage(gloo_pool: GlooPool, kind: str, thawed: Sequence[str]) -> None:
    """A stage without anything to train was not sharded, and its part of a tied weight was not that of the other holder: "a line
    brought message 2 ... 512 bytes, where ... 256 bytes was due". And what was trained later, after it had been frozen when the
    pipeline was made, was never averaged over the replicas of a stage in DistributedDataParallel, or in nothing."""
    frozen = ("embed", "position", "blocks.0")
    model, want = make(), list[dict[str, Tensor]]()
    for step in range(2):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) or (step == 1 and name.startswith(tuple(thawed))))
        tokens, labels = batch(step)
        loss_fn(model(tokens), labels).backward()
        want.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    for found in gloo_pool.run(4, fine_tuned, kind, frozen, thawed):
        for got, expected in zip(found, want, strict=True):
            for name, value in got.items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                )
