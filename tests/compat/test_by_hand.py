"""Stages driven by hand: overridden methods, functions that move tensors themselves, loops of the user's own.

Ranks are threads here; `programs/` has the same over processes, side by side with torch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.comm import LocalWorld, Transport
from penstock.compat import pipe_split, pipeline
from penstock.compat._utils import PipeliningMetadataError, _StageMeta, _TensorMeta
from penstock.compat.schedules import (
    BACKWARD_WEIGHT,
    FORWARD,
    SEND_F,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _batch_p2p,
    _PipelineContext,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from penstock.compat.stage import PipelineStage, _PipelineStageBase, _RecvInfo

WIDTH, MICROBATCHES = 4, 4


def layers(count: int, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(dtype) for _ in range(count)]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH, dtype=torch.float64).unbind()
    return x, y


def plain(count: int, steps: int = 1, rows: int = 8) -> list[list[Tensor | None]]:
    """The gradients of the whole model in one process: of the mean loss over the batch, `steps` times."""
    modules = layers(count)
    x, y = batch(rows)
    for _ in range(steps):
        nn.functional.mse_loss(nn.Sequential(*modules)(x), y).backward()
    return [[p.grad for p in module.parameters()] for module in modules]


def same_gradients(modules: list[nn.Module], expected: list[list[Tensor | None]]) -> None:
    for module, grads in zip(modules, expected, strict=True):
        for parameter, grad in zip(module.parameters(), grads, strict=True):
            torch.testing.assert_close(parameter.grad, grad)


class Watched(PipelineStage):
    """Overrides one method, which is enough."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.forwards: list[int] = []

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, **options: Any) -> Any:
        self.forwards.append(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, **options)


@pytest.mark.parametrize(
    ("kind", "per_rank"),
    [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleavedZeroBubble, 2), (ScheduleZBVZeroBubble, 2)],
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_an_overridden_forward(kind: Any, per_rank: int, everywhere: bool) -> None:
    """Also if only one rank overrides it: the ranks ask one another, and all go the same way."""
    count = 2 * per_rank
    modules = layers(count)
    x, y = batch()

    def rank(transport: Transport) -> tuple[list[list[int]], Any]:
        mine = [
            i
            for i in range(count)
            if (i if i < 2 else 3 - i if kind is ScheduleZBVZeroBubble else i - 2) == transport.rank
        ]
        make = Watched if everywhere or transport.rank == 1 else PipelineStage
        stages = [make(modules[i], i, count, "cpu", group=transport) for i in mine]
        schedule = kind(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=nn.MSELoss())
        losses: list[Tensor] = []
        outputs = [schedule.step(x, target=y, losses=losses) for _ in range(2)]
        assert schedule.eval(x, target=y) is None or torch.equal(schedule._merge_outputs([outputs[0]]), outputs[0])
        return [getattr(stage, "forwards", []) for stage in stages], losses

    results = LocalWorld(2).run(rank)
    assert results[1][0][0] == [*range(MICROBATCHES)] * 3
    same_gradients(modules, plain(count, steps=2))


class Gaps(nn.Module):
    """Its output does not lie in memory without gaps."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, -x], -1)[..., 0]


def test_outputs_with_gaps_arrive() -> None:
    """The other end received into memory that had the same gaps, which no transport takes."""
    modules = [nn.Sequential(layers(1)[0], Gaps()), *layers(1)]
    x, y = batch()

    def rank(transport: Transport) -> None:
        stage = Watched(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss()).step(x, target=y)

    LocalWorld(2).run(rank)
    found = [[parameter.grad for parameter in module.parameters()] for module in modules]
    for module in modules:
        module.zero_grad()
    for one, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (nn.MSELoss()(modules[1](modules[0](one)), target) / MICROBATCHES).backward()
    same_gradients(modules, found)


def test_steps_accumulate_and_nobody_divides_twice() -> None:
    modules = layers(2)
    x, y = batch()

    def rank(transport: Transport) -> None:
        stage = Watched(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        for _ in range(3):
            schedule.step(x, target=y)

    LocalWorld(2).run(rank)
    same_gradients(modules, plain(2, steps=3))
    stage = PipelineStage(modules[0], 0, 1, "cpu")
    before = [p.grad.clone() for p in modules[0].parameters() if p.grad is not None]
    stage.scale_grads(4)
    for parameter, grad in zip(modules[0].parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, grad / 4)


class OwnDivision(PipelineStage):
    """Divides its gradients by itself, as torch's own method does."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        for parameter in self.submod.parameters():
            assert parameter.grad is not None
            parameter.grad /= grad_scale_factor


class AskedDivision(PipelineStage):
    """Leaves that to the class it is made from."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        super().scale_grads(grad_scale_factor)


class OwnReduction(PipelineStage):
    """Has nothing to reduce, and divides."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.scale_grads(grad_scale_factor)


class NoDivision(PipelineStage):
    """Wants the sum over the microbatches."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        pass


class OwnGradients(PipelineStage):
    """Keeps its gradients elsewhere: what parameters hold is of no concern to it."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        pass


def test_gradients_that_a_step_has_not_touched_are_left_alone() -> None:
    (module,) = layers(1)
    module[0].requires_grad_(False)  # type: ignore[index]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    x, y = batch()
    Schedule1F1B(OwnGradients(module, 0, 1, "cpu"), MICROBATCHES, loss_fn=nn.MSELoss()).step(x, target=y)
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert [bool((grad == 1).all()) for grad in grads] == [True, True, False, False]


@pytest.mark.parametrize("kind", [OwnDivision, AskedDivision, OwnReduction, NoDivision])
@pytest.mark.parametrize("several", [False, True])
def test_a_stage_that_divides_its_gradients_itself(kind: Any, several: bool) -> None:
    """It finds them undivided, as torch leaves them; the stages around it are right too, and so are those of other ranks."""
    count = 4 if several else 2
    modules = layers(count)
    x, y = batch()

    def rank(transport: Transport) -> None:
        kinds = {1: kind}
        stages = [
            kinds.get(i, PipelineStage)(modules[i], i, count, "cpu", group=transport)
            for i in range(transport.rank, count, 2)
        ]
        schedule: Any = (
            ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=nn.MSELoss())
            if several
            else Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.MSELoss())
        )
        schedule.step(x, target=y)

    LocalWorld(2).run(rank)
    expected = plain(count)
    if kind is NoDivision:
        expected[1] = [None if grad is None else grad * MICROBATCHES for grad in expected[1]]
    same_gradients(modules, expected)


def test_functions_for_kinds_of_action() -> None:
    modules = layers(2)
    x, y = batch()
    seen: list[str] = []

    def forward(action: _Action, ctx: _PipelineContext) -> None:
        schedule = ctx.schedule_ref
        (stage,) = schedule._stages
        microbatch = action.microbatch_index
        assert microbatch is not None
        if not stage.is_first:
            _wait_batch_p2p(schedule.fwd_recv_ops.pop((stage.stage_index, microbatch)))
        assert ctx.arg_mbs is not None
        assert ctx.kwarg_mbs is not None
        output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch])
        schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
        seen.append(str(action))

    def weights(action: _Action, ctx: _PipelineContext) -> None:
        ctx.schedule_ref._stages[0].backward_weight_one_chunk(action.microbatch_index)
        seen.append(str(action))

    def rank(transport: Transport) -> list[float]:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = _PipelineScheduleRuntime([stage], 2, loss_fn=nn.MSELoss())
        rows = ("0F0,0F1,0I0,0W0,0B1", "1F0,1I0,1F1,1I1,1W0,1W1")
        schedule._prepare_schedule_with_comms(
            {r: [_Action.from_str(c) for c in row.split(",")] for r, row in enumerate(rows)}
        )
        schedule.register_custom_function(FORWARD, forward)
        schedule.register_custom_function(computation_type=BACKWARD_WEIGHT, custom_function=weights)
        with pytest.raises(ValueError, match="SEND_F"):
            schedule.register_custom_function(SEND_F, forward)
        losses: list[Tensor] = []
        schedule.step(x, target=y, losses=losses)
        assert not schedule.fwd_recv_ops
        assert schedule._internal_losses == []
        return [float(loss) for loss in losses]

    results = LocalWorld(2).run(rank)
    assert sorted(seen) == ["0F0", "0F1", "0W0", "1F0", "1F1", "1W0", "1W1"]
    assert len(results[1]) == 2
    same_gradients(modules, plain(2))


class OwnLoop(PipelineScheduleSingle):
    """All forwards, then all backwards, posted by hand."""

    def _step_microbatches(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None):  # type: ignore[no-untyped-def]
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0])
        stage, sends = self._stage, []
        for microbatch in range(self._n_microbatches):
            _wait_batch_p2p(_batch_p2p(stage.get_fwd_recv_ops(microbatch)))
            output = stage.forward_one_chunk(microbatch, arg_mbs[microbatch], kwarg_mbs[microbatch])
            self._maybe_compute_loss(stage, output, target_mbs, microbatch)
            sends += _batch_p2p(stage.get_fwd_send_ops(microbatch))
        for microbatch in range(self._n_microbatches):
            _wait_batch_p2p(_batch_p2p(stage.get_bwd_recv_ops(microbatch)))
            stage.backward_one_chunk(microbatch, loss=self._maybe_get_loss(stage, microbatch))
            sends += _batch_p2p(stage.get_bwd_send_ops(microbatch))
        _wait_batch_p2p(sends)
        stage.scale_grads(self._n_microbatches)
        self._update_losses(stage, losses)


def test_a_loop_of_the_users_own() -> None:
    modules = layers(3)
    x, y = batch()

    def rank(transport: Transport) -> list[Tensor]:
        stage = PipelineStage(modules[transport.rank], transport.rank, 3, "cpu", group=transport)
        losses: list[Tensor] = []
        OwnLoop(stage, MICROBATCHES, loss_fn=nn.MSELoss()).step(x, target=y, losses=losses)
        return losses

    assert len(LocalWorld(3).run(rank)[2]) == MICROBATCHES
    same_gradients(modules, plain(3))


def test_orders_that_subclasses_fill() -> None:
    class ByMethod(PipelineScheduleSingle):
        def _get_pipeline_order(self) -> Any:
            rows = ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")
            return {rank: [_Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}

    class RankByRank(PipelineScheduleMulti):
        def __init__(self, stages: Any, n_microbatches: int, **options: Any) -> None:
            super().__init__(stages, n_microbatches, **options)
            self.pipeline_order = {}
            for rank in range(2):
                self.pipeline_order[rank] = [_Action(rank, FORWARD, m) for m in range(n_microbatches)]
                self.pipeline_order[rank] += [_Action.from_str(f"{rank}B{m}") for m in range(n_microbatches)]

    x, y = batch()
    for kind in (ByMethod, RankByRank):
        modules = layers(2)

        def rank(transport: Transport, kind: Any = kind, modules: Any = modules) -> list[str]:
            stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
            schedule = kind(stage if kind is ByMethod else [stage], 2, loss_fn=nn.MSELoss())
            schedule.step(x, target=y)
            return [str(action) for action in schedule.pipeline_order[transport.rank]]

        assert LocalWorld(2).run(rank)[1] == ["1F0", *(("1B0", "1F1") if kind is ByMethod else ("1F1", "1B0")), "1B1"]
        same_gradients(modules, plain(2))


class Reversed(ScheduleInterleaved1F1B):
    """The order of a schedule of torch's, with the weights' part after the inputs' part of each backward."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        row: list[_Action | None] = []
        for action in super()._calculate_single_rank_operations(rank):
            whole = action is not None and str(action.computation_type) == "B"
            row += [_Action.from_str(str(action).replace("B", part)) for part in "IW"] if whole else [action]
        return row


class Asked(Schedule1F1B):
    def _get_pipeline_order(self) -> Any:
        order = super()._get_pipeline_order()
        assert order is not None
        return {rank: list(row) for rank, row in order.items()}


def test_orders_that_subclasses_make_from_those_of_their_class() -> None:
    modules = layers(4)
    x, y = batch()

    def rank(transport: Transport) -> list[str]:
        stages = [PipelineStage(modules[i], i, 4, "cpu", group=transport) for i in (transport.rank, transport.rank + 2)]
        schedule = Reversed(stages, MICROBATCHES, nn.MSELoss(), None, None, None, True)
        schedule.step(x, target=y)
        return [str(action) for action in schedule.pipeline_order[transport.rank]]

    first, second = LocalWorld(2).run(rank)
    same_gradients(modules, plain(4))
    assert "0I0" in first
    assert "0B0" not in first
    assert "3W0" in second
    own = Schedule1F1B(PipelineStage(modules[0], 0, 1, "cpu"), MICROBATCHES).pipeline_order
    assert Asked(PipelineStage(modules[0], 0, 1, "cpu"), MICROBATCHES).pipeline_order == own


@pytest.mark.parametrize("kind", [PipelineStage, Watched])
@pytest.mark.parametrize("number", [2, 8])
def test_another_number_of_microbatches_between_steps(kind: Any, number: int) -> None:
    """The batch was cut into the new number, of which the first ones ran: the rest of the batch was left out."""
    modules = layers(4)
    x, y = batch()

    def rank(transport: Transport) -> list[int]:
        stages = [kind(modules[i], i, 4, "cpu", group=transport) for i in (transport.rank, transport.rank + 2)]
        schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.MSELoss())
        losses: list[Tensor] = []
        found = []
        for count in (MICROBATCHES, number, MICROBATCHES):
            schedule._n_microbatches = count
            schedule.step(x, target=y, losses=losses)
            found.append(len(losses))
        return found

    assert LocalWorld(2).run(rank)[1] == [MICROBATCHES, number, MICROBATCHES]
    same_gradients(modules, plain(4, steps=3))


def test_specs_that_are_set_after_a_schedule_is_made() -> None:
    from penstock.compat.microbatch import TensorChunkSpec

    stage = PipelineStage(nn.Identity(), 0, 1, "cpu")
    schedule: Any = ScheduleGPipe(stage, 2)
    assert schedule._args_chunk_spec is schedule._output_merge_spec is None
    schedule._args_chunk_spec, schedule._output_merge_spec = (TensorChunkSpec(1),), TensorChunkSpec(1)
    x = torch.arange(8.0).view(2, 4)
    assert torch.equal(schedule.step(x), x)
    assert [list(part.shape) for part in stage.output_chunks] == [[2, 2]] * 2


def test_what_programs_set_between_steps_holds() -> None:
    """`stage.submod`, `_loss_fn` and the order may be changed; a backward may be left out."""
    modules, others = layers(2), layers(2)
    x, y = batch()

    def rank(transport: Transport) -> tuple[float, float]:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, 2, loss_fn=nn.MSELoss())
        losses: list[Tensor] = []
        schedule.step(x, target=y, losses=losses)
        first = float(sum(losses))
        stage.submod = others[transport.rank]
        schedule._loss_fn = nn.MSELoss(reduction="sum")
        schedule.step(x, target=y, losses=losses)
        schedule._has_backward = False
        schedule.step(x, target=y)
        schedule._has_backward = True
        rows = (["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"])
        schedule.pipeline_order = {r: [_Action.from_str(cell) for cell in row] for r, row in enumerate(rows)}
        schedule.step(x, target=y)
        return first, float(sum(losses))

    first, second = LocalWorld(2).run(rank)[1]
    assert second == pytest.approx(first * 4 * WIDTH)
    same_gradients(modules, plain(2))
    expected = [[None if g is None else g * 2 * 8 * WIDTH / 2 for g in grads] for grads in plain(2)]
    same_gradients(others, expected)


@pytest.mark.parametrize("kind", [PipelineStage, Watched])
def test_stages_learn_their_shapes_before_a_step(kind: type[PipelineStage]) -> None:
    """Programs trace the stages then, from what is known of their inputs and of the gradients of their outputs."""
    modules = layers(4)
    x, y = batch()

    def rank(transport: Transport) -> list[list[int]]:
        indices = (transport.rank, transport.rank + 2)
        stages = [kind(modules[index], index, 4, "cpu", group=transport) for index in indices]
        schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.MSELoss())
        for rows in (2, 3, 2):
            arguments = (torch.zeros(rows, WIDTH, dtype=torch.float64),) if transport.rank == 0 else ()
            schedule._initialize_stages(arguments, {}, torch.zeros(rows, WIDTH, dtype=torch.float64))
            assert all(parameter.grad is None for stage in stages for parameter in stage.submod.parameters())
            metas = [
                m
                for stage in stages
                for m in (*(stage._stage_meta.inputs or ()), *(stage._stage_meta.output_grads or ()))
            ]
            assert [list(stages[1]._to_tensor(meta).shape) for meta in metas] == [[rows, WIDTH]] * 4
        schedule.step(x, target=y)
        return [list(stage.get_outputs_meta()[0].shape) for stage in stages]

    assert LocalWorld(2).run(rank) == [[[2, WIDTH]] * 2] * 2
    same_gradients(modules, plain(4))


def test_given_shapes_that_say_nothing_of_gradients() -> None:
    """`torch.empty(..., device="meta")`, as programs write it: whether there is a gradient is found out."""
    modules = layers(3)
    modules[0].requires_grad_(False)
    x, y = batch()
    shape = (torch.empty(8 // MICROBATCHES, WIDTH, dtype=torch.float64, device="meta"),)

    def rank(transport: Transport) -> list[tuple[bool, ...]]:
        index = transport.rank
        stage = PipelineStage(modules[index], index, 3, "cpu", input_args=shape, output_args=shape, group=transport)
        calls: list[str] = []
        own = stage.backward_maybe_with_nosync

        def mine(kind: str, request: dict[str, Any], last_backward: bool = False) -> Any:
            calls.append(kind)
            return own(kind, request, last_backward=last_backward)

        stage.backward_maybe_with_nosync = mine  # type: ignore[method-assign]
        Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss()).step(x, target=y)
        assert len(calls) == MICROBATCHES
        grads = stage._stage_meta.input_grads or (), stage._stage_meta.output_grads or ()
        return [tuple(meta is not None for meta in metas) for metas in grads]

    assert LocalWorld(3).run(rank) == [[(False,), (False,)], [(False,), (True,)], [(True,), (True,)]]
    same_gradients(modules[1:], plain(3)[1:])


def test_metadata_can_be_read_after_a_step_and_reset() -> None:
    stage = PipelineStage(nn.Linear(WIDTH, 2), 0, 1, "cpu")
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.MSELoss())
    for length in (3, 5):
        for metas in (stage._user_meta, stage._stage_meta):
            metas.inputs = metas.outputs = metas.input_grads = metas.output_grads = None
        schedule.step(torch.randn(4, length, WIDTH), target=torch.zeros(4, length, 2))
        assert stage._stage_meta.inputs is not None
        assert list(stage._stage_meta.inputs[0].shape) == [2, length, WIDTH]  # type: ignore[union-attr]
        assert [list(tensor.shape) for tensor in stage.get_outputs_meta()] == [[2, length, 2]]


def test_outputs_without_strides_have_no_metadata() -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    stage = PipelineStage(Sparse(), 0, 1, "cpu")
    assert torch.equal(ScheduleGPipe(stage, 2).step(torch.eye(4)).to_dense(), torch.eye(4))
    assert stage._stage_meta.outputs == (None,)


def test_a_captured_stage_is_driven_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers(2)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            x = self.first(x)
            pipe_split()
            return self.second(x) * scale

    model = Model()
    x, y = batch()
    scale = torch.ones(8, 1, dtype=torch.float64)
    pipe = pipeline(copy.deepcopy(model), (x[:2], scale[:2]))
    counted: list[int] = []

    def forward(action: _Action, ctx: _PipelineContext) -> None:
        schedule, microbatch = ctx.schedule_ref, action.microbatch_index
        (stage,) = schedule._stages
        assert microbatch is not None
        assert ctx.arg_mbs is not None
        if not stage.is_first:
            _wait_batch_p2p(schedule.fwd_recv_ops.pop((stage.stage_index, microbatch)))
        output = stage.forward_one_chunk(microbatch, ctx.arg_mbs[microbatch], {})
        schedule._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
        counted.append(microbatch)

    def rank(transport: Transport) -> None:
        stage = pipe.build_stage(transport.rank, "cpu", transport)
        assert stage.get_stage_index_of_submod("submod_pp_1") == 1
        assert stage.find_dst_rank("submod_pp_0") == 0
        assert stage._get_output_node().op == "output"
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        schedule.register_custom_function(FORWARD, forward)
        schedule.step(*((x, scale) if stage.is_first else ()), target=y)

    LocalWorld(2).run(rank)
    assert len(counted) == 2 * MICROBATCHES
    nn.functional.mse_loss(model(x, scale), y).backward()
    grads = {name: p.grad for k in range(2) for name, p in pipe.get_stage_module(k).named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


@pytest.mark.parametrize("kind", [PipelineStage, Watched])
def test_wrong_shapes_are_found_before_anything_is_sent(kind: type[PipelineStage]) -> None:
    modules = layers(2)
    x, _ = batch()

    def rank(transport: Transport) -> None:
        stage = kind(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        stage._runtime_validate = True
        schedule = ScheduleGPipe(stage, 2)
        schedule.step(x)
        if transport.rank == 0:  # alone: nobody else takes part in a step that fails at its first action
            with pytest.raises(PipeliningMetadataError, match="shape mismatch"):
                schedule.step(x[:2])
            with pytest.raises(PipeliningMetadataError, match="dtype mismatch"):
                schedule.step(x.float())
            handle = modules[0].register_forward_hook(lambda *_: torch.zeros(3))
            with pytest.raises(PipeliningMetadataError, match="shape mismatch"):
                schedule.step(x)
            handle.remove()
        schedule.step(x)  # and the next one works

    LocalWorld(2).run(rank)


@pytest.mark.parametrize("validating", [0, 1])
def test_one_rank_alone_checks_its_tensors(validating: int) -> None:
    """Also if it begins after steps without: the other ranks need not know."""
    modules = layers(3)
    x, y = batch()

    def rank(transport: Transport) -> None:
        stage = PipelineStage(modules[transport.rank], transport.rank, 3, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        args = (x,) if stage.is_first else ()
        schedule.step(*args, target=y)
        stage._runtime_validate = transport.rank == validating
        schedule.step(*args, target=y)
        handle = stage.submod.register_forward_hook(lambda _, __, output: output[:, :2])
        if transport.rank != validating:
            handle.remove()
        if validating == 0 and transport.rank == 0:
            with pytest.raises(PipeliningMetadataError, match="shape mismatch"):
                schedule.step(*args, target=y)
        elif validating == 1:
            with pytest.raises(Exception, match="shape mismatch"):
                schedule.step(*args, target=y)
        handle.remove()
        schedule.step(*args, target=y)

    LocalWorld(3).run(rank)
    same_gradients(modules, plain(3, steps=3))


def test_one_stage_alone_forward_and_backward_in_parts() -> None:
    """As a program that has no schedule drives it; the weight work really waits."""
    (module,) = layers(1)
    x, y = batch()
    leaf = x.clone().requires_grad_()
    stage = PipelineStage(module, 0, 1, "cpu")
    stage.has_backward = True
    stage.chunks = 1
    for full in (True, False):
        module.zero_grad()
        output = stage.forward_one_chunk(0, (leaf,))
        stage.backward_one_chunk(0, loss=nn.functional.mse_loss(output, y), full_backward=full)
        if not full:
            assert module[0].weight.grad is None
            stage.backward_weight_one_chunk(0)
            with pytest.raises(AssertionError, match="backward_one_chunk"):
                stage.backward_weight_one_chunk(0)
        same_gradients([module], plain(1))
    stage.clear_runtime_states()
    assert not stage.output_chunks
    with pytest.raises(RuntimeError, match="microbatch 3"):
        stage._check_chunk_id(3)


def test_shapes_are_learnt_and_the_model_stays_as_it_was() -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return nn.functional.dropout(self.linear(x)), x.argmax(1)

    module = Random()
    state = torch.get_rng_state()
    stage = PipelineStage(module, 0, 1, "cpu")
    stage._prepare_forward_infra(2, (torch.zeros(2, WIDTH),))
    assert [tuple(t.shape) for t in stage.get_outputs_meta()] == [(2, 3), (2,)]
    assert [t.requires_grad for t in stage.get_outputs_meta()] == [True, False]
    assert torch.equal(torch.get_rng_state(), state)
    assert module.calls == 0


def test_mock_stages_are_enough_for_an_order() -> None:
    class Mock(_PipelineStageBase):
        def __init__(self, ranks: int, stages: int) -> None:
            self.submod = None
            self.group = None
            self.num_stages, self.group_size, self.group_rank = stages, ranks, 0

    schedule = ScheduleInterleaved1F1B([Mock(2, 4), Mock(2, 4)], 4)
    assert [str(action) for action in schedule.pipeline_order[1][:4]] == ["1F0", "1F1", "3F0", "3B0"]
    assert {str(a) for a in schedule.pipeline_order_with_comms[0]} >= {"0UNSHARD", "2RECV_F0", "0REDUCE_GRAD"}
    assert max(map(len, schedule._simulate().values())) > 20
    with pytest.raises(ValueError, match="stages a rank"):
        ScheduleZBVZeroBubble([Mock(2, 6)] * 3, 4)


class Bare(_PipelineStageBase):
    """A stage that says itself what it receives: rows of the same width everywhere."""

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> Any:
        rows = torch.zeros(2, WIDTH, dtype=torch.float64, requires_grad=True)
        meta = (_TensorMeta.from_tensor(rows),)
        self.chunks, self._stage_meta = num_microbatches, _StageMeta(inputs=meta, outputs=meta)
        for microbatch in range(num_microbatches):
            come = () if self.is_first else (_RecvInfo("x", self.stage_index - 1, None, meta[0]),)
            self.args_recv_info[microbatch] = come
        self.act_send_info[0] = [None if self.is_last else self.stage_index + 1]

    def _prepare_backward_infra(self, num_microbatches: int, **_: Any) -> Any:
        for microbatch in range(num_microbatches):
            self.grad_recv_info[microbatch] = self._create_grad_recv_info(self.act_send_info)


def test_a_stage_straight_from_the_base() -> None:
    modules = layers(2)
    x, y = batch()

    def rank(transport: Transport) -> None:
        stage = Bare(modules[transport.rank], transport.rank, 2, torch.device("cpu"), transport)
        Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss()).step(x, target=y)

    LocalWorld(2).run(rank)
    same_gradients(modules, plain(2))
    with pytest.raises(ValueError, match="stage_index=2"):
        Bare(modules[0], 2, 2, "cpu")


def test_microbatches_that_are_cut_already() -> None:
    modules = layers(2)
    x, y = batch()

    def rank(transport: Transport) -> list[Tensor]:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, 2, loss_fn=nn.MSELoss())
        losses: list[Tensor] = []
        args = [(part,) for part in x.chunk(2)] if transport.rank == 0 else None
        schedule._step_microbatches(args, target_mbs=list(y.chunk(2)), losses=losses)
        with pytest.raises(TypeError, match="arg_mbs"):
            schedule._check_inputs((x,))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="2 target_mbs"):
            schedule._check_inputs(target_mbs=[y])
        assert len(stage.output_chunks) == (2 if stage.is_last else 0)
        return losses

    assert len(LocalWorld(2).run(rank)[1]) == 2
    same_gradients(modules, plain(2))


def test_a_row_for_each_microbatch_is_split_and_said() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            assert scale.shape == (1, 1)
            return x * scale

    schedule = ScheduleGPipe(PipelineStage(Scaled(), 0, 1, "cpu"), 4)
    with pytest.warns(UserWarning, match="one for each microbatch"):
        out = schedule.step(torch.ones(8, 2), scale=torch.arange(4.0).unsqueeze(1))
    assert out[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_outputs_of_the_step_before_are_gone_when_a_step_runs() -> None:
    """They can be read from the last stage until then; two batches of outputs are never alive at a time."""
    modules = layers(2)
    x, y = batch()
    found: list[int] = []

    def rank(transport: Transport) -> None:
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        schedule.step(x, target=y)
        assert len(stage.output_chunks) == (MICROBATCHES if stage.is_last else 0)
        modules[transport.rank].register_forward_pre_hook(lambda *_: found.append(len(stage.output_chunks)))
        schedule.step(x, target=y, return_outputs=False)
        assert stage.output_chunks == []

    LocalWorld(2).run(rank)
    assert found == [0] * 2 * MICROBATCHES
