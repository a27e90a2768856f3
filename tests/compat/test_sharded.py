"""Orders that say themselves when the parameters of a sharded stage are gathered and freed."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.compat.schedules import Schedule1F1B, _Action, _PipelineScheduleRuntime
from penstock.compat.stage import PipelineStage
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]
WIDTH = 8


ORDERS = {"0UNSHARD 0F0 0RESHARD": 0, "0UNSHARD 0F0": 6, "0UNSHARD 0F0 0REDUCE_GRAD": 0}  # and what is then gathered


def gathered_after_each(dtype: torch.dtype) -> list[tuple[str, bool, int, int]]:
    """For each order, how many parameters there are and how many of them are gathered when two steps are over."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    found = []
    for by_hand in (False, True):
        stage = PipelineStage(model, 0, 1, "cpu", group=mesh.get_group("pp"))
        if by_hand:
            stage.clear_runtime_states = stage.clear_runtime_states  # type: ignore[method-assign]  # of the program's own
        schedule = _PipelineScheduleRuntime([stage], n_microbatches=1, loss_fn=None, scale_grads=False)
        for order in ORDERS:
            schedule.pipeline_order_with_comms = {0: [_Action.from_str(cell) for cell in order.split()]}
            for _ in range(2):
                schedule.step(torch.randn(2, WIDTH, dtype=dtype))
            states = fully_shard.state(model)._state_ctx.all_states  # type: ignore[attr-defined]
            parameters = [p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params]
            gathered = sum(p.sharded_state == ShardedState.UNSHARDED for p in parameters)
            found.append((order, by_hand, len(parameters), gathered))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_left_as_the_order_says(gloo_pool: GlooPool, dtype: torch.dtype) -> None:
    """The reduction of gradients ends with freeing what is gathered, as it does in a backward without a pipeline."""
    expected = [(order, by_hand, 6, gathered) for by_hand in (False, True) for order, gathered in ORDERS.items()]
    assert gloo_pool.run(2, gathered_after_each, dtype) == [expected] * 2


def own_division(self: PipelineStage, grad_scale_factor: int) -> None:
    for parameter in self.submod.parameters():
        assert parameter.grad is not None
        parameter.grad /= grad_scale_factor


def gradients_after_own_division(wrapper: str) -> bool:
    """Whether they are those of the mean over all microbatches of both replicas."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    plain = copy.deepcopy(model)
    x, y = torch.randn(2, dist.get_world_size(), 8, WIDTH)
    nn.functional.mse_loss(plain(x), y).backward()
    for module in (*model, model):
        (fully_shard if wrapper == "fully_shard" else replicate)(module, mesh=mesh["dp"])
    stage = PipelineStage(model, 0, 1, "cpu", group=mesh.get_group("pp"))
    stage.scale_grads = types.MethodType(own_division, stage)  # type: ignore[method-assign]
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    schedule.step(x[dist.get_rank()], target=y[dist.get_rank()])
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6) for p, q in pairs)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("wrapper", ["fully_shard", "replicate"])
def test_a_stage_that_divides_its_own_gradients_finds_them(gloo_pool: GlooPool, wrapper: str) -> None:
    """They are of the parameters that the optimizer sees, which a stage has only when its parameters are sharded again."""
    assert gloo_pool.run(2, gradients_after_own_division, wrapper) == [True] * 2
