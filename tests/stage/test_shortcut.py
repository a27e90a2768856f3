"""Compiled stages called past torch.compile's frames and past autograd: only where that makes no difference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import StageError
from penstock.run import Schedule, Schedule1F1B
from penstock.stage import PipelineStage
from penstock.stage.cut_graph import accumulate_graphs, collecting
from penstock.stage.shortcut import HeldGraph
from penstock.stage.twins import CompiledParts
from tests.run.pipes import batch, close, grads_of, loop_grads, make_modules, on_ranks


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layers(nn.Module):
    """Two outputs that need a gradient, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.flip = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        h = -h if self.flip else h
        return self.second(h), h, h.argmax(1)


class Noting(Layers):
    """Leaves something behind: a tensor of its graph, which somebody may differentiate later."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        self.noted = output[1]
        return output[0]


class PassingOn(Layers):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[0], x


def made(kind: type[Layers]) -> tuple[Layers, Any, CompiledParts]:
    torch.manual_seed(0)
    module = kind()
    compiled: Any = torch.compile(module, backend="aot_eager")
    return module, compiled, CompiledParts(compiled, split=True)


def leaf(rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)).requires_grad_()


def test_the_same_gradients_without_a_graph_of_autograd() -> None:
    module, compiled, parts = made(Layers)
    plain = copy.deepcopy(module)
    with parts.running():
        for rows, given in ((3, (0, 1)), (3, (0,)), (3, (1,))):
            x, other = leaf(rows), leaf(rows)
            if parts.call_held((x,), {}) is None:  # before the first call of these sizes
                compiled(x.detach().requires_grad_())
            found = parts.call_held((x,), {})
            assert found is not None
            outputs, held = found
            assert outputs[0].is_leaf
            assert outputs[0].requires_grad
            assert not outputs[2].requires_grad
            want = plain(other)
            grads = [torch.ones_like(want[place]) for place in given]
            held.input_pass([outputs[place] for place in given], grads)
            assert x.grad is not None
            held.weight_pass(parts.listeners)
            torch.autograd.backward([want[place] for place in given], grads)
            assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
    for one, two in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile looks at slices
def test_gradients_go_on_to_what_an_input_was_made_of() -> None:
    """From the second microbatch on they were left on the slice of the batch, and all other rows of its gradient were zeros."""
    torch.manual_seed(0)
    layers, batch, target = [nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(8, 4), torch.randn(8, 4)

    def rank(transport: LocalTransport, compile: Any) -> Tensor | None:  # noqa: A002  the option's name
        stage = PipelineStage(layers[transport.rank], transport.rank, 2, "cpu", group=transport, compile=compile)
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            x = batch.clone().requires_grad_()
            schedule.step(*((x,) if not transport.rank else ()), target=target if transport.rank else None)
        return x.grad

    plain, compiled = (LocalWorld(2).run(rank, way)[0] for way in (False, {"backend": "aot_eager"}))
    assert plain is not None
    assert compiled is not None
    torch.testing.assert_close(compiled, plain)
    assert compiled.abs().sum(1).gt(0).all()


def test_guards_decide_which_code_runs() -> None:
    module, compiled, parts = made(Layers)
    with parts.running():
        compiled(leaf())
        module.flip = True
        assert parts.call_held((leaf(),), {}) is None
        assert torch.equal(compiled(leaf())[1], module(leaf())[1])
        found = parts.call_held((leaf(),), {})
        assert found is not None
        assert torch.equal(found[0][1], module(leaf())[1])
        module.first.weight = nn.Parameter(torch.ones(4, 4))  # another one that looks the same
        found = parts.call_held((leaf(),), {})
        assert found is not None
        assert torch.equal(found[0][1], module(leaf())[1])
        module.first.weight.requires_grad_(False)
        assert parts.call_held((leaf(),), {}) is None
        with torch.no_grad():
            assert parts.call_held((leaf(),), {}) is None


@pytest.mark.parametrize("kind", [Noting, PassingOn])
def test_what_does_more_than_return_outputs_stays_with_autograd(kind: type[Layers]) -> None:
    module, compiled, parts = made(kind)
    with parts.running():
        for _ in range(3):
            output = compiled(leaf())
        assert parts.call_held((leaf(),), {}) is None
        if isinstance(module, Noting):
            assert module.noted.grad_fn is not None
            assert module.noted.grad_fn is output.grad_fn


def test_hooks_around_a_compiled_module_are_called() -> None:
    _, compiled, parts = made(Layers)
    calls: list[int] = []
    with parts.running():
        compiled(leaf())
        assert parts.call_held((leaf(),), {}) is not None
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            assert parts.call_held((leaf(),), {}) is None
        compiled.register_forward_hook(lambda *_: calls.append(1))
        assert parts.call_held((leaf(),), {}) is None
        compiled(leaf())
    assert calls == [1]


def test_a_parameter_that_changes_before_the_backward_is_found_out() -> None:
    module, compiled, parts = made(Layers)
    with parts.running():
        compiled(leaf())
        found = parts.call_held((leaf(),), {})
        assert found is not None
        with torch.no_grad():
            module.second.weight.mul_(2)
        with pytest.raises(StageError, match="changed in place between a forward and its backward"):
            found[1].input_pass(found[0][:1], [torch.ones(3, 4)])


def test_an_output_that_changes_before_the_backward_is_found_out() -> None:
    """The stage after it may be on the same rank, and read the same memory."""
    _, compiled, parts = made(Layers)
    with parts.running():
        compiled(leaf())
        found = parts.call_held((leaf(),), {})
        assert found is not None
        handed_over = found[0][1].detach()
        handed_over.mul_(2)
        with pytest.raises(StageError, match="changed in place between a forward and its backward"):
            found[1].input_pass(found[0][:1], [torch.ones(3, 4)])


class Adding(nn.Module):
    """The gradient of its input is also what the weight pass needs; that of the skip is the same once more."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.zeros(3, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.layer((x + skip + self.shift).view(3, 4))


@pytest.mark.parametrize("way", ["held", "by autograd"])
def test_others_may_add_to_the_gradient_of_an_input_before_the_weight_pass(way: str) -> None:
    """Another stage of the rank that reads the same value does, in place. The gradient of `shift` then grew by it, too."""
    torch.manual_seed(0)
    module = Adding()
    compiled: Any = torch.compile(module, backend="aot_eager")
    parts = CompiledParts(compiled, split=True)
    x, skip, want = leaf(), leaf(), torch.ones(3, 4) @ module.layer.weight.detach()
    with parts.running():
        output = compiled(x, skip)
        if way == "held":
            found = parts.call_held((x, skip), {})
            assert found is not None
            found[1].input_pass([found[0]], [torch.ones(3, 4)])
        else:
            with collecting() as work:
                output.backward(torch.ones(3, 4))
        assert x.grad is not None
        x.grad.add_(5)
        found[1].weight_pass(None) if way == "held" else accumulate_graphs(work)
    assert module.shift.grad is not None
    assert skip.grad is not None
    torch.testing.assert_close(module.shift.grad, want)
    torch.testing.assert_close(skip.grad, want)


def test_code_that_is_to_run_eagerly_does_for_every_microbatch() -> None:
    """A user who looks for something in a forward; from the second call on, what had been compiled before was run."""
    _, compiled, parts = made(Layers)
    with parts.running():
        compiled(leaf())
    with torch.compiler.set_stance("force_eager"), parts.running():
        for _ in range(2):
            assert parts.call_held((leaf(),), {}) is None
            assert compiled(leaf())[0].grad_fn.name() == "AddmmBackward0"


def test_anomalies_are_looked_for_by_autograd() -> None:
    _, compiled, parts = made(Layers)
    with parts.running():
        compiled(leaf())
        with torch.autograd.set_detect_anomaly(True):
            assert parts.call_held((leaf(),), {}) is None
        assert parts.call_held((leaf(),), {}) is not None


class Entry:
    """What torch.compile keeps for a piece of code, in some other torch."""

    def __init__(self, code: Any) -> None:
        self.instructions = code


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("_entries", lambda code: (), id="torch keeps its code elsewhere"),
        pytest.param("_entries", lambda code: [Entry(code)], id="torch keeps it in another form"),
        pytest.param("_KNOWN", frozenset({"RESUME", "LOAD_FAST", "RETURN_VALUE"}), id="Python writes it otherwise"),
    ],
)
def test_another_torch_or_python_takes_the_long_way(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"penstock.stage.shortcut.{name}", value)
    module, compiled, parts = made(Layers)
    plain = copy.deepcopy(module)
    with parts.running():
        for _ in range(3):
            assert parts.call_held((leaf(),), {}) is None
            compiled(leaf())[0].sum().backward()
            plain(leaf())[0].sum().backward()
        assert parts.parts[0].shortcuts.found == []
    for one, two in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_in_a_step_only_the_last_stage_needs_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second microbatch on, whatever the step; also where the backward comes in one piece."""
    passes: list[int] = []
    real = HeldGraph.input_pass

    def counted(held: HeldGraph, *given: Any) -> None:
        passes.append(1)
        real(held, *given)

    monkeypatch.setattr(HeldGraph, "input_pass", counted)
    modules = make_modules(2)
    x, y = batch(8)
    want = loop_grads(modules, x, y, 4)
    for module in modules:
        module.compile(backend="aot_eager")
    on_ranks("1f1b", 2, 4, lambda schedule, rank: [schedule.step(x, target=y) for _ in "ab"], modules=modules)
    assert close([grad / 2 for grad in grads_of(modules)], want)
    assert len(passes) == 3 + 4


def test_code_that_torch_has_forgotten_is_not_run_in_the_next_step() -> None:
    _, compiled, parts = made(Layers)
    with parts.running():
        compiled(leaf())
    with parts.running():
        assert parts.call_held((leaf(),), {}) is not None
    torch._dynamo.reset()
    with parts.running():
        assert parts.call_held((leaf(),), {}) is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_hooks_that_come_and_go_between_steps_are_heard() -> None:
    """torch.compile traces hooks with their module and does not look at them again: they were not called, or for ever."""
    x, y = batch(8)

    def run(options: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
        modules = make_modules(2)
        fired: list[str] = []
        for module in modules if options else ():
            module.compile(**options)

        def steps(schedule: Schedule, rank: int) -> None:
            schedule.step(x, target=y)
            module = modules[rank]
            inside = module.get_submodule("0").register_forward_hook(lambda layer, args, output: output * 2)
            module.register_forward_hook(lambda *_: fired.append("forward"))
            schedule.step(x, target=y)
            inside.remove()
            if rank:
                module.register_full_backward_hook(lambda *_: fired.append("backward"))
            schedule.step(x, target=y)

        on_ranks("zb-h1", 2, 4, steps, modules=modules)
        return grads_of(modules), sorted(fired)

    (grads, fired), (want, want_fired) = run({"backend": "aot_eager"}), run({})
    assert fired == want_fired == ["backward"] * 4 + ["forward"] * 16
    assert close(grads, want)
