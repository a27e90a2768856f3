"""The swapped functions: who sees them, for how long, and what they leave alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.stage.backward import (
    Deferral,
    Pending,
    backward_input,
    backward_weight,
    can_split,
    run_backward_full,
    run_deferred,
)
from penstock.stage.intercept import NestedDifferentiation, begin, end, intercepted
from tests.stage.compiled_forward import run_compiled

LINEAR, ADDMM, ENGINE = F.linear, torch.addmm, torch.autograd._engine_run_backward


@contextmanager
def deferring(pending: Pending) -> Iterator[None]:
    previous = begin(pending)
    try:
        yield
    finally:
        end(previous)


def untouched() -> bool:
    return F.linear is LINEAR and torch.addmm is ADDMM and torch.autograd._engine_run_backward is ENGINE


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    assert untouched()


def split(module: Any, x: Tensor, deferral: Deferral) -> Pending:
    value, pending = run_deferred(deferral, module, (x,), {})
    backward_input([value], [torch.ones_like(value)], pending, inputs=[x])
    return pending


def test_functions_are_swapped_within_the_block_only() -> None:
    pending = Pending(Deferral())
    assert untouched()
    with deferring(pending):
        assert not untouched()
        with deferring(Pending(Deferral())):
            pass
        assert not untouched()
    assert untouched()
    with intercepted():
        with deferring(pending), intercepted():
            pass
        assert not untouched()


def test_an_error_in_the_forward_restores_everything() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("mine")

    for proved in (False, True):
        deferral = Deferral()
        deferral.proved = proved
        with pytest.raises(ValueError, match="mine"):
            run_deferred(deferral, fail, (torch.ones(1),), {})
        assert untouched()


def test_an_error_in_the_input_pass_leaves_the_deferral_usable() -> None:
    layer, deferral = nn.Linear(3, 3).double(), Deferral()
    failing = [False]

    def call(x: Tensor) -> Tensor:
        x = x * 1
        if failing[0]:
            x.register_hook(lambda _: 1 / 0)
        return layer(x)

    def run() -> Tensor:
        layer.zero_grad()
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        backward_weight(split(call, x, deferral))
        return layer.weight.grad

    expected = run().clone()
    failing[0] = True
    with pytest.raises(ZeroDivisionError):
        run()
    failing[0] = False
    assert untouched()
    assert torch.equal(run(), expected)


def test_other_threads_get_the_original() -> None:
    layer, pending = nn.Linear(2, 2), Pending(Deferral())
    results: list[Any] = []

    def other() -> None:
        y = layer(torch.ones(1, 2))
        results.append(y.grad_fn.next_functions[-1][0].name())

    with deferring(pending):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert results == ["TBackward0"]  # the weight is in the graph
    assert pending.calls() == []


def test_threads_that_defer_at_the_same_time() -> None:
    results: dict[int, bool] = {}

    def work(seed: int) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        deferral = Deferral(module)
        for _ in range(20):
            x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
            run_backward_full([module(x).sum()], [None])
            expected = [parameter.grad.clone() for parameter in module.parameters()]
            module.zero_grad()
            value, pending = run_deferred(deferral, lambda x: module(x).sum(), (x,), {})
            backward_input([value], [None], pending, inputs=[x])
            waited = pending.num_waiting == 2
            backward_weight(pending)
            same = all(torch.equal(a, p.grad) for a, p in zip(expected, module.parameters(), strict=True))
            results[seed] = results.get(seed, True) and same and waited
            module.zero_grad()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


class Tagged(Tensor):
    pass


def test_weights_of_other_tensor_types_are_not_deferred() -> None:
    layer = nn.Linear(3, 3)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))
    assert split(layer, torch.ones(2, 3, requires_grad=True), Deferral()).work == []
    assert layer.weight.grad is not None


def test_inputs_of_other_tensor_types_are_not_deferred() -> None:
    layer = nn.Linear(3, 3)
    pending = split(
        lambda x: layer(x.as_subclass(Tagged)).as_subclass(Tensor), torch.ones(2, 3, requires_grad=True), Deferral()
    )
    assert pending.work == []
    assert layer.weight.grad is not None


def test_nothing_survives_with_the_collector_off() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    deferral = Deferral(module)
    checkpoint(
        module, torch.ones(2, 4, requires_grad=True), use_reentrant=False
    ).sum().backward()  # its first call leaks
    gc.collect()
    gc.disable()
    try:
        for call in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
            for needs in (True, False):
                x = torch.ones(2, 4, requires_grad=needs)
                value, pending = run_deferred(deferral, call, (x,), {})
                watched = [weakref.ref(value), weakref.ref(x)]
                backward_input([value], [torch.ones(2, 4)], pending, inputs=[x])
                backward_weight(pending)
                del value, x, pending
                assert [ref() for ref in watched] == [None, None]
        x = torch.ones(2, 4, requires_grad=True)
        value, pending = run_deferred(deferral, module, (x,), {})
        watched = [weakref.ref(value), weakref.ref(x)]
        del value, x, pending  # a microbatch that is dropped before its backward
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


class Remembers(torch.autograd.Function):
    """Keeps its output in a way that autograd does not free."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.kept = x * 2
        return ctx.kept.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        kept.append(weakref.ref(ctx.kept))
        return grad * 2


kept: list[Any] = []


def test_between_the_passes_only_inputs_and_gradients_of_layers_are_kept() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    pending = split(lambda x: second(Remembers.apply(first(x))), torch.ones(2, 4, requires_grad=True), Deferral())
    assert kept[-1]() is None  # the graph is gone
    assert all(tensor.grad_fn is None for _, rows, grad in pending.work for tensor in (rows, grad))
    assert [(tuple(rows.shape), tuple(grad.shape)) for _, rows, grad in pending.work] == [((2, 4), (2, 4))] * 2
    backward_weight(pending)
    assert pending.work == []


def test_the_gradient_moves_into_the_anchor_without_a_copy() -> None:
    layer, seen = nn.Linear(4, 4), []

    def call(x: Tensor) -> Tensor:
        y = layer(x)
        y.register_hook(lambda grad: seen.append(grad.data_ptr()))
        return torch.tanh(y)

    pending = split(call, torch.ones(2, 4, requires_grad=True), Deferral())
    assert [grad.data_ptr() for _, _, grad in pending.work] == seen


class Energy(nn.Module):
    """Forces are the gradient of an energy: the forward differentiates, and is differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(())
        energy = self.b(torch.tanh(self.a(x * noise))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_module_that_differentiates_itself_is_run_again_whole() -> None:
    grads = []
    for deferred in (False, True):
        torch.manual_seed(0)
        module = Energy().double()
        deferral = Deferral(module)
        for _ in range(2):
            x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
            if deferred:
                backward_weight(split(module, x, deferral))
                assert not deferral.enabled
            else:
                run_backward_full([module(x)], [torch.ones(2, 3).double()])
        assert module.calls == 2
        grads.append([parameter.grad for parameter in module.parameters()])
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_differentiation_that_begins_later_is_an_error() -> None:
    layer, deferral, nested = nn.Linear(3, 3), Deferral(), [False]

    def call(x: Tensor) -> Tensor:
        y = layer(x)
        if nested[0]:
            torch.autograd.grad(y.sum(), layer.weight)
        return y

    x = torch.ones(2, 3, requires_grad=True)
    backward_weight(split(call, x, deferral))
    nested[0] = True
    with pytest.raises(NestedDifferentiation, match="differentiates inside itself"):
        run_deferred(deferral, call, (x,), {})


def test_differentiation_of_something_else_is_let_be() -> None:
    layer, deferral = nn.Linear(3, 3), Deferral()

    def call(x: Tensor) -> Tensor:
        y = layer(x)
        leaf = torch.ones(3, requires_grad=True)
        leaf.square().sum().backward()
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * leaf.grad + slope

    assert len(split(call, torch.ones(2, 3, requires_grad=True), deferral).work) == 1
    assert deferral.enabled


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_parts_are_split_beside_others() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    outer = nn.Linear(3, 3).double()
    compiled = torch.compile(inner, backend="aot_eager")
    module = nn.Sequential(compiled, outer)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    run_backward_full([outer(inner(x))], [torch.ones(2, 3).double()])
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    deferral = Deferral(module)
    for _ in range(2):
        module.zero_grad()
        output, pending = run_compiled(deferral, module, (x,), {})
        backward_input([output], [torch.ones(2, 3).double()], pending, inputs=[x])
        assert pending.num_waiting == 2  # the layer outside, and the graph of the compiled part
        backward_weight(pending)
        for before, parameter in zip(expected, module.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_parts_are_found() -> None:
    assert can_split(nn.Sequential(nn.Linear(3, 3)))
    assert not can_split(nn.Sequential(torch.jit.trace(nn.Linear(3, 3), torch.ones(2, 3))))


def test_inference_and_no_grad_forwards_defer_nothing() -> None:
    layer = nn.Linear(3, 3)
    deferral = Deferral()
    backward_weight(split(layer, torch.ones(2, 3, requires_grad=True), deferral))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value, pending = run_deferred(deferral, layer, (torch.ones(2, 3),), {})
        assert pending.calls() == []
        assert not value.requires_grad


def test_a_stage_without_input_gradients_is_not_deferred_and_recomputes_as_it_ran() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    value, pending = run_deferred(
        Deferral(), lambda x: checkpoint(module, x, use_reentrant=False), (torch.ones(2, 3),), {}
    )
    assert pending.calls() == []
    backward_input([value], [torch.ones(2, 3)], pending, inputs=[])
    assert module[0].weight.grad is None
    backward_weight(pending)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_switching_deferral_off_does_not_lose_what_is_in_flight() -> None:
    layer, deferral = nn.Linear(3, 3), Deferral()
    x = torch.ones(2, 3, requires_grad=True)
    value, pending = run_deferred(deferral, layer, (x,), {})
    deferral.enabled = False
    backward_input([value], [torch.ones(2, 3)], pending, inputs=[x])
    backward_weight(pending)
    assert layer.weight.grad is not None


def test_deferred_calls_of_a_stage_without_input_gradients_wait_with_the_rest() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    x = torch.arange(6.0).view(2, 3)
    run_backward_full([module(x)], [torch.ones(2, 3)])
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    pending = Pending(Deferral(module))
    with deferring(pending):
        value = module(x)
    assert len(pending.calls()) == 2
    backward_input([value], [torch.ones(2, 3)], pending, inputs=[x])
    assert module[1].weight.grad is None
    backward_weight(pending)
    assert all(torch.equal(a, b.grad) for a, b in zip(expected, module.parameters(), strict=True))
