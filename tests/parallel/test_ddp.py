"""What is special to DistributedDataParallel: hooks, buffers, parameters that only some replicas use, options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import RunError, StageError
from penstock.parallel import adapt
from tests.gloo_pool import GlooPool
from tests.parallel.driver import FULL, SPLIT, WIDTH, Driver, compare, differences, make_data, make_model, plain_loop

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def count_hooks(script: str) -> dict[str, int]:
    model = DistributedDataParallel(make_model())
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():

        def count(_: Tensor, name: str = name) -> None:
            counts[name] = counts.get(name, 0) + 1

        parameter.register_post_accumulate_grad_hook(count)
    Driver(model).step(script, make_data(0, dist.get_rank()))
    return counts


@pytest.mark.parametrize("script", [FULL, SPLIT])
def test_hooks_fire_once_for_each_microbatch(gloo_pool: GlooPool, script: str) -> None:
    for counts in gloo_pool.run(2, count_hooks, script):
        assert set(counts.values()) == {3}
        assert len(counts) == len(list(make_model().parameters()))


class Choice(nn.Module):
    """Replica 0 uses `left`, replica 1 uses `right`, nobody uses `none`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.none = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.replica = dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        return self.right(x) if self.replica else self.left(x)


def unused_on_some(hook: bool) -> list[str]:
    torch.manual_seed(0)
    model = Choice().double()
    reference = copy.deepcopy(model)
    model.none.weight.grad = torch.ones_like(model.none.weight)  # left by an earlier step
    reference.none.weight.grad = torch.ones_like(model.none.weight)
    wrapped = DistributedDataParallel(model)
    if hook:
        wrapped.register_comm_hook([], average_hook)
    Driver(wrapped).step(SPLIT, make_data(0, dist.get_rank()))
    for replica in range(2):
        reference.replica = replica
        for x in make_data(0, replica):
            (reference(x).square().sum() / 2).backward()
    return differences(model, reference)


@pytest.mark.parametrize("hook", [False, True])
def test_parameters_that_only_some_replicas_use_are_averaged_over_all(gloo_pool: GlooPool, hook: bool) -> None:
    assert gloo_pool.run(2, unused_on_some, hook) == [[], []]


def average_hook(calls, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    calls.append(bucket.index())
    buffer = bucket.buffer().div_(2)
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])


def with_hook(kind: str) -> tuple[list[str], int]:
    calls: list[int] = []

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        if kind == "python":
            wrapped.register_comm_hook(calls, average_hook)
        else:
            wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return wrapped

    return compare(wrap, SPLIT, steps=2), len(calls)


@pytest.mark.parametrize("kind", ["python", "built in"])
def test_a_communication_hook_is_given_the_gradients_once_a_step(gloo_pool: GlooPool, kind: str) -> None:
    for wrong, calls in gloo_pool.run(2, with_hook, kind):
        assert wrong == []
        assert calls == (2 if kind == "python" else 0)


class Counter(nn.Module):
    """A buffer that each replica changes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x.detach().mean(0)
        return self.linear(x)


def buffers_once_a_step() -> tuple[int, Tensor]:
    model = DistributedDataParallel(Counter().double())
    driver = Driver(model)
    broadcasts = []
    inner = model._sync_buffers
    model._sync_buffers = lambda: (broadcasts.append(1), inner())  # type: ignore[method-assign,assignment]
    driver.step(FULL, make_data(0, dist.get_rank()))
    driver.step(SPLIT, make_data(1, dist.get_rank()))
    return len(broadcasts), model.module.mean


def test_buffers_are_those_of_the_first_replica_at_each_step(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(2, buffers_once_a_step)
    first = sum(x.mean(0) for x in make_data(0, 0))
    for replica, (broadcasts, mean) in enumerate(results):
        assert broadcasts == 2
        torch.testing.assert_close(mean, first + sum(x.mean(0) for x in make_data(1, replica)))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH, sparse=True)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rows = torch.tensor([dist.get_rank(), 5])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table(self.rows))


def sparse_rows() -> list[str]:
    torch.manual_seed(0)
    model = Rows().double()
    reference = copy.deepcopy(model)
    Driver(DistributedDataParallel(model)).step(SPLIT, make_data(0, dist.get_rank()))
    for replica in range(2):
        reference.rows = torch.tensor([replica, 5])
        for x in make_data(0, replica):
            (reference(x).square().sum() / 2).backward()
    for table in (model.table.weight, reference.table.weight):
        assert table.grad is not None
        assert table.grad.is_sparse
        table.grad = table.grad.to_dense()
    return differences(model, reference)


def test_sparse_gradients(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, sparse_rows) == [[], []]


def accumulate_without_sync(kind: str) -> list[Any]:
    """Two steps under the user's own no_sync and one without: what DDP gives for such a loop of its own."""
    model, reference = make_model(), make_model()
    wrapped: Any = DistributedDataParallel(model) if kind == "ddp" else replicate(model)
    driver = Driver(wrapped)
    rank = dist.get_rank()
    for step in range(2):
        if kind == "ddp":
            with wrapped.no_sync():
                driver.step(SPLIT, make_data(step, rank))
        else:
            wrapped.set_requires_gradient_sync(False)
            driver.step(SPLIT, make_data(step, rank))
            wrapped.set_requires_gradient_sync(True)
    for step in range(2):
        for x in make_data(step, rank):
            reference(x).square().sum().backward()
    local = differences(model, reference)
    driver.step(SPLIT, make_data(2, rank))
    reference.zero_grad()
    plain_loop(reference, 3)
    return [local, differences(model, reference)]


@pytest.mark.parametrize("kind", ["ddp", "replicate"])
def test_no_sync_of_the_user_is_kept(gloo_pool: GlooPool, kind: str) -> None:
    assert gloo_pool.run(2, accumulate_without_sync, kind) == [[[], []]] * 2


FLAGS = ("require_backward_grad_sync", "require_forward_param_sync", "find_unused_parameters", "static_graph")


def fails_then_works(kind: str) -> tuple[bool, list[str], list[str]]:
    model, reference = make_model(), make_model()
    wrapped: Any = replicate(model) if kind == "replicate" else DistributedDataParallel(model, **{kind: True})
    driver = Driver(wrapped)
    if kind == "static_graph":
        wrapped(make_data(0, dist.get_rank())[0]).sum().backward()
    for script in ("!", "F0 I0 F1 !"):
        with pytest.raises(ArithmeticError):
            driver.step(script, make_data(0, dist.get_rank()))
    inner = replicate.state(model)._ddp if kind == "replicate" else wrapped  # type: ignore[attr-defined]
    flags = [getattr(inner, name) for name in FLAGS]
    same = flags == [True, True, kind == "find_unused_parameters", kind == "static_graph"]
    model.zero_grad()
    driver.step(SPLIT, make_data(0, dist.get_rank()))
    plain_loop(reference, 1)
    good = differences(model, reference)
    # The wrapper works by itself as well, afterwards.
    model.zero_grad()
    data = make_data(0, dist.get_rank())
    for x in data:
        wrapped(x).square().sum().backward()
    return same, good, differences(model, reference)


@pytest.mark.parametrize("kind", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view", "replicate"])
def test_a_failed_step_leaves_the_wrapper_as_it_was(gloo_pool: GlooPool, kind: str) -> None:
    assert gloo_pool.run(2, fails_then_works, kind) == [(True, [], [])] * 2


def refused() -> list[str]:
    texts = []
    model = make_model()
    ahead = DistributedDataParallel(model)
    for parameter in model.parameters():
        parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
    with pytest.raises(StageError) as caught:
        adapt(ahead)
    texts.append(str(caught.value))
    adapter = adapt(DistributedDataParallel(make_model()))
    actions = [adapter.reduce_grad, adapter.begin, adapter.begin, adapter.reduce_grad, adapter.reduce_grad, adapter.end]
    for action in actions:
        try:
            action()
        except RunError as error:
            texts.append(str(error))
    return texts


def test_misuse_is_told(gloo_pool: GlooPool) -> None:
    (texts,) = gloo_pool.run(1, refused)
    assert len(texts) == 4
    for text, words in zip(texts, ("optimizer after the step", "outside of a step", "begins", "twice"), strict=True):
        assert words in text
