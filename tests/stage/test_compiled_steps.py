"""Compiled stages in steps: hooks, guards, stances and gradients of inputs are what they are without a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from penstock.backward.compile_stage import compile_in_place
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import NotDeferred, PenstockError
from penstock.run import Schedule, Schedule1F1B
from penstock.stage import PipelineStage
from penstock.stage.backward import Deferral, backward_input, backward_weight
from tests.run.pipes import WIDTH, batch, close, grads_of, loop_grads, make_modules, on_ranks
from tests.stage.compiled_forward import run_compiled

# torch.compile looks at `.grad` of slices of the batch
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.flip = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(-h if self.flip else h)


class Noting(Layers):
    """Leaves something behind: a tensor of its graph, which somebody may differentiate later."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.first(x))
        return self.second(self.last)


def test_gradients_go_on_to_what_an_input_was_made_of() -> None:
    """From the second microbatch on they were left on the slice of the batch, and all other rows of its gradient were zeros."""
    torch.manual_seed(0)
    layers, rows, target = [nn.Linear(4, 4), nn.Linear(4, 4)], torch.randn(8, 4), torch.randn(8, 4)

    def rank(transport: LocalTransport, compile: Any) -> Tensor | None:  # noqa: A002  the option's name
        stage = PipelineStage(layers[transport.rank], transport.rank, 2, "cpu", group=transport, compile=compile)
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            x = rows.clone().requires_grad_()
            schedule.step(*((x,) if not transport.rank else ()), target=target if transport.rank else None)
        return x.grad

    plain, compiled = (LocalWorld(2).run(rank, way)[0] for way in (False, {"backend": "aot_eager"}))
    assert plain is not None
    assert compiled is not None
    torch.testing.assert_close(compiled, plain)
    assert compiled.abs().sum(1).gt(0).all()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_guards_decide_which_code_runs(name: str) -> None:
    torch.manual_seed(0)
    modules: list[Any] = [Layers().double() for _ in range(2)]
    x, y = batch(8)
    want = [grad.clone() for grad in loop_grads(modules, x, y, 4)]
    other = copy.deepcopy(modules)
    other[0].flip = True
    want = [one + two for one, two in zip(want, loop_grads(other, x, y, 4), strict=True)]
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})

    def steps(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)
        if rank == 0:
            modules[0].flip = True
        schedule.step(x, target=y)

    on_ranks(name, 2, 4, steps, modules=modules)
    assert close(grads_of(modules), want)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_tensor_that_a_stage_keeps_can_be_differentiated(name: str) -> None:
    modules: list[Any] = [Noting().double() for _ in range(2)]
    x, y = batch(8)
    want = loop_grads(modules, x, y, 4)
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    on_ranks(name, 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    assert close(grads_of(modules), want)
    assert all(module.last.grad_fn is not None for module in modules)


class Adding(nn.Module):
    """The gradient of its input is also what the weight pass needs; that of the skip is the same once more."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.zeros(3, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.layer((x + skip + self.shift).view(3, 4))


def test_others_may_add_to_the_gradient_of_an_input_before_the_weight_pass() -> None:
    """Another stage of the rank that reads the same value does, in place. The gradient of `shift` then grew by it, too."""
    torch.manual_seed(0)
    module = Adding()
    compiled: Any = torch.compile(module, backend="aot_eager")
    deferral = Deferral(compiled)
    want = torch.ones(3, 4) @ module.layer.weight.detach()
    for _ in range(2):
        module.zero_grad()
        x, skip = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        output, pending = run_compiled(deferral, compiled, (x, skip), {})
        backward_input([output], [torch.ones(3, 4)], pending, inputs=[x, skip])
        assert x.grad is not None
        x.grad.add_(5)
        backward_weight(pending)
        assert module.shift.grad is not None
        assert skip.grad is not None
        torch.testing.assert_close(module.shift.grad, want)
        torch.testing.assert_close(skip.grad, want)


def test_code_that_is_to_run_eagerly_does_for_every_microbatch() -> None:
    """A user who looks for something in a forward; from the second call on, what had been compiled before was run."""
    modules: list[Any] = [torch.compile(module, backend="aot_eager") for module in make_modules(2)]
    x, y = batch(8)
    seen: list[str] = []
    for module in modules:
        module.register_forward_hook(lambda module, args, output: seen.append(output.grad_fn.name()))

    def steps(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    on_ranks("1f1b", 2, 4, steps, modules=modules)
    assert not any("Tanh" in name for name in seen)
    seen.clear()
    with torch.compiler.set_stance("force_eager"):
        on_ranks("1f1b", 2, 4, steps, modules=modules)
    assert all("Tanh" in name for name in seen)


def test_hooks_that_come_and_go_between_steps_are_heard() -> None:
    """torch.compile traces hooks with their module and does not look at them again: they were not called, or for ever."""
    x, y = batch(8)

    def run(options: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
        modules = make_modules(2)
        fired: list[str] = []
        for module in modules if options else ():
            compile_in_place(module, options)

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


def user_backend(seen: list[int]) -> Any:
    def backend(graph: fx.GraphModule, examples: list[Any]) -> Any:
        seen.append(len(examples))
        return graph.forward

    return backend


@pytest.mark.parametrize(("name", "graphs"), [("1f1b", 1), ("zb-h1", 3)])
def test_full_backwards_run_what_the_user_has_compiled_as_it_is(name: str, graphs: int) -> None:
    """Under a split backward the same backend compiles a forward and two parts of a backward."""
    torch.manual_seed(0)
    plain: list[Any] = [Layers().double() for _ in range(2)]
    seen: list[int] = []
    backend = user_backend(seen)
    modules = [plain[0], torch.compile(plain[1], backend=backend)]
    x, y = batch(8)
    want = loop_grads(plain, x, y, 4)
    on_ranks(name, 2, 4, lambda schedule, rank: [schedule.step(x, target=y) for _ in "ab"], modules=modules)
    assert close([grad / 2 for grad in grads_of(plain)], want)
    assert len(seen) == graphs


def test_parts_with_different_backends_keep_their_backward_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stage.deferred._SAID", set())
    torch.manual_seed(0)
    plain: list[Any] = [Layers().double() for _ in range(2)]
    x, y = batch(8)
    want = loop_grads(plain, x, y, 4)
    seen: tuple[list[int], list[int]] = [], []
    plain[1].first = torch.compile(plain[1].first, backend=user_backend(seen[0]))
    plain[1].second = torch.compile(plain[1].second, backend=user_backend(seen[1]))
    with pytest.warns(NotDeferred, match="compiled by different backends"):
        on_ranks("zb-h1", 2, 4, lambda schedule, rank: [schedule.step(x, target=y) for _ in "ab"], modules=plain)
    assert close([grad / 2 for grad in grads_of(plain)], want)
    assert [len(one) for one in seen] == [1, 1]


def test_a_failed_input_pass_leaves_nothing_for_the_next_backward() -> None:
    """The node of a graph had announced whose gradients its backward would leave, and then refused to run."""
    torch.manual_seed(0)
    module = Layers()
    plain = copy.deepcopy(module)
    compile_in_place(module, {"backend": "aot_eager"})
    x = torch.randn(3, WIDTH, requires_grad=True)
    output, pending = run_compiled(Deferral(module), module, (x,), {})
    with torch.no_grad():
        module.second.weight.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_input([output.sum()], [None], pending, inputs=[x])
    del output, pending
    module(x).sum().backward()
    plain(x.detach()).sum().backward()
    assert all(
        torch.equal(one.grad, two.grad) for one, two in zip(module.parameters(), plain.parameters(), strict=True)
    )


class Regularized(nn.Module):
    """Uses a weight in a compiled part and in eager code; `fails` makes the next forward raise."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Layers().double()
        self.part.compile(backend="aot_eager")
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            self.fails = False
            raise ArithmeticError("on purpose")
        weight = next(self.part.parameters())
        return x + self.part(x) + 0.01 * weight.square().sum()


def test_hooks_fire_once_a_microbatch_after_a_first_step_that_failed() -> None:
    """A first step that failed before any forward counted as one that had shown which weights other code uses: in later steps
    the gradient of such a weight was accumulated in I and again in W, and its hooks fired twice."""
    torch.manual_seed(0)
    stage = Regularized()
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double(), stage]
    heard: list[int] = []
    counts: list[int] = []
    stage.part.first.weight.register_post_accumulate_grad_hook(lambda _: heard.append(1))
    x, y = batch(8)

    def rank(schedule: Schedule, rank: int) -> None:
        stage.fails = True
        with pytest.raises((PenstockError, ArithmeticError)):
            schedule.step(x, target=y)
        for _ in range(3):
            if rank == 1:
                heard.clear()
            schedule.step(x, target=y)
            if rank == 1:
                counts.append(len(heard))

    on_ranks("zb-h1", 2, 4, rank, modules=modules)
    assert counts == [4, 4, 4]
