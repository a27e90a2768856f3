"""What is special to fully_shard and replicate: when parameters are gathered, mixed precision, hooks, failures."""

from __future__ import annotations

import copy
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor

from penstock.comm.host_group import HostGroup
from penstock.errors import RunError, StageError
from penstock.parallel import adapt
from tests.gloo_pool import GlooPool
from tests.parallel.driver import FREED, FULL, SPLIT, Driver, differences, make_data, make_model, plain_loop

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def shard(model: nn.Module, **options: Any) -> Any:
    grid = init_device_mesh("cpu", (2,))
    for layer in model.children():
        fully_shard(layer, mesh=grid, **options)
    return fully_shard(model, mesh=grid, **options)


def copies(model: nn.Module) -> Any:
    return replicate(model, mesh=init_device_mesh("cpu", (2,)))


def groups(model: Any) -> list[Any]:
    return [group for state in model._get_fsdp_state()._state_ctx.all_states for group in state._fsdp_param_groups]


def settings_of(model: Any) -> list[Any]:
    """Everything that a step may change and must put back."""
    context = model._get_fsdp_state()._state_ctx
    found: list[Any] = [context.is_last_backward, context.iter_forward_root]
    found.append(context.post_backward_final_callback_queued)
    for group in groups(model):
        found += [group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward, group.unshard_in_backward]
        found += [group.post_forward_mesh_info is None, group._training_state, group._sharded_state]
        found.append(group._all_gather_result)
        found += [parameter._unsharded_param.grad for parameter in group.fsdp_params]
        found += [len(parameter._unsharded_param._post_accumulate_grad_hooks or ()) for parameter in group.fsdp_params]
    found += [len(state._states_to_backward_prefetch) for state in context.all_states]
    return [*found, len(model._get_fsdp_state()._comm_ctx.post_forward_order)]


class Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the collectives that are issued while it is on; and the flags of failures, which go past torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __enter__(self) -> Self:
        self.flags = HostGroup.sum
        HostGroup.sum = lambda group, flags: (self.names.append("allreduce"), self.flags(group, flags))[1]  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: object) -> None:
        HostGroup.sum = self.flags  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def short(name: str) -> str:
    return name.strip("_").split("_")[0]


def collectives_by_action(options: dict[str, Any], script: str) -> list[str]:
    """For each action of a second step: its name and the collectives that it caused."""
    model = make_model()
    driver = Driver(shard(model, **options))
    driver.step(script, make_data(0, dist.get_rank()))
    seen: list[str] = []
    act = driver._act

    def watched(word: str, *args: Any, **kwargs: Any) -> None:
        with Collectives() as collectives:
            act(word, *args, **kwargs)
        if collectives.names:
            seen.append(f"{word}: {' '.join(short(name) for name in collectives.names)}")

    driver._act = watched  # type: ignore[method-assign]
    driver.step(script, make_data(1, dist.get_rank()))
    assert driver.module._get_fsdp_state()._comm_ctx.reduce_scatter_states == []  # waited for, and its memory released
    return seen


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_the_plan_decides_when_parameters_are_gathered(gloo_pool: GlooPool, options: dict[str, Any]) -> None:
    for seen in gloo_pool.run(2, collectives_by_action, options, SPLIT):
        assert seen == ["U: allgather allgather", "G: allreduce reduce reduce"]  # two layers; the whole has no others


def test_layers_told_to_free_after_forward_go_on_to_do_so(gloo_pool: GlooPool) -> None:
    for seen in gloo_pool.run(2, collectives_by_action, {"reshard_after_forward": True}, "F0 F1 B0 B1 G"):
        assert [entry.partition(":")[0] for entry in seen] == ["F0", "F1", "B0", "B1", "G"]
        assert seen[-1] == "G: allreduce reduce reduce"


def two_stages_of_one_rank() -> list[str]:
    """The first stage is freed before the second one's backward, which must not fetch it again."""
    models = [make_model(), make_model()]
    wrapped = [shard(model) for model in models]
    share_comm_ctx(wrapped)
    first, second = Driver(wrapped[0]), Driver(wrapped[1])
    for driver in (first, second):
        driver.adapter.begin()
    with Collectives() as collectives:
        first.adapter.unshard()
        second.adapter.unshard()
        x = make_data(0, dist.get_rank())[0].requires_grad_()
        middle = wrapped[0](x)
        first.adapter.reshard()
        leaf = middle.detach().requires_grad_()
        wrapped[1](leaf).square().sum().backward()
        collectives.names.append("then")
        first.adapter.unshard()
        middle.backward(leaf.grad)
        for driver in (first, second):
            driver.adapter.reduce_grad()
    for driver in (first, second):
        driver.adapter.end(failed=False)
    return [short(name) for name in collectives.names]


def test_stages_that_share_streams_do_not_gather_for_one_another(gloo_pool: GlooPool) -> None:
    expected = ["allgather"] * 4 + ["then"] + ["allgather"] * 2 + ["allreduce", "reduce", "reduce"] * 2
    assert gloo_pool.run(2, two_stages_of_one_rank) == [expected, expected]


def sharded_before_and_after(kind: str, script: str) -> list[Any]:
    model = make_model()
    wrapped = copies(model) if kind == "replicate" else shard(model)
    driver = Driver(wrapped)
    driver.step(FULL, make_data(0, dist.get_rank()))
    before = settings_of(wrapped)
    grads = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    with torch.no_grad():
        driver.step(script, make_data(1, dist.get_rank()))
    after = settings_of(wrapped)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    same = all(
        torch.equal(old.to_local(), parameter.grad.to_local())  # type: ignore[union-attr]
        for old, parameter in zip(grads, model.parameters(), strict=True)
    )
    return [before == after, same, driver.adapter.sharded]


@pytest.mark.parametrize("script", ["U F0 F1 F2 R", "U F0 F1 F2", "F0 F1", "U", "U R U F0 G"])
@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
def test_evaluation_leaves_everything_as_it_was(gloo_pool: GlooPool, kind: str, script: str) -> None:
    for same_settings, same_grads, sharded in gloo_pool.run(2, sharded_before_and_after, kind, script):
        assert same_settings
        assert same_grads
        assert sharded is (kind == "fully_shard")


class Failing(torch.autograd.Function):
    """Fails in the backward, if told so."""

    on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if Failing.on:
            raise ArithmeticError("on purpose")
        return grad


class Fragile(nn.Module):
    """Fails in its forward or in its backward, if told so, between two layers."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = Failing.apply(self.layers[0](x))
        if self.fails == "forward":
            raise ArithmeticError("on purpose")
        Failing.on = self.fails == "backward"
        return self.layers[1](x)  # type: ignore[no-any-return]


def fails_then_works(kind: str, script: str) -> list[Any]:
    layers = make_model()
    reference = copy.deepcopy(layers)
    model = Fragile(layers)
    wrapped = copies(model) if kind == "replicate" else shard(layers) and shard_only(model)
    driver = Driver(wrapped)
    rank = dist.get_rank()
    driver.step(SPLIT, make_data(0, rank))  # its gradients are kept
    before = settings_of(wrapped)
    same = []
    scripts = [("forward", "U F0"), ("backward", "U F0 B0"), ("", "U F0 F1 I0 W0 F2 !"), ("", "U F0 B0 F1 R !")]
    for fails, broken in scripts:
        model.fails = fails
        with pytest.raises(ArithmeticError):
            driver.step(broken, make_data(7, rank))
        model.fails, Failing.on = "", False
        same.append(settings_of(wrapped) == before)
    driver.step(script, make_data(1, rank))
    plain_loop(reference, 2)
    return [same, differences(layers, reference)]


def shard_only(model: nn.Module) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
@pytest.mark.parametrize("script", [FULL, FREED])
def test_a_failed_step_leaves_nothing_behind(gloo_pool: GlooPool, kind: str, script: str) -> None:
    for same, wrong in gloo_pool.run(2, fails_then_works, kind, script):
        assert same == [True] * 4
        assert wrong == []


def mixed_precision(kind: str, script: str) -> list[Any]:
    """bfloat16 to compute, float32 to add up: 16 equal microbatches add up without loss only in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make_model(torch.float32)
    reference = copy.deepcopy(model).to(torch.bfloat16)
    wrapped = {
        "frugal": lambda: shard(model, mp_policy=policy, reshard_after_forward=True),
        "held": lambda: shard(model, mp_policy=policy),
        "replicate": lambda: replicate(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy),
    }[kind]()
    x = make_data(0, 0, dtype=torch.bfloat16)[0]
    driver = Driver(wrapped)
    for _ in range(2):
        driver.step(script, [x] * 16)
    reference(x).square().sum().backward()
    for parameter in reference.parameters():
        assert parameter.grad is not None
        total = 32 * parameter.grad.float()
        parameter.grad, parameter.data = None, parameter.data.float()
        parameter.grad = total
    return differences(model, reference, limit=1e-6)


@pytest.mark.parametrize("kind", ["held", "frugal", "replicate"])
@pytest.mark.parametrize("script", ["full", "split"])
def test_gradients_are_added_up_in_the_dtype_of_the_reduction(gloo_pool: GlooPool, kind: str, script: str) -> None:
    every = range(16)
    if script == "full":
        words = ["U", *(f"F{i} B{i}" for i in every), "G R"]
    else:
        words = ["U", *(f"F{i}" for i in every), *(f"I{i}" for i in every), *(f"W{i}" for i in every), "G R"]
    assert gloo_pool.run(2, mixed_precision, kind, " ".join(words)) == [[], []]


def count_hooks(script: str) -> dict[str, int]:
    model = make_model()
    wrapped = shard(model)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():

        def count(parameter: Any, name: str = name) -> None:
            assert parameter.grad is not None
            counts[name] = counts.get(name, 0) + 1

        parameter.register_post_accumulate_grad_hook(count)
    Driver(wrapped).step(script, make_data(0, dist.get_rank()))
    return counts


@pytest.mark.parametrize("script", [FULL, SPLIT])
def test_hooks_of_sharded_parameters_fire_when_their_gradient_is_there(gloo_pool: GlooPool, script: str) -> None:
    """As without a pipeline: FSDP2 calls them once for each reduction, so an optimizer in backward steps once."""
    for counts in gloo_pool.run(2, count_hooks, script):
        assert set(counts.values()) == {1}
        assert len(counts) == len(list(make_model().parameters()))


def accumulate_without_sync() -> list[str]:
    model, reference = make_model(), make_model()
    wrapped = shard(model)
    driver = Driver(wrapped)
    rank = dist.get_rank()
    wrapped.set_requires_gradient_sync(False)
    driver.step(SPLIT, make_data(0, rank))
    driver.step(FULL, make_data(1, rank))
    wrong = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    wrapped.set_requires_gradient_sync(True)
    driver.step(SPLIT, make_data(2, rank))
    plain_loop(reference, 3)
    return wrong + differences(model, reference)


def test_no_sync_of_the_user_is_kept(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, accumulate_without_sync) == [[], []]


def misused() -> list[str]:
    outer = fully_shard(nn.Sequential(shard_only(make_model())), mesh=init_device_mesh("cpu", (2,)))
    outer(make_data(0, 0)[0])
    texts = []
    adapter = adapt(outer[0])
    try:
        adapter.begin()
    except StageError as error:
        texts.append(str(error))
    adapter.end()
    driver = Driver(shard(make_model()))
    for script in ("R", "U U", "U R R", "G G"):
        try:
            driver.step(script, make_data(0, 0))
        except RunError as error:
            texts.append(str(error))
    adapter = driver.adapter
    adapter.begin()
    driver.module(make_data(0, 0)[0]).sum().backward()
    try:
        adapter.end(failed=False)
    except RunError as error:
        texts.append(str(error))
    adapter.end()
    return texts


def test_misuse_is_told(gloo_pool: GlooPool) -> None:
    expected = ("larger module", "not unsharded", "unsharded already", "not unsharded", "twice", "no REDUCE_GRAD")
    for texts in gloo_pool.run(2, misused):
        assert len(texts) == len(expected)
        for text, words in zip(texts, expected, strict=True):
            assert words in text
