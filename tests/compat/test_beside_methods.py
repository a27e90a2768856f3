"""What programs put around the parts of a stage's preparation, set on objects without a constructor, or read of a graph."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.comm import LocalWorld, Transport
from penstock.compat import pipe_split, pipeline
from penstock.compat.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from penstock.compat.stage import PipelineStage
from penstock.plan import Plan

WIDTH, MICROBATCHES = 4, 6


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, dtype=torch.float64).unbind()
    return x, y


def same_as_plain(modules: list[nn.Module], steps: int) -> None:
    plain = layers(len(modules))
    x, y = batch()
    for _ in range(steps):
        nn.functional.mse_loss(nn.Sequential(*plain)(x), y).backward()
    for module, expected in zip(modules, plain, strict=True):
        for parameter, other in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


class Ring(PipelineStage):
    """Lets the microbatches share a few receives, as programs do that find one for each too many."""

    size = 4

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(min(self.size, num_microbatches), has_backward)
        for microbatch in range(self.size, num_microbatches):
            self.args_recv_info[microbatch] = self.args_recv_info[microbatch % self.size]

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(min(self.size, num_microbatches))
        self.chunks = num_microbatches
        for microbatch in range(self.size, num_microbatches):
            self.grad_recv_info[microbatch] = self.grad_recv_info[microbatch % self.size]


def test_microbatches_may_share_what_they_arrive_in() -> None:
    modules = layers(3)
    x, y = batch()

    def rank(transport: Transport) -> Any:
        stage = Ring(modules[transport.rank], transport.rank, 3, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        for _ in range(2):
            schedule.step(x, target=y)
        infos = stage.args_recv_info, stage.grad_recv_info
        return [(len(found), len({id(one) for one in found.values()})) for found in infos]

    shared = (MICROBATCHES, Ring.size)
    nothing = (MICROBATCHES, 1)  # the last stage gets no gradients: there is one empty tuple
    assert LocalWorld(3).run(rank) == [[shared, shared], [shared, shared], [shared, nothing]]
    same_as_plain(modules, 2)


class Around(PipelineStage):
    """Notes when shapes are found, and calls the module in a way of its own for that."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.noted: list[str] = []

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:  # so that shapes are asked for at all
        return super().forward_one_chunk(*args, **options)

    def _forward_metadata_inference(self, args: Any, kwargs: Any = None, has_backward: bool = False) -> Any:
        self.noted.append("forward")
        return super()._forward_metadata_inference(args, kwargs, has_backward)

    def _backward_metadata_inference(self, *args: Any, **options: Any) -> Any:
        self.noted.append("backward")
        return super()._backward_metadata_inference(*args, **options)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        self.noted.append("outputs")
        return super()._compute_outputs(*args, module=module, **kwargs)


def test_shapes_are_found_through_methods_that_a_program_may_put_something_around() -> None:
    modules = layers(2)
    x, y = batch()

    def rank(transport: Transport) -> list[str]:
        stage = Around(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        for _ in range(2):
            schedule.step(x, target=y)
        return stage.noted

    assert LocalWorld(2).run(rank) == [["forward", "outputs", "backward"]] * 2
    same_as_plain(modules, 2)


def test_a_plan_takes_the_place_of_an_order() -> None:
    """An order that a program has set must not come back, nor one that a subclass makes."""
    modules = layers(2)
    x, y = batch()

    class Own(ScheduleGPipe):
        def _get_pipeline_order(self) -> Any:
            return super()._get_pipeline_order()

    def rank(transport: Transport) -> list[Any]:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        found = []
        for schedule in (ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.MSELoss()), Own(stage, 6, loss_fn=nn.MSELoss())):
            schedule.pipeline_order = dict(schedule.pipeline_order)
            schedule.step(x, target=y)
            before = schedule.plan
            other = penstock.schedules.get_schedule("1f1b")(2, MICROBATCHES)
            schedule.run_plan(other)
            schedule.step(x, target=y)
            shown = [str(action) for action in schedule.pipeline_order[0]]
            found.append((before.codes[0] != other.codes[0], schedule.plan.codes == other.codes, shown == texts(other)))
        return found

    assert LocalWorld(2).run(rank) == [[(True, True, True)] * 2] * 2
    same_as_plain(modules, 4)


def texts(plan: Plan) -> list[str]:
    return [str(action) for action in plan.actions(0)]


@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
def test_an_order_of_sizes_without_stages(kind: Any) -> None:
    """Programs that look for idle time make the object without its constructor and set sizes on it."""
    assert not hasattr(kind, "num_microbatches")  # by this torch's tests tell classes that want a number of their own
    bare = kind.__new__(kind)
    bare.pp_group_size, bare.n_local_stages, bare._n_microbatches = 4, 2, 8
    bare.number_of_rounds = 2
    bare.microbatches_per_round = 4
    stage = PipelineStage(nn.Linear(1, 1), 0, 1, "cpu", group=LocalWorld(1).transports[0])
    made = kind([stage], 8)
    assert (made.number_of_rounds, made.microbatches_per_round, made.n_local_stages) == (8, 1, 1)
    plan = penstock.schedules.get_schedule(kind.recipe)(4, 8, stages_per_rank=2)
    for rank in range(4):
        ours = [str(action) for action in bare._calculate_single_rank_operations(rank) if action is not None]
        assert ours == [str(action) for action in plan.actions(rank)]


class Skips(nn.Module):
    """The first stage's output is read by the second, the third and the last; that of the second by the last too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = layers(4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        pipe_split()
        b = self.b(a)
        pipe_split()
        c = self.c(b) * a
        pipe_split()
        return self.d(c) + a * 2 + b


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_what_skips_stages_is_sent_by_hand_too(kind: Any) -> None:
    x, y = batch()
    pipe, plain = pipeline(Skips(), (x[:2],)), Skips()

    def rank(transport: Transport) -> list[str]:
        stage = pipe.build_stage(transport.rank, "cpu", transport)
        stage.forward_one_chunk = stage.forward_one_chunk  # set on the object: a program may have put its own there
        schedule = kind(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        for _ in range(2):
            schedule.step(*(() if transport.rank else (x,)), target=y)
        return sorted({str(info.source) for info in stage.args_recv_info[0] if info.source is not None})

    assert LocalWorld(4).run(rank) == [[], ["0"], ["0", "1"], ["0", "1", "2"]]
    for _ in range(2):
        nn.functional.mse_loss(plain(x), y).backward()
    grads = {name: p.grad for k in range(4) for name, p in pipe.get_stage_module(k).named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_the_graph_of_the_stages() -> None:
    x, _ = batch()
    pipe, plain = pipeline(Skips(), (x[:2],)), Skips()
    graph = pipe.info().graph
    assert [node.name for node in graph.nodes if node.op == "call_module"] == [f"submod_pp_{k}" for k in range(4)]
    assert not pipe.info().has_loss_and_backward
    assert pipe.replicated_params == []
    assert {node.target for node in graph.nodes if node.op == "call_function"} <= {operator.getitem}
    torch.testing.assert_close(pipe.split_gm(x)[0], plain(x))
    stage = pipe.build_stage(3, "cpu", LocalWorld(4).transports[3])
    assert stage.node.target == stage.name == "submod_pp_3"
    assert len(stage.node.args) == 3
    assert stage.submod_to_stage_index["submod_pp_2"] == 2


class PassesOn(nn.Module):
    """Returns beside its result what an earlier stage has made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layers(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.a(x)
        pipe_split()
        return self.b(a), a


def test_a_last_stage_that_passes_a_value_on_compiles_as_one_graph() -> None:
    x, _ = batch()
    pipe, plain = pipeline(PassesOn(), (x[:2],)), PassesOn()
    first, last = pipe.get_stage_module(0), pipe.get_stage_module(1)
    compiled = torch.compile(last, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(first(x).detach()), plain(x)[0])
    whole = pipe.split_gm(x)
    torch.testing.assert_close(tuple(whole), plain(x))
