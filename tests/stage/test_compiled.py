"""Compiled stages whose backward comes in two parts: the same gradients, the same hooks, little kept in between."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.backward.compile_stage import CompiledStage
from penstock.backward.split_backend import SplitBackend
from penstock.stage.backward import Deferral, backward_input, backward_weight
from tests.stage.compiled_forward import run_compiled

pytestmark = [
    pytest.mark.timeout(300),  # the compiler takes its time on a busy machine
    # torch.compile looks at `.grad` of what comes from the graph before
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    """Each test compiles for itself: torch.compile gives up on code that was compiled too often in one process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TwoInputs(nn.Module):
    """Several inputs, one of them without gradient, a keyword, a nest of outputs, a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.table = nn.Embedding(4, 8)

    def forward(self, x: Tensor, kind: Tensor, *, skip: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.first(x) + self.table(kind))
        return {"a": self.second(torch.tanh(h)), "b": self.second(h) * skip}


class Broken(nn.Module):
    """Part of it cannot be traced, so that there are two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.relu(h))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


def frozen_middle() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].requires_grad_(False)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten()),
    "frozen middle": frozen_middle,
    "graph break": Broken,
    "checkpoint": Checkpointed,
}


def start() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(4, 8)


def shaped(module: nn.Module, x: Tensor) -> Tensor:
    return x.unsqueeze(1) if isinstance(module, nn.TransformerEncoderLayer) else x


def plain(module: nn.Module, x: Tensor, *, steps: int = 1) -> list[Tensor]:
    """Gradients of the input and of the parameters, by autograd alone."""
    for step in range(steps):
        torch.manual_seed(step)
        leaf = shaped(module, x).clone().requires_grad_()
        module(leaf).pow(2).sum().backward()
    return [leaf.grad, *(p.grad for p in module.parameters() if p.requires_grad)]  # type: ignore[list-item]


def in_two(module: nn.Module, call: nn.Module, x: Tensor, *, steps: int = 1) -> list[Tensor]:
    """The same by an input pass and a weight pass."""
    deferral = Deferral(call)
    for step in range(steps):
        torch.manual_seed(step)
        leaf = shaped(module, x).clone().requires_grad_()
        before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        output, pending = run_compiled(deferral, call, (leaf,), {})
        backward_input([output.pow(2).sum()], [None], pending, inputs=[leaf])
        for parameter, old in zip(module.parameters(), before, strict=True):
            assert (parameter.grad is None) if old is None else torch.equal(parameter.grad, old)  # type: ignore[arg-type]
        backward_weight(pending)
    return [leaf.grad, *(p.grad for p in module.parameters() if p.requires_grad)]  # type: ignore[list-item]


@pytest.mark.parametrize("name", MODULES)
def test_two_parts_give_the_gradients_of_autograd_to_the_bit(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    twin = copy.deepcopy(module)
    expected = plain(module, start(), steps=3)
    found = in_two(twin, torch.compile(twin, backend="aot_eager"), start(), steps=3)
    assert all(map(torch.equal, expected, found))


@pytest.mark.slow
def test_inductor_compiles_both_parts() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
    twin = copy.deepcopy(module)
    expected = plain(module, start(), steps=2)
    found = in_two(twin, torch.compile(twin), start(), steps=2)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_module_compiled_in_place_and_parts_of_a_module_are_split_too() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    twin = copy.deepcopy(module)
    twin[0].compile(backend="aot_eager")
    twin[1] = torch.compile(twin[1], backend="aot_eager")
    assert all(map(torch.equal, plain(module, start()), in_two(twin, twin, start())))


def test_nests_keywords_and_inputs_without_gradient() -> None:
    torch.manual_seed(0)
    module = TwoInputs()
    twin = copy.deepcopy(module)
    x, kind, skip = torch.randn(4, 8), torch.tensor([0, 1, 2, 1]), torch.randn(4, 8)
    leaf, skipped = x.clone().requires_grad_(), skip.clone().requires_grad_()
    output = module(leaf, kind, skip=skipped)
    torch.autograd.backward([output["a"], output["b"]], [torch.ones(4, 8), torch.full((4, 8), 2.0)])

    compiled = torch.compile(twin, backend="aot_eager")
    other, other_skip = x.clone().requires_grad_(), skip.clone().requires_grad_()
    output, pending = run_compiled(Deferral(compiled), compiled, (other, kind), {"skip": other_skip})
    grads = [torch.ones(4, 8), torch.full((4, 8), 2.0)]
    backward_input([output["a"], output["b"]], grads, pending, inputs=[other, other_skip])
    backward_weight(pending)
    assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]
    assert torch.equal(skipped.grad, other_skip.grad)  # type: ignore[arg-type]
    for one, two in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_each_hook_fires_once_and_in_the_weight_pass() -> None:
    module = Broken()
    compiled = torch.compile(module, backend="aot_eager")
    fired: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: fired.append(f"grad of {name}"))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(f"accumulated {name}"))
    leaf = start().requires_grad_()
    output, pending = run_compiled(Deferral(compiled), compiled, (leaf,), {})
    backward_input([output.sum()], [None], pending, inputs=[leaf])
    assert not fired
    backward_weight(pending)
    names = [name for name, _ in module.named_parameters()]
    assert sorted(fired) == sorted([f"grad of {name}" for name in names] + [f"accumulated {name}" for name in names])


def test_a_weight_of_a_compiled_part_and_of_an_eager_one_hears_of_both_at_once() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)))
    module[1][1].weight = module[0].weight
    twin = copy.deepcopy(module)
    twin[1].compile(backend="aot_eager")
    fired: list[Tensor] = []
    twin[0].weight.register_hook(fired.append)
    expected, found = plain(module, start(), steps=3), in_two(twin, twin, start(), steps=3)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)
    assert len(fired) == 3


def test_gradients_are_added_as_ever_and_who_keeps_a_node_hears_of_them() -> None:
    """DDP and others hang hooks on the node that accumulates a parameter."""
    torch.manual_seed(0)
    module = MODULES["linear"]()
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager")
    deferral = Deferral(compiled)
    fired: list[str] = []
    node = get_gradient_edge(twin[0].weight).node
    node.register_hook(lambda *_: fired.append("weight"))
    for number in range(4):
        x = torch.randn(4, 8)
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        module(one).sum().backward()
        output, pending = run_compiled(deferral, compiled, (two,), {})
        backward_input([output.sum()], [None], pending, inputs=[two])
        backward_weight(pending)
        assert len(fired) == number + 1
        if number == 1:
            twin[2].weight.grad = twin[2].weight.grad.clone()
        if number == 2:
            module[0].bias.grad = twin[0].bias.grad = None
    for first, second in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]


def test_sizes_that_change_are_traced_again_and_stay_right() -> None:
    torch.manual_seed(0)
    module = MODULES["linear"]()
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager")
    deferral = Deferral(compiled)
    for rows in (4, 1, 6, 7, 1):
        x = torch.randn(rows, 8)
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        module(one).sum().backward()
        output, pending = run_compiled(deferral, compiled, (two,), {})
        backward_input([output.sum()], [None], pending, inputs=[two])
        backward_weight(pending)
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    for first, second in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]


def test_autocast_is_that_of_the_forward() -> None:
    torch.manual_seed(0)
    module = MODULES["linear"]()
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager")
    one, two = start().requires_grad_(), start().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(one)
        output, pending = run_compiled(Deferral(compiled), compiled, (two,), {})
    expected.sum().backward()
    backward_input([output.sum()], [None], pending, inputs=[two])
    backward_weight(pending)
    assert output.dtype is torch.bfloat16
    for first, second in zip([one, *module.parameters()], [two, *twin.parameters()], strict=True):
        assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]


def test_what_only_the_input_pass_needs_is_let_go_after_it() -> None:
    """The square's factor is needed for the input gradient alone; rows of the linear layer wait for the weight pass."""

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(torch.cos(torch.exp(self.layer(x))))

    module = Squares()
    compiled = torch.compile(module, backend="aot_eager")
    leaf = torch.randn(32, 64).requires_grad_()
    output, pending = run_compiled(Deferral(compiled), compiled, (leaf,), {})
    backward_input([output.sum()], [None], pending, inputs=[leaf])
    (work,) = pending.graphs
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in work.kept}
    assert sum(storages.values()) == 2 * 32 * 64 * 4  # the rows, and the gradients of the layer's output
    alive = [weakref.ref(value) for value in work.kept if value is not leaf]
    del work
    backward_weight(pending)
    gc.collect()
    assert all(reference() is None for reference in alive)


def test_the_module_is_as_it_was_after_its_split_graphs_ran() -> None:
    compiled = torch.compile(MODULES["linear"](), backend="aot_eager")
    before = dict(compiled.__dict__)
    with CompiledStage(compiled, Deferral(compiled)).running(split=True):
        compiled(start())
    assert compiled.__dict__ == before


def test_any_backend_compiles_the_parts() -> None:
    """A backend of the user's own sees three graphs: the forward, and the two parts of the backward."""
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        seen.append(len(examples))
        return graph.forward

    torch.manual_seed(0)
    module = MODULES["linear"]()
    twin = copy.deepcopy(module)
    found = in_two(twin, torch.compile(twin, backend=backend), start())
    assert all(map(torch.equal, plain(module, start()), found))
    assert len(seen) == 3


def test_a_backward_that_cannot_be_cut_gives_its_gradients_in_the_input_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were lost: the graph was called with aliases of its parameters, of which only the second part would have known."""
    monkeypatch.setattr("penstock.backward.partition_backward._has_effects", lambda graph: True)
    monkeypatch.setattr("penstock.stage.deferred._SAID", set())
    torch.manual_seed(0)
    module = MODULES["linear"]()
    want = plain(copy.deepcopy(module), start())
    compiled: Any = torch.compile(module, backend="aot_eager")
    fired: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    x = start().requires_grad_()
    torch.manual_seed(0)
    with pytest.warns(penstock.errors.NotDeferred, match="whose backward has effects"):
        output, pending = run_compiled(Deferral(compiled), compiled, (x,), {})
    backward_input([output.pow(2).sum()], [None], pending, inputs=[x])
    backward_weight(pending)
    assert x.grad is not None
    got = [x.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(map(torch.equal, got, want))  # type: ignore[arg-type]
    assert sorted(fired) == sorted(name for name, _ in module.named_parameters())


def test_outside_of_an_input_pass_a_backward_is_in_one_piece() -> None:
    torch.manual_seed(0)
    module = MODULES["transformer"]()
    twin = copy.deepcopy(module)
    whole = torch.compile(twin, backend=SplitBackend("aot_eager"))
    expected = plain(module, start())
    leaf = shaped(module, start()).clone().requires_grad_()
    torch.manual_seed(0)
    whole(leaf).pow(2).sum().backward()
    assert all(map(torch.equal, expected, [leaf.grad, *(p.grad for p in twin.parameters())]))
