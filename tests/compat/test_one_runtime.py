"""What is around the actions of a step is the same for stages that a program drives by its own methods.

Ranks are threads, but for the failing rank, which is a process among processes.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.comm import LocalWorld, Transport
from penstock.compat.schedules import (
    FORWARD,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _PipelineContext,
)
from penstock.compat.stage import PipelineStage
from tests.gloo_pool import GlooPool

WIDTH, MICROBATCHES = 4, 4


class Driven(PipelineStage):
    """Overrides one method, which is enough."""

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, **options: Any) -> Any:
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, **options)


def driven_object(*args: Any, **options: Any) -> PipelineStage:
    """One method is set on the object."""

    def own(self: PipelineStage, *args: Any, **options: Any) -> Any:
        return PipelineStage.forward_one_chunk(self, *args, **options)

    stage = PipelineStage(*args, **options)
    stage.forward_one_chunk = types.MethodType(own, stage)  # type: ignore[method-assign]
    return stage


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH, dtype=torch.float64).unbind()
    return x, y


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize("kind", [Driven, driven_object])
def test_tied_parameters_have_one_gradient(kind: Any) -> None:
    """It is the sum over both holders, and the same on both."""
    x, y = batch()
    modules = layers(2)
    modules[1].load_state_dict(modules[0].state_dict())
    whole = nn.Sequential(modules[0], modules[0])
    nn.functional.mse_loss(whole(x), y).backward()
    (expected,) = (p.grad for name, p in modules[0].named_parameters() if name == "0.weight")
    modules[0].zero_grad()

    def rank(transport: Transport) -> Tensor | None:
        stage = kind(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        ties = [penstock.tie([(0, "0.weight"), (1, "0.weight")])]
        Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss(), ties=ties).step(x, target=y)
        return modules[transport.rank].get_parameter("0.weight").grad

    first, second = LocalWorld(2).run(rank)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("kind", [PipelineStage, Driven, driven_object])
def test_random_numbers_are_those_of_a_microbatch(kind: Any) -> None:
    """A stage alone draws what it draws under any schedule, whoever drives it."""
    x, _ = batch()
    stage = kind(nn.Dropout(), 0, 1, "cpu")
    schedule = Schedule1F1B(stage, MICROBATCHES, rng="per-microbatch", seed=7)
    with torch.no_grad():
        rows = []
        for microbatch, part in enumerate(x.chunk(MICROBATCHES)):
            with penstock.microbatch_rng(seed=7, stage=0, microbatch=microbatch, step=0):
                rows.append(nn.functional.dropout(part))
        before = torch.get_rng_state()
        assert torch.equal(schedule.step(x), torch.cat(rows))
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", [Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_what_was_measured_is_there(name: Any) -> None:
    x, y = batch()
    count = 2 if name is Schedule1F1B else 4
    modules = layers(count)

    def rank(transport: Transport) -> Any:
        kind = Driven if count == 2 else driven_object
        stages = [kind(modules[i], i, count, "cpu", group=transport) for i in range(transport.rank, count, 2)]
        schedule = name(stages[0] if count == 2 else stages, MICROBATCHES, loss_fn=nn.MSELoss())
        with schedule.record() as recording:
            schedule.step(x, target=y)
        return recording.timeline

    for timeline in LocalWorld(2).run(rank):
        forwards = [action for row in timeline.plan.codes for action in row if action & 31 == penstock.Op.F]
        assert len(forwards) == count * MICROBATCHES
        assert all(map(all, (map(float.__le__, *times) for times in zip(timeline.starts, timeline.ends, strict=True))))
        assert timeline.measured


def test_a_method_that_is_set_on_an_object_is_called() -> None:
    x, y = batch()
    modules = layers(4)
    called: list[tuple[int, str, bool]] = []

    def own(self: PipelineStage, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        called.append((self.stage_index, backward_type, last_backward))
        assert set(bwd_kwargs) <= {"stage_output", "output_grads", "input_values", "param_groups"}, (
            "torch's, and no other"
        )
        return PipelineStage.backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=last_backward)

    def rank(transport: Transport) -> None:
        stages = [PipelineStage(modules[i], i, 4, "cpu", group=transport) for i in (transport.rank, 3 - transport.rank)]
        schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=nn.MSELoss())
        if transport.rank == 0:
            for stage in stages:
                stage.backward_maybe_with_nosync = types.MethodType(own, stage)
        schedule.step(x, target=y)

    LocalWorld(2).run(rank)
    kinds = [kind for stage, kind, _ in called if stage == 3]
    assert kinds.count("input") == kinds.count("weight") > 0
    assert [stage for stage, _, last in called if last] == [3, 0]
    found = [gradients(module) for module in modules]
    for module in modules:
        module.zero_grad()
    nn.functional.mse_loss(nn.Sequential(*modules)(x), y).backward()
    for grads, module in zip(found, modules, strict=True):
        for grad, parameter in zip(grads, module.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


def test_shapes_that_change_are_learnt_again() -> None:
    """By themselves; and metadata that a program resets is not held against what comes then."""
    modules = layers(2)

    def rank(transport: Transport) -> list[int]:
        example = torch.zeros(2, WIDTH, dtype=torch.float64)
        found = []
        for kind in (Driven, PipelineStage):
            stage = kind(
                modules[transport.rank],
                transport.rank,
                2,
                "cpu",
                group=transport,
                input_args=example,
                output_args=example,
            )
            schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
            assert stage._user_meta.inputs is not None
            for rows in (8, 16, 8):
                x, y = batch(rows)
                out = schedule.step(x, target=y)
                found += [] if out is None else [len(out)]
                for meta in (stage._user_meta, stage._stage_meta):
                    meta.inputs = meta.outputs = meta.input_grads = meta.output_grads = None
                schedule._stage_forward_initialized = schedule._stage_backward_initialized = False
        return found

    assert LocalWorld(2).run(rank)[1] == [8, 16, 8] * 2


class Fragile(Driven):
    """Its forward fails where it is told to."""

    broken: tuple[int, int] | None = None  # the step and the microbatch
    step = 0

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, **options: Any) -> Any:
        if (self.step, fwd_chunk_id) == self.broken:
            raise LookupError("as it was told to")
        return PipelineStage.forward_one_chunk(self, fwd_chunk_id, args, kwargs, **options)


def fail_and_go_on(broken: int, step: int, name: str) -> tuple[list[str], list[Tensor | None]]:
    """Three steps, of which one fails on one rank; what each raised, and the gradients of the last one."""
    rank, x_y = dist.get_rank(), batch()
    several = name != "Schedule1F1B"
    count = 4 if several else 2
    mine = [rank, rank + 2] if several else [rank]
    modules = layers(count)
    stages: list[Any] = [(PipelineStage if several else Fragile)(modules[i], i, count, "cpu") for i in mine]
    if rank == broken:
        stages[0].broken = (step, 1)
        if several:  # on the object, and on this rank only
            stages[0].forward_one_chunk = types.MethodType(Fragile.forward_one_chunk, stages[0])
    kind = {"Schedule1F1B": Schedule1F1B, "ScheduleInterleaved1F1B": ScheduleInterleaved1F1B}[name]
    schedule = kind(stages if several else stages[0], MICROBATCHES, loss_fn=nn.MSELoss())
    raised = []
    for number in range(3):
        for stage in stages:
            stage.step = number
            stage.submod.zero_grad()
        try:
            schedule.step(x_y[0], target=x_y[1])
            raised.append("")
        except (LookupError, penstock.errors.PeerFailed) as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised, [grad for stage in stages for grad in gradients(stage.submod)]


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("broken", "step"), [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_a_rank_that_fails_is_heard_of_and_the_next_step_works(
    gloo_pool: GlooPool, name: str, broken: int, step: int
) -> None:
    """In the first step, in which shapes are learnt, and in a later one. No message of it is left for the next.

    Whether the method that fails is one of a class, or was set on an object.
    """
    results = gloo_pool.run(2, fail_and_go_on, broken, step, name)
    for rank, (raised, _) in enumerate(results):
        assert [bool(text) for text in raised] == [number == step for number in range(3)]
        if rank == broken:
            assert raised[step] == "LookupError: as it was told to"
        else:
            assert raised[step].startswith(f"PeerFailed: rank {broken} failed in action {broken}F1 (stage {broken}")
    count = 2 if name == "Schedule1F1B" else 4
    modules, (x, y) = layers(count), batch()
    nn.functional.mse_loss(nn.Sequential(*modules)(x), y).backward()
    for rank, (_, grads) in enumerate(results):
        expected = [p.grad for i in range(rank, count, 2) for p in modules[i].parameters()]
        for grad, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, wanted)


def test_inputs_that_are_wrong_on_one_rank_fail_the_step_on_all() -> None:
    """Before any message, in a step in which shapes are learnt."""
    modules = layers(2)
    x, y = batch()

    def rank(transport: Transport) -> list[str]:
        stage = Driven(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        raised = []
        for target in (None, y):
            try:
                schedule.step(x, target=target)
                raised.append("")
            except penstock.errors.RunError as error:
                raised.append(str(error))
        return raised

    first, second = LocalWorld(2).run(rank)
    assert "rank 1 failed: RunError" in first[0]
    assert "no target" in second[0]
    assert first[1] == second[1] == ""


def test_a_loop_of_the_users_own_that_fails_leaves_nothing_behind() -> None:
    from penstock.compat.schedules import PipelineScheduleSingle, _batch_p2p, _wait_batch_p2p

    class OwnLoop(PipelineScheduleSingle):
        broken = False

        def _step_microbatches(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None):  # type: ignore[no-untyped-def]
            stage, sends = self._stage, []
            self._initialize_stage(arg_mbs[0], kwarg_mbs[0])
            for microbatch in range(self._n_microbatches):
                _wait_batch_p2p(_batch_p2p(stage.get_fwd_recv_ops(microbatch)))
                if self.broken and microbatch == 2:
                    raise LookupError("in the user's loop")
                output = stage.forward_one_chunk(microbatch, arg_mbs[microbatch], kwarg_mbs[microbatch])
                self._maybe_compute_loss(stage, output, target_mbs, microbatch)
                sends += _batch_p2p(stage.get_fwd_send_ops(microbatch))
            for microbatch in range(self._n_microbatches):
                _wait_batch_p2p(_batch_p2p(stage.get_bwd_recv_ops(microbatch)))
                stage.backward_one_chunk(microbatch, loss=self._maybe_get_loss(stage, microbatch))
                sends += _batch_p2p(stage.get_bwd_send_ops(microbatch))
            _wait_batch_p2p(sends)
            self._update_losses(stage, losses)

    modules = layers(2)
    x, y = batch()

    def rank(transport: Transport) -> list[str]:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = OwnLoop(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        raised, losses = [], list[Tensor]()
        for number in range(3):
            modules[transport.rank].zero_grad()
            schedule.broken = number == 1 and transport.rank == 1
            try:
                schedule.step(x, target=y, losses=losses)
                raised.append("")
            except (LookupError, penstock.errors.PeerFailed) as error:
                raised.append(type(error).__name__)
        assert len(losses) == (MICROBATCHES if transport.rank == 1 else 0)
        return raised

    assert LocalWorld(2).run(rank) == [["", "PeerFailed", ""], ["", "LookupError", ""]]
    found = [gradients(module) for module in modules]
    for module in modules:
        module.zero_grad()
    nn.functional.mse_loss(nn.Sequential(*modules)(x), y).backward()
    for grads, module in zip(found, modules, strict=True):
        for grad, parameter in zip(grads, module.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


def test_a_function_of_the_users_that_fails_is_announced() -> None:
    modules = layers(2)
    x, y = batch()

    def own(action: _Action, ctx: _PipelineContext) -> None:
        raise LookupError(f"in {action}")

    def rank(transport: Transport) -> str:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        if transport.rank == 1:
            schedule.register_custom_function(FORWARD, own)
        with pytest.raises((LookupError, penstock.errors.PeerFailed)) as caught:
            schedule.step(x, target=y)
        return str(caught.value)

    first, second = LocalWorld(2).run(rank)
    assert second == "in 1F0"
    assert first.startswith("rank 1 failed in action 1F0")


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("function", [False, True])
def test_what_is_set_after_the_first_step_is_called(ranks: tuple[int, ...], function: bool) -> None:
    """If every rank has it. Otherwise the ranks are told that they differ, and none waits for the others."""
    modules = layers(2)
    x, y = batch()
    called: list[int] = []

    def own(action: _Action, ctx: _PipelineContext) -> None:
        stage, microbatch = ctx.schedule_ref._stage, action.microbatch_index
        called.append(stage.stage_index)
        if not stage.is_first:
            for work in ctx.schedule_ref.fwd_recv_ops.pop((stage.stage_index, microbatch)):
                work.wait()
        output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch])
        ctx.schedule_ref._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)

    def rank(transport: Transport) -> str:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        schedule.step(x, target=y)
        if transport.rank in ranks and function:
            schedule.register_custom_function(FORWARD, own)
        elif transport.rank in ranks:

            def forward(self: PipelineStage, *args: Any, **options: Any) -> Any:
                called.append(self.stage_index)
                return PipelineStage.forward_one_chunk(self, *args, **options)

            stage.forward_one_chunk = types.MethodType(forward, stage)  # type: ignore[method-assign]
        try:
            schedule.step(x, target=y)
        except (penstock.errors.PeerFailed, penstock.errors.RanksDisagree) as error:
            return str(error)
        return ""

    first, second = LocalWorld(2).run(rank)
    if len(ranks) == 2:
        assert first == second == ""
        assert sorted(called) == [0] * MICROBATCHES + [1] * MICROBATCHES
    else:
        assert "a training step with handlers of its own" in first
        assert "a training step with handlers of its own" in second
        assert not called


@pytest.mark.parametrize(
    "name",
    [
        "forward_one_chunk",
        "backward_maybe_with_nosync",
        "clear_runtime_states",
        "_retrieve_recv_grads",
        "_get_recv_ops",
    ],
)
@pytest.mark.parametrize("where", ["class", "object"])
def test_every_method_is_called_wherever_it_is_set(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the class that programs import, under a decorator that gives it the name and the module of the original."""
    modules = layers(2)
    x, y = batch()
    called: list[int] = []
    original = getattr(PipelineStage, name)

    @functools.wraps(original)
    def own(self: PipelineStage, *args: Any, **options: Any) -> Any:
        called.append(self.stage_index)
        return original(self, *args, **options)

    if where == "class":
        monkeypatch.setattr(PipelineStage, name, own)

    def rank(transport: Transport) -> None:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        if where == "object":
            setattr(stage, name, types.MethodType(own, stage))
        Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss()).step(x, target=y)

    LocalWorld(2).run(rank)
    assert called
    found = [gradients(module) for module in modules]
    for module in modules:
        module.zero_grad()
    nn.functional.mse_loss(nn.Sequential(*modules)(x), y).backward()
    for grads, module in zip(found, modules, strict=True):
        for grad, parameter in zip(grads, module.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


def test_what_a_schedule_does_with_losses_may_be_overridden() -> None:
    class Doubled(Schedule1F1B):
        def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
            loss = super()._maybe_get_loss(stage, mb_index)
            return None if loss is None else 2 * loss

    (module,), (x, y) = layers(1), batch()
    nn.functional.mse_loss(module(x), y).backward()
    expected = gradients(module)
    module.zero_grad()
    Doubled(PipelineStage(module, 0, 1, "cpu"), MICROBATCHES, loss_fn=nn.MSELoss()).step(x, target=y)
    for grad, wanted in zip(gradients(module), expected, strict=True):
        torch.testing.assert_close(grad, 2 * wanted)  # type: ignore[operator]
