"""What programs written for torch.distributed.pipelining ran into; each test tells the story of one such mistake."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.comm import LocalWorld, Transport
from penstock.compat._backward import stage_backward_input, stage_backward_weight
from penstock.compat._utils import _DTensorMeta, _StageMeta, extract_tensor_metas
from penstock.compat.microbatch import _CustomReducer
from penstock.compat.schedules import PipelineScheduleMulti, ScheduleGPipe
from penstock.compat.stage import PipelineStage
from penstock.schedules import get_schedule
from tests.gloo_pool import GlooPool


def test_weight_work_that_is_a_partial_gets_no_argument() -> None:
    """A stage tells its own weight work, a `functools.partial`, whether it is the last; a user's partial was told so too."""
    done: list[str] = []
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", dw_builder=lambda: partial(done.append, "weights"))
    stage.has_backward, stage.chunks = True, 1
    output: Any = stage.forward_one_chunk(0, (torch.ones(1, 2),))
    stage.backward_one_chunk(0, loss=output.sum(), full_backward=False)
    assert done == []
    stage.backward_weight_one_chunk(0)
    assert done == ["weights"]


class Twice(nn.Module):
    """Uses one layer before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(self.outer(x)))  # type: ignore[no-any-return]


def test_a_weight_that_is_used_twice_leaves_the_graph_of_others_alone() -> None:
    """Its gradient goes through the layer between its two uses, which freed what that layer's own weights still needed."""
    layer = Twice()
    plain, x = copy.deepcopy(layer), torch.randn(3, 4, requires_grad=True)
    plain(x.detach()).sum().backward()
    _, groups = stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
    stage_backward_weight(layer.parameters(), groups)
    for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Named(nn.Module):
    """Takes and returns a nest."""

    def forward(self, values: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
        return {"x": (values["x"] if isinstance(values, dict) else values) + 1}


def test_a_first_stage_that_returns_a_nest_may_be_validated() -> None:
    """What it returned was taken for a tensor where none was expected, and the second step failed."""

    def rank(transport: Transport) -> None:
        stage = PipelineStage(Named(), transport.rank, 2, "cpu", group=transport)
        stage._runtime_validate = True
        schedule = ScheduleGPipe(stage, 2)
        for _ in range(2):
            schedule.step(*((torch.zeros(4, 2),) if stage.is_first else ()))

    LocalWorld(2).run(rank)


def test_shapes_that_a_program_has_set_anew_are_the_ones_that_count() -> None:
    """Microbatches were held against the `input_args` that the stage was made with, unless the program had reset them to None."""

    def train(transport: Transport) -> None:
        stage = PipelineStage(nn.Linear(4, 4), transport.rank, 2, "cpu", input_args=torch.zeros(2, 4), group=transport)
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        stage._user_meta.inputs = extract_tensor_metas((torch.zeros(3, 4),))
        schedule.step(*([] if transport.rank else [torch.randn(6, 4)]), target=torch.randn(6, 4))
        assert all(parameter.grad is not None for parameter in stage.submod.parameters())

    LocalWorld(2).run(train)


def test_a_schedule_made_from_a_plan_tells_its_stages_where_the_others_are() -> None:
    """They thought that all stages were in a loop, until the first step."""

    def asked(transport: Transport) -> tuple[dict[int, int], list[bool]]:
        plan = get_schedule("zbv")(2, 4)
        mine = plan.placement.stages_of(transport.rank)
        stages = [PipelineStage(nn.Linear(4, 4), index, 4, "cpu", group=transport) for index in mine]
        PipelineScheduleMulti.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
        return stages[0].stage_index_to_group_rank, [stages[0]._is_same_rank(other) for other in range(4)]

    ranks = {0: 0, 1: 1, 2: 1, 3: 0}
    assert LocalWorld(2).run(asked) == [(ranks, [True, False, False, True]), (ranks, [False, True, True, False])]


def test_what_is_sent_by_hand_has_its_values_in_memory() -> None:
    """A conjugated tensor is a mark on memory that holds something else; its memory was handed to the sender."""
    transport = LocalWorld(2).transports[0]
    stage = PipelineStage(nn.Identity(), 0, 2, "cpu", group=transport)
    value = torch.tensor([1 + 2j])
    stage.act_send_info[0] = [1]
    stage.fwd_cache[0] = (value.conj(),), []
    (op,) = stage.get_fwd_send_ops(0)
    assert not op.tensor.is_conj()
    assert op.tensor.tolist() == [1 - 2j]


def describes_a_dtensor() -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    value = distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()]).requires_grad_()
    stage = PipelineStage(nn.Identity(), 0, 1, "cpu", get_mesh=lambda names, layout: mesh)
    stage._mesh_cache.update_from_tensors([value])
    stage._stage_meta = _StageMeta(outputs=(_DTensorMeta.from_dtensor(value),))
    told = stage._told(stage._describe())[0]
    return [meta.requires_grad for meta in told or () if meta is not None]


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_the_next_stage_hears_that_a_dtensor_requires_a_gradient(gloo_pool: GlooPool) -> None:
    """It heard the contrary, and sent zeros back as the gradient."""
    assert gloo_pool.run(1, describes_a_dtensor) == [[True]]


def test_outputs_may_be_merged_into_a_single_number() -> None:
    """The last stage looked for rows in it, to show what each microbatch gave, and the step failed."""
    stage = PipelineStage(nn.Identity(), 0, 1, "cpu")
    total = _CustomReducer(torch.tensor(0.0), lambda sum_of_rows, rows: sum_of_rows + rows.sum())
    merged = ScheduleGPipe(stage, 2, output_merge_spec=total).step(torch.ones(4, 3))
    assert merged == 12
    assert [list(part.shape) for part in stage.output_chunks] == [[2, 3]] * 2
