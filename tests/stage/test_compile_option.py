"""`compile=`: a stage's module compiled in place; what it is called, what it keeps, and what it says if it cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import penstock
from penstock.backward.compile_stage import compile_once
from penstock.errors import StageError, UnknownNameError
from penstock.stage.backward import Deferral, backward_input, backward_weight
from penstock.stage.pipeline_stage import PipelineStage
from tests.stage.compiled_forward import run_compiled


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_module(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(depth)))


def gradients(module: nn.Module) -> tuple[list[Tensor], int]:
    """Those of the input and the parameters by a split backward, and the bytes that the forward saved for it."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    leaf = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, pending = run_compiled(Deferral(module), module, (leaf,), {})
    backward_input([output.sin().sum()], [None], pending, inputs=[leaf])
    backward_weight(pending)
    return [tensor.grad for tensor in (leaf, *module.parameters()) if tensor.grad is not None], sum(saved.values())


def stage_of(module: nn.Module, options: Any) -> PipelineStage:
    stage = PipelineStage(module, 0, 1, "cpu", compile=options)
    compile_once(stage, stage.submod)
    return stage


def test_names_and_class_stay_those_of_the_module() -> None:
    module = make_module()
    names, kind = list(module.state_dict()), type(module)
    stage = stage_of(module, {"backend": "aot_eager"})
    assert stage.submod is module
    assert type(module) is kind
    assert list(module.state_dict()) == names
    assert copy.deepcopy(module)._compiled_call_impl is None


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"backened": "inductor"}, UnknownNameError, "did you mean 'backend'"),
        ("inductor", StageError, "expected True, or options of torch.compile"),
        ({"memory_budget": 2}, StageError, "a share from 0"),
    ],
)
def test_options_that_cannot_be_are_named(options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        stage_of(make_module(), options)


def test_what_is_compiled_already_is_not_compiled_again() -> None:
    with pytest.raises(StageError, match="compiled already"):
        stage_of(torch.compile(make_module(), backend="aot_eager"), True)  # type: ignore[arg-type]


def test_a_memory_budget_keeps_less_and_gives_the_same_gradients() -> None:
    want, _ = gradients(make_module())
    found = {}
    for budget in (1.0, 0.0):
        torch._dynamo.reset()
        module = make_module()
        stage_of(module, {"backend": "aot_eager", "memory_budget": budget})
        grads, found[budget] = gradients(module)
        for one, other in zip(grads, want, strict=True):
            torch.testing.assert_close(one, other)
    assert found[0.0] < found[1.0]


def test_a_backend_that_fails_is_told_once_and_the_stage_runs_eagerly() -> None:
    def broken(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        raise ValueError("no such instruction")

    want, _ = gradients(make_module())
    module = make_module()
    stage_of(module, {"backend": broken})
    with pytest.warns(penstock.errors.NotCompiled, match="ValueError: no such instruction") as told:
        got, _ = gradients(module)
    assert len(told) == 1
    assert all(map(torch.equal, want, got))


def test_equal_layers_that_are_compiled_by_themselves_are_compiled_once() -> None:
    compiled: list[int] = []

    def backend(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        compiled.append(len(examples))
        return graph.forward

    module = make_module(5)
    want, _ = gradients(copy.deepcopy(module))
    for name, layer in list(module.named_children()):
        setattr(module, name, torch.compile(layer, backend=backend))
    got, _ = gradients(module)
    assert all(map(torch.equal, want, got))
    assert len(compiled) == 3  # the forward, and the two parts of the backward


def test_an_input_that_was_changed_in_place_after_the_forward_is_found_out() -> None:
    module = make_module(1)
    stage_of(module, {"backend": "aot_eager"})
    leaf = torch.ones(4, 8, requires_grad=True)
    output, pending = run_compiled(Deferral(module), module, (leaf,), {})
    with torch.no_grad():
        leaf.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_input([output.sum()], [None], pending, inputs=[leaf])


def test_the_backward_is_not_differentiated_again() -> None:
    module = make_module(1)
    stage_of(module, {"backend": "aot_eager"})
    leaf = torch.ones(4, 8, requires_grad=True)
    output = module(leaf)
    with pytest.raises(RuntimeError, match=r"create_graph|double backward"):
        torch.autograd.grad(output.sum(), leaf, create_graph=True)
