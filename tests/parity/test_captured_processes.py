"""Captured and hand-made stages in real processes: tied weights that stay one, inputs by name, replicas.

Models are captured here and sent to the processes, each of which has its own copy of all stages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.capture import MultiUseParameterConfig, Pipe, pipeline, split_modules, tie
from penstock.errors import PenstockError
from penstock.run.schedule import Schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.gloo_pool import GlooPool
from tests.parity import captured as cases

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

STEPS = 10


def steps_of_case(schedule: str, pipe: Pipe, batches: list[dict[str, Any]]) -> cases.Left:
    return cases.run_rank(cases.plan_for(schedule, 3), pipe, batches, group=None, rank=dist.get_rank())


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("1f1b", "skips"),
        ("zbv", "skips"),
        ("interleaved1f1b", "far"),
        ("1f1b", "tied"),
        ("dualpipev", "tied"),
        ("interleavedzerobubble", "transmitted"),
        ("zb-h1", "buffers"),
        ("loopedbfs", "numbers"),
        ("v-half", "mixed"),
    ],
)
def test_cases(gloo_pool: GlooPool, schedule: str, name: str) -> None:
    plan = cases.plan_for(schedule, 3)
    batches = cases.make_batches(name, (6, 6, 10))
    ranks = gloo_pool.run(plan.num_ranks, steps_of_case, schedule, cases.captured(name)[1], batches)
    cases.assert_equal(plan, ranks, *cases.run_loop(name, batches, 3))


# -- tied weights over ten optimizer steps


def make_tied() -> nn.Module:
    torch.manual_seed(2)
    return cases.Tied().double()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {name: torch.randint(0, cases.WORDS, (4, 3), generator=generator) for name in ("ids", "labels")}
        for _ in range(STEPS)
    ]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, weight_decay=0.01)


def train_unsplit() -> dict[str, Tensor]:
    model = make_tied()
    optimizer = optimizer_of(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        for part in zip(*(value.chunk(2) for value in batch.values()), strict=True):
            (model(*part)["loss"] / 2).backward()
        optimizer.step()
    return model.state_dict()


def train_captured(schedule: str, pipe: Pipe) -> dict[str, Tensor]:
    plan = cases.plan_for(schedule, 2)
    stages = [pipe.build_stage(k, "cpu") for k in plan.placement.stages_of(dist.get_rank())]
    step = Schedule.from_plan(plan, stages).step
    parameters = {id(p): p for stage in stages for p in stage.submod.parameters()}
    optimizers = [optimizer_of(parameters.values())] if parameters else []  # a head whose only weight travels has none
    for batch in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        step(**batch)
        for optimizer in optimizers:
            optimizer.step()
    return {f"{stage.stage_index}.{n}": v for stage in stages for n, v in stage.submod.state_dict().items()}


@pytest.mark.parametrize("way", ["REPLICATE", "TRANSMIT"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleavedzerobubble"])
def test_tied_weights_are_one_after_ten_optimizer_steps(gloo_pool: GlooPool, schedule: str, way: str) -> None:
    """Every rank has its own process, its own model and its own optimizer."""
    want = train_unsplit()
    example = {name: value[:2] for name, value in batches()[0].items()}
    pipe = pipeline(make_tied(), (), example, multi_use_param_spec=MultiUseParameterConfig[way])
    found = gloo_pool.run(cases.plan_for(schedule, 2).num_ranks, train_captured, schedule, pipe)
    held = {key: value for rank in found for key, value in rank.items()}
    assert {key.partition(".")[2] for key in held} == set(want)
    for key, value in held.items():
        torch.testing.assert_close(value, want[key.partition(".")[2]], rtol=1e-9, atol=1e-11)
    if way == "REPLICATE":
        assert torch.equal(held["0.embed.weight"], held["3.head.weight"])
        assert torch.equal(held["1.twice.weight"], held["2.twice.weight"])


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(cases.WORDS, cases.WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(cases.WIDTH, cases.WIDTH)
        self.out = nn.Linear(cases.WIDTH, cases.WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(x)))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_by_hand(way: str) -> dict[str, Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(2)
    if way == "tie":
        torch.manual_seed(
            2 + rank
        )  # the values of the owner count: the other rank's are made equal before the first step
        module: nn.Module = Embed().double() if rank == 0 else Head().double()
        options: dict[str, Any] = {"ties": [tie([(0, "table.weight"), (1, "out.weight")])]}
    else:
        module = split_modules(whole(), ["embed.table", "head.middle", "tanh", "head.out"], 2)[rank]
        options = {}  # what is tied was found when the model was split
    stage = PipelineStage(module, rank, 2, "cpu")
    schedule = Schedule.from_plan(_two(), stage, loss_fn=cross_entropy, **options)
    optimizer = optimizer_of(module.parameters())
    for batch in batches():
        optimizer.zero_grad()
        schedule.step(batch["ids"], target=batch["labels"])
        optimizer.step()
    return module.state_dict()


def _two() -> Any:
    from penstock.schedules import get_schedule

    return get_schedule("1f1b")(2, 2)


def whole() -> nn.Module:
    embed, head = Embed(), Head()
    head.out.weight = embed.table.weight
    return nn.ModuleDict({"embed": embed, "head": head, "tanh": nn.Tanh()}).double()


@pytest.mark.parametrize("way", ["tie", "split_modules"])
def test_tied_weights_of_hand_made_stages(gloo_pool: GlooPool, way: str) -> None:
    first, second = gloo_pool.run(2, train_by_hand, way)
    table = first["table.weight" if way == "tie" else "embed.table.weight"]
    out = second["out.weight" if way == "tie" else "head.out.weight"]
    assert torch.equal(table, out)

    torch.manual_seed(2)
    embed, head = (Embed().double(), Head().double()) if way == "tie" else list(whole().values())[:2]  # type: ignore[operator]
    if way == "tie":
        torch.manual_seed(3)
        head = Head().double()
    head.out.weight = embed.table.weight
    optimizer = optimizer_of([*embed.parameters(), *head.middle.parameters()])
    for batch in batches():
        optimizer.zero_grad()
        for ids, labels in zip(batch["ids"].chunk(2), batch["labels"].chunk(2), strict=True):
            hidden = head.middle(embed(ids))
            (cross_entropy(head.out(torch.tanh(hidden)), labels) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(table, embed.table.weight.detach(), rtol=1e-9, atol=1e-11)


def tie_what_does_not_fit(names: list[tuple[int, str]]) -> str:
    rank = dist.get_rank()
    stage = PipelineStage(Embed() if rank == 0 else Head(), rank, 2, "cpu")
    schedule = Schedule.from_plan(_two(), stage, loss_fn=cross_entropy, ties=[tie(names)])
    with pytest.raises(PenstockError) as caught:
        schedule.step(batches()[0]["ids"], target=batches()[0]["labels"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("middle.weight", ("differ: float32[9, 4] on rank 0, float32[4, 4] on rank 1",) * 2),
        ("missing", ("has no parameter 'missing' to tie",) * 2),
    ],
)
def test_ties_that_do_not_fit_are_told_to_every_rank(gloo_pool: GlooPool, name: str, texts: tuple[str, str]) -> None:
    found = gloo_pool.run(2, tie_what_does_not_fit, [(0, "table.weight"), (1, name)])
    for text, given in zip(texts, found, strict=True):
        assert text in given


# -- inputs by name


def give_what_is_read(pipe: Pipe, batch: dict[str, Any]) -> tuple[str, list[float]]:
    rank = dist.get_rank()
    stage = pipe.build_stage(rank, "cpu")
    schedule = Schedule.from_plan(cases.plan_for("1f1b", 2), stage)
    own: list[dict[str, Any]] = [{"x": batch["x"]}, {}, {}, {"late": batch["late"]}]
    with pytest.raises(PenstockError) as caught:
        schedule.step(**own[rank] if rank < 3 else {"x": batch["x"]})
    losses: list[Tensor] = []
    schedule.step(**own[rank], losses=losses)
    return str(caught.value), [float(loss) for loss in losses]


def test_a_rank_that_lacks_an_input_says_which(gloo_pool: GlooPool) -> None:
    (batch,) = cases.make_batches("skips", (4,))
    found = gloo_pool.run(4, give_what_is_read, cases.captured("skips")[1], batch)
    for text, _ in found:
        assert "stage 3 reads late, and this rank's call does not give it" in text
    assert found[3][1] == pytest.approx([float(loss) for loss in cases.run_loop("skips", [batch], 2)[1][0]])


# -- data-parallel replicas of captured stages


def train_replicas(schedule: str, name: str, way: str, model: nn.Module, pipe: Pipe) -> list[str]:
    """Two pipelines of two ranks: what differs from one model over the data of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh.get_coordinate()
    plan = cases.plan_for(schedule, 3)
    stages = []
    for k in plan.placement.stages_of(rank):
        stage = pipe.build_stage(k, "cpu", group=mesh["pp"].get_group())
        if way == "ddp":
            stage.submod = DistributedDataParallel(stage.submod, process_group=mesh["dp"].get_group())
        else:
            fully_shard(stage.submod, mesh=mesh["dp"])
        stages.append(stage)
    run = Schedule.from_plan(plan, stages)
    data = cases.make_batches(name, (6, 6, 6, 6))
    for batch in data[2 * replica : 2 * replica + 2]:
        run.step(**batch)
    for batch in data:
        for m in range(3):
            part = {n: v.tensor_split(3)[m] for n, v in batch.items()}
            (cases.CASES[name].loss(model(**part)) / 6).backward()
    wrong = []
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for stage in stages:
        for key, parameter in stage.submod.named_parameters():
            grad = parameter.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            want = wanted[key.removeprefix("module.")].grad
            if grad is None or want is None or not torch.allclose(grad, want, rtol=1e-9, atol=1e-12):
                wrong.append(f"{key} of stage {stage.stage_index}: {grad} instead of {want}")
    return wrong


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("schedule", "name"), [("interleaved1f1b", "skips"), ("zbv", "skips"), ("interleaved1f1b", "tied")]
)
def test_replicas(gloo_pool: GlooPool, schedule: str, name: str, way: str) -> None:
    assert gloo_pool.run(4, train_replicas, schedule, name, way, *cases.captured(name)) == [[]] * 4
