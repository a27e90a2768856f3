"""The user's own function for a kind of action: it gets what it needs, and messages go on, cold and warm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Op, Schedule
from penstock.errors import PeerFailed
from penstock.plan import Action, AnyAction, Overlap
from penstock.run import ActionContext
from penstock.run.program import parts_of
from tests.run.pipes import batch, close, grads_of, loop_grads, make_modules, on_ranks

X, Y = batch(12)


@pytest.mark.parametrize("op", [Op.F, Op.I, Op.W, Op.B, Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B, Overlap])
def test_every_kind_of_action_can_be_done_by_the_user(op: Any) -> None:
    """The function sees each action of its kind once a step, in cold steps and in warm ones."""
    modules = make_modules(4)
    seen: list[tuple[int, bool, AnyAction]] = []

    def rank(schedule: Schedule, rank: int) -> None:
        def own(action: AnyAction, context: ActionContext) -> None:
            seen.append((rank, context.cold, action))
            context.run(action)

        schedule.register_custom_function(op, own)
        for _ in range(2):
            for index in schedule.placement.stages_of(rank):
                modules[index].zero_grad()
            schedule.step(X, target=Y)
        actions = schedule.lowered_plan().actions(rank)
        kinds = [Overlap for action in actions if isinstance(action, Overlap)]
        kinds += [part.op for action in actions for part in parts_of(action)]  # those in a pair are done one by one
        mine = [cold for where, cold, _ in seen if where == rank]
        assert mine == [True] * kinds.count(op) + [False] * kinds.count(op)

    on_ranks("dualpipev", 2, 6, rank, modules=modules)
    assert seen
    assert close(grads_of(modules), loop_grads(modules, X, Y, 6))


def test_an_overlapped_pair_may_be_woven() -> None:
    """Both halves of a pair by hand, in any order that the user likes."""
    modules = make_modules(4)
    pairs: list[str] = []

    def weave(action: AnyAction, context: ActionContext) -> None:
        assert isinstance(action, Overlap)
        pairs.append(str(action))
        context.run(action.second)
        context.run(action.first)

    def rank(schedule: Schedule, rank: int) -> None:
        schedule.register_custom_function(Overlap, weave)
        schedule.step(X, target=Y)

    on_ranks("dualpipev", 2, 6, rank, modules=modules)
    assert pairs
    assert close(grads_of(modules), loop_grads(modules, X, Y, 6))


def test_the_context_shows_stage_inputs_and_schedule() -> None:
    modules = make_modules(2)
    shapes: list[Any] = []

    def rank(schedule: Schedule, rank: int) -> None:
        def look(action: AnyAction, context: ActionContext) -> None:
            assert isinstance(action, Action)
            assert context.schedule is schedule
            assert context.stage(action.stage).submod is modules[rank]
            if rank == 0:
                assert context.inputs.args is not None
                shapes.append(context.inputs.args[action.microbatch or 0][0].shape)
            else:
                assert context.inputs.targets is not None
                shapes.append(context.inputs.targets[action.microbatch or 0].shape)
            context.run(action)

        schedule.register_custom_function(Op.F, look)
        schedule.step(X, target=Y)

    on_ranks("1f1b", 2, 6, rank, modules=modules)
    assert shapes == [torch.Size([2, 4])] * 12


@pytest.mark.parametrize("step", [0, 1], ids=["cold", "warm"])
def test_a_failing_function_fails_the_step_as_a_stage_does(step: int) -> None:
    modules = make_modules(4)

    def rank(schedule: Schedule, rank: int) -> str:
        calls = [0]

        def own(action: AnyAction, context: ActionContext) -> None:
            calls[0] += 1
            if rank == 1 and calls[0] == 2 + 8 * step:
                raise LookupError("in the user's function")
            context.run(action)

        schedule.register_custom_function(Op.F, own)
        text = ""
        for _ in range(3):
            for index in schedule.placement.stages_of(rank):
                modules[index].zero_grad()
            try:
                schedule.step(X[:8], target=Y[:8])
            except (LookupError, PeerFailed) as error:
                text = str(error)
        return text

    first, second = on_ranks("zbv", 2, 4, rank, modules=modules)
    assert second == "in the user's function"
    assert first.startswith("rank 1 failed in action ")
    assert first.endswith("LookupError: in the user's function")
    assert close(grads_of(modules), loop_grads(modules, X[:8], Y[:8], 4))


def test_weight_work_made_by_hand() -> None:
    """`dw_builder`: called after each input pass, its work is run in the weight pass."""
    from penstock.comm import LocalTransport, LocalWorld
    from penstock.schedules import get_schedule
    from penstock.stage.pipeline_stage import PipelineStage

    class ByHand(nn.Module):
        """A linear layer whose weight gradient is computed by the user."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
            self.queue: list[tuple[Tensor, Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            out = x @ self.weight.detach().t()
            if not out.requires_grad:
                out.requires_grad_()
            kept = x.detach()
            out.register_hook(lambda grad: self.queue.append((kept, grad)))
            return torch.tanh(out)

        def build(self) -> Any:
            x, grad = self.queue.pop(0)

            def work() -> None:
                self.weight.backward(grad.t() @ x)

            return work

    torch.manual_seed(0)
    modules = [ByHand() for _ in range(4)]
    plan = get_schedule("zbv")(2, 4)

    def rank(transport: LocalTransport) -> None:
        stages = [
            PipelineStage(modules[i], i, 4, "cpu", group=transport, dw_builder=modules[i].build)
            for i in plan.placement.stages_of(transport.rank)
        ]
        schedule = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            for stage in stages:
                stage.submod.zero_grad()
            schedule.step(X[:8], target=Y[:8])

    LocalWorld(2).run(rank)
    weights = [module.weight.detach().clone().requires_grad_() for module in modules]
    for a, b in zip(X[:8].tensor_split(4), Y[:8].tensor_split(4), strict=True):
        for weight in weights:
            a = torch.tanh(a @ weight.t())
        (nn.functional.mse_loss(a, b) / 4).backward()
    assert close(grads_of(list(modules)), [weight.grad for weight in weights if weight.grad is not None])
