"""Programs that make their messages, keep values beside those that arrive, or ask whether a step learns shapes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.comm import LocalWorld, Transport
from penstock.compat._utils import InferenceMode, _TensorMeta, flatten_args
from penstock.compat.schedules import Schedule1F1B, ScheduleInterleavedZeroBubble
from penstock.compat.stage import PipelineStage
from tests.compat.test_beside_methods import MICROBATCHES, WIDTH, batch, layers, same_as_plain


class OwnMessages(PipelineStage):
    """Makes all operations itself, out of buffers that it finds."""

    def _received(self, infos: Any) -> list[Any]:
        assert all(info.is_root_arg or info.buffer is not None for info in infos)
        return [self._op(info.buffer, info.source, sends=False) for info in infos if not info.is_root_arg]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._received(self.args_recv_info[fwd_chunk_id])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self._received(self.grad_recv_info[bwd_chunk_id]) if self.has_backward and not self.is_last else []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        (output,), _ = self.fwd_cache[fwd_chunk_id]
        return [] if self.is_last else [self._op(output.detach(), self.stage_index + 1, sends=True)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        grads = self.bwd_cache.pop(bwd_chunk_id) if self.has_backward and not self.is_first else ()
        return [self._op(grad, self.stage_index - 1, sends=True) for grad in grads if grad is not None]


@pytest.mark.parametrize("fails", [False, True])
def test_receive_operations_of_a_programs_own_find_their_buffers(fails: bool) -> None:
    """And a step that fails gives its messages up once, though the stage does not say which of them it has made."""
    modules = layers(4)
    x, y = batch()

    def rank(transport: Transport) -> list[tuple[bool, bool]]:
        stages = [OwnMessages(modules[i], i, 4, "cpu", group=transport) for i in (transport.rank, transport.rank + 2)]
        schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=nn.MSELoss())
        votes: list[tuple[bool, bool]] = []
        original = schedule._warmup_p2p

        def vote(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
            votes.append((has_backward, p2p_done))
            original(stages, has_backward, p2p_done)

        schedule._warmup_p2p = types.MethodType(vote, schedule)  # type: ignore[method-assign]
        if fails:
            hook = modules[2].register_forward_hook(lambda _, args, output: 1 / int(output.shape[0] - 2))
            with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
                schedule.step(*((x,) if transport.rank == 0 else ()), target=y)
            hook.remove()
            for stage in stages:
                stage.submod.zero_grad()
        for _ in range(2):
            schedule.step(*((x,) if transport.rank == 0 else ()), target=y)
        assert [stage._inference_mode for stage in stages] == [InferenceMode.DYNAMIC] * 2
        return votes

    assert all(votes[-1][0] and len(votes) <= 2 for votes in LocalWorld(2).run(rank))
    same_as_plain(modules, 2)


class Beside(PipelineStage):
    """Reads a value of its own beside what arrives, and collects its gradient."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own = torch.full((WIDTH,), 0.5, dtype=torch.float64)
        self.collected: list[Tensor | None] = []

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, **options: Any) -> Any:
        inputs = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        own = self.own.detach().requires_grad_()
        output = self.forward_maybe_with_nosync(inputs[0] + own)
        self.fwd_cache[fwd_chunk_id] = (output,), list(flatten_args((*inputs, own)))
        if self.is_last:
            self.output_chunks.append(output)
        return output

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        if backward_type != "weight":
            self.collected.append(grads[1])
        return grads, groups


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_gradients_come_back_for_everything_that_a_forward_read(kind: type[Any]) -> None:
    """Those of values that did not arrive were left out: silently a part of the gradient was lost."""
    per_rank = 1 if kind is Schedule1F1B else 2
    modules = layers(2 * per_rank)
    x, y = batch()

    def rank(transport: Transport) -> list[Tensor]:
        mine = range(transport.rank, 2 * per_rank, 2)
        stages = [Beside(modules[i], i, 2 * per_rank, "cpu", group=transport) for i in mine]
        schedule = kind(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=nn.MSELoss())
        schedule.step(*((x,) if transport.rank == 0 else ()), target=y)
        collected = [[grad for grad in stage.collected if grad is not None] for stage in stages]
        assert all(len(grads) == MICROBATCHES for grads in collected)
        return [torch.stack(grads).sum(0) for grads in collected]

    found = LocalWorld(2).run(rank)
    owns = [torch.full((WIDTH,), 0.5, dtype=torch.float64, requires_grad=True) for _ in modules]
    value = x
    for own, module in zip(owns, layers(len(modules)), strict=True):
        value = module(value + own)
    nn.functional.mse_loss(value, y).backward()
    for index, own in enumerate(owns):
        torch.testing.assert_close(found[index % 2][index // 2], own.grad)


class Counting(nn.Module):
    """Counts its calls, as modules do that take something from a queue in each."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x)
        return out


class Counted(PipelineStage):
    """Is driven by hand, because it overrides something."""

    forwards = 0

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        self.forwards += 1
        return super().forward_one_chunk(*args, **options)


@pytest.mark.parametrize("kind", [PipelineStage, Counted])
def test_a_program_knows_which_steps_call_its_modules_once_more(kind: type[PipelineStage]) -> None:
    """Torch's stages do before the first step and whenever the kind of step changes; penstock's only by hand, once a kind."""
    modules = [Counting(layer) for layer in layers(2)]
    x, y = batch()

    def rank(transport: Transport) -> None:
        module = modules[transport.rank]
        stage = kind(module, transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        args = (x,) if stage.is_first else ()
        for has_backward in (False, True, False, True, True):
            learns = not schedule._stage_forward_initialized or has_backward != schedule._stage_backward_initialized
            before = module.calls
            (schedule.step if has_backward else schedule.eval)(*args, target=y)
            assert module.calls - before == MICROBATCHES + learns
        if kind is Counted:
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = False
            assert (schedule._stage_forward_initialized, schedule._stage_backward_initialized) == (False, False)
            assert schedule._initialize_pp_stages([stage], args, {}, y, False, False) == (True, True)

    LocalWorld(2).run(rank)


def test_a_tensor_for_what_is_known_of_one() -> None:
    stage = PipelineStage(nn.Identity(), 0, 1, "cpu")
    made = stage._to_tensor(_TensorMeta(torch.Size([2, 3]), (3, 1), torch.float32, requires_grad=True))
    assert (made.shape, made.requires_grad, made.is_leaf) == ((2, 3), True, True)
    given = torch.ones(2, requires_grad=True) * 2
    leaf = stage._to_tensor(given)
    assert (leaf.is_leaf, leaf.requires_grad) == (True, True)


class Scaled(nn.Module):
    """Takes a keyword, which every stage is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * scale
        return out


@pytest.mark.parametrize("kind", [PipelineStage, Counted])
def test_a_batch_that_is_cut_already_comes_as_lists(kind: type[PipelineStage]) -> None:
    """As newer versions of torch take it: the first stage's rank gives arguments, every rank keywords."""
    modules = [Scaled(layer) for layer in layers(2)]
    x, y = batch()
    scales = [torch.tensor(1.0 + microbatch) for microbatch in range(MICROBATCHES)]

    def rank(transport: Transport) -> list[Tensor]:
        stage = kind(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss(), scale_grads=False)
        losses: list[Tensor] = []
        given: dict[str, Any] = {
            "arg_mbs": [(part,) for part in x.chunk(MICROBATCHES)] if stage.is_first else None,
            "kwarg_mbs": [{"scale": scale} for scale in scales],
            "target_mbs": list(y.chunk(MICROBATCHES)) if stage.is_last else None,
        }
        assert schedule.step(losses=losses, return_outputs=False, **given) is None
        trained = list(losses)
        schedule.eval(losses=losses, return_outputs=False, **given)
        torch.testing.assert_close(losses, trained)
        with pytest.raises(ValueError, match="kwarg_mbs"):
            schedule.step(arg_mbs=given["arg_mbs"], kwarg_mbs=given["kwarg_mbs"][1:])
        return trained

    _, losses = LocalWorld(2).run(rank)
    plain = [Scaled(layer) for layer in layers(2)]
    for part, target, scale, loss in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), scales, losses, strict=True):
        expected = nn.functional.mse_loss(plain[1](plain[0](part, scale=scale), scale=scale), target)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    for module, other in zip(modules, plain, strict=True):
        for parameter, same in zip(module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, same.grad)


def in_reverse(self: Any, x: Tensor | None = None, *, target: Any = None, losses: Any = None, **options: Any) -> Any:
    """A step of a program's own, around the microbatches that it makes itself: the last rows first."""
    parts = None if x is None else [(part,) for part in reversed(x.chunk(self._n_microbatches))]
    targets = None if target is None else [*reversed(target.chunk(self._n_microbatches))]
    self._stage.has_backward = self._has_backward
    self._stage.clear_runtime_states()
    self._step_microbatches(parts, None, targets, losses)
    return self._merge_outputs(self._stage.output_chunks) if self._stage.is_last else None


@pytest.mark.parametrize("kind", [PipelineStage, Counted])
def test_a_step_of_a_programs_own_goes_around_the_microbatches(kind: type[PipelineStage]) -> None:
    """It called itself for ever, and evaluations went past it."""
    modules = layers(2)
    x, y = batch()

    def rank(transport: Transport) -> tuple[Tensor, list[float]] | None:
        stage = kind(modules[transport.rank], transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
        schedule.__class__ = type("Reversed", (type(schedule),), {"step": in_reverse})
        losses: list[Tensor] = []
        args = (x,) if stage.is_first else ()
        evaluated = schedule.eval(*args, target=y, losses=losses)
        before = [loss.item() for loss in losses]
        assert all(parameter.grad is None for parameter in stage.submod.parameters())
        trained = schedule.step(*args, target=y, losses=losses)
        if not stage.is_last:
            return None
        torch.testing.assert_close(trained.detach(), evaluated)
        assert before == [loss.item() for loss in losses]
        return evaluated, before

    _, found = LocalWorld(2).run(rank)
    assert found is not None
    output, losses = found
    expected = nn.Sequential(*layers(2))(x)
    torch.testing.assert_close(output, torch.cat([*reversed(expected.chunk(MICROBATCHES))]).detach())
    parts = zip(expected.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    means = [nn.functional.mse_loss(part, target).item() for part, target in parts]
    assert losses == pytest.approx(means[::-1])
    same_as_plain(modules, 1)


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_stages_may_be_replaced_by_those_of_another_class(kind: type[Any]) -> None:
    """A schedule of one stage had no place for another one."""
    per_rank = 1 if kind is Schedule1F1B else 2
    modules = layers(2 * per_rank)
    x, y = batch()

    def rank(transport: Transport) -> None:
        mine = range(transport.rank, 2 * per_rank, 2)
        stages = [PipelineStage(modules[i], i, 2 * per_rank, "cpu", group=transport) for i in mine]
        schedule = kind(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=nn.MSELoss())
        assert schedule.pipeline_order
        others = []
        for old in schedule._stages:
            other = Counted(old.submod, old.stage_index, old.num_stages, old.device, group=old.group)
            other._mesh_cache, other.stage_index_to_group_rank = old._mesh_cache, old.stage_index_to_group_rank
            others.append(other)
        if per_rank == 1:
            schedule._stage = others[0]
        else:
            schedule._stages = others
        schedule.step(*((x,) if transport.rank == 0 else ()), target=y)
        assert [stage.forwards for stage in others] == [MICROBATCHES] * per_rank

    LocalWorld(2).run(rank)
    same_as_plain(modules, 1)
