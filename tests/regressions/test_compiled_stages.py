"""Compiled stages that trained something else than they were asked to, each with its story."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from penstock.backward.compile_stage import compile_in_place
from penstock.backward.recompute import recomputing
from penstock.run import Schedule
from penstock.stage.backward import Deferral, backward_input, backward_weight
from penstock.stage.intercept import intercepted
from tests.run.pipes import WIDTH, batch, close, grads_of, loop_grads, on_ranks
from tests.stage.compiled_forward import run_compiled

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare(name: str, kind: type[nn.Module], *, compiled: tuple[int, ...] | None = None, steps: int = 2) -> None:
    """A pipeline of such stages, all of them or some compiled, has the gradients of a plain loop."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [kind().double() for _ in range(4 if name == "zbv" else 2)]
    x, y = batch(6)

    def run(schedule: Schedule, rank: int) -> None:
        for _ in range(steps):
            for module in modules:
                module.zero_grad()
            schedule.step(x, target=y)

    for index, module in enumerate(modules):
        if compiled is None or index in compiled:
            compile_in_place(module, {"backend": "aot_eager"})
    on_ranks(name, 2, 3, run, modules=modules)
    got = grads_of(modules)
    for module in modules:
        module._compiled_call_impl = None
    assert close(got, loop_grads(modules, x, y, 3))


def hears_once(name: str, kind: type[nn.Module]) -> None:
    """Each parameter of a pipeline of such stages, all of them compiled, hears of its gradient once a microbatch."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [kind().double() for _ in range(4 if name == "zbv" else 2)]
    fired: list[str] = []
    for index, module in enumerate(modules):
        compile_in_place(module, {"backend": "aot_eager"})
        for key, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, key=f"{index}.{key}": fired.append(key))
    x, y = batch(6)
    on_ranks(name, 2, 3, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    names = [f"{index}.{key}" for index, module in enumerate(modules) for key, _ in module.named_parameters()]
    assert {key: fired.count(key) for key in names} == dict.fromkeys(names, 3)


# -- a graph that goes through AOTAutograd's runtime


class ChangesInPlace(nn.Module):
    """In three graphs, of which the second changes what the first has made, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        h.mul_(self.scale)
        torch._dynamo.graph_break()
        return self.last(h)


class ReturnsAView(nn.Module):
    """In three graphs, of which the second returns a view of what the first has made, and then what it has made itself.
    Batch norms need AOTAutograd's runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last, self.last_norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first_norm(self.first(x))
        torch._dynamo.graph_break()
        v = h.view(-1, 2)
        y = self.last_norm(self.last(h))
        torch._dynamo.graph_break()
        return y + v.reshape(y.shape)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", [ChangesInPlace, ReturnsAView])
def test_a_graph_is_found_by_what_it_made_and_not_by_its_first_output(kind: type[nn.Module], name: str) -> None:
    """The parameters of a graph are noted on its node among autograd's. That was looked for behind the first output with a
    history: a graph that only changes an input has no output, and its parameters got no gradient; an output that was a view of an
    input led to the graph before, which then gave its gradients to the parameters of this one."""
    compare(name, kind)


class UsedInEveryPiece(nn.Module):
    """Its weights are in three graphs, the first of which is given nothing that needs a gradient in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x))
        torch._dynamo.graph_break()
        h = self.norm(self.linear(h))
        torch._dynamo.graph_break()
        return self.linear(h)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_weight_of_several_graphs_hears_of_all_of_them_at_once(name: str) -> None:
    """Where no input needed a gradient, a graph was called with the parameters themselves: these heard of it from autograd, and
    again of the other graphs. An optimizer in such a hook took two steps, each with a part of the gradient."""
    hears_once(name, UsedInEveryPiece)


@torch._dynamo.disable
def eagerly(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


class UsedOutside(nn.Module):
    """Its first layer is in a graph, and is called once more by code that torch.compile must not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(eagerly(self.first, torch.relu(self.first(x))))


@torch._dynamo.disable
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sum(0)


class ScaledOutside(UsedOutside):
    """The same with code that is no layer, and graphs that need AOTAutograd's runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(scaled(self.norm(self.first(x)), self.first.weight)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv"])
@pytest.mark.parametrize("kind", [UsedOutside, ScaledOutside])
def test_a_weight_of_a_graph_and_of_eager_code_hears_of_both_in_one_backward(kind: type[nn.Module], name: str) -> None:
    """A stage that is compiled in pieces did the weight part of its graphs after autograd had been through the eager code: a hook
    heard of each, and an optimizer in it took two steps a microbatch. Zero bubble did so longer than others."""
    hears_once(name, kind)
    compare(name, kind)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_a_weight_of_a_graph_and_of_the_loss_hears_of_both_in_one_backward(name: str) -> None:
    """A stage that is compiled as a whole was taken for the only user of its weights; a loss may hold them small."""
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH).double() for _ in range(4 if name == "zbv" else 2)]
    used = modules[-1]
    runs: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        runs.append(recomputing())
        return nn.functional.mse_loss(output, target) + used.weight.square().sum()

    fired: list[str] = []
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    used.weight.register_post_accumulate_grad_hook(lambda _: fired.append("weight"))
    used.bias.register_post_accumulate_grad_hook(lambda _: fired.append("bias"))
    x, y = batch(6)

    def run(schedule: Schedule, rank: int) -> None:
        for _ in range(2):
            schedule.step(x, target=y)

    on_ranks(name, 2, 3, run, modules=modules, loss_fn=loss)
    assert (fired.count("weight"), fired.count("bias")) == (6, 6)
    assert (runs.count(False), runs.count(True)) == (6, 0)  # the first step shows it, and no forward is run again
    got = grads_of(modules)
    model = nn.Sequential(*modules)
    model.zero_grad()
    for module in modules:
        module._compiled_call_impl = None
    for rows, labels in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        (loss(model(rows), labels) * (2 / 3)).backward()  # two steps, a third of the rows
    assert close(got, grads_of(modules))


class Keeps(UsedOutside):
    """Changes its input in place, and counts its calls in an attribute, in a list and in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.count = 0, [], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return super().forward(x)

    @torch._dynamo.disable
    def change(self, x: Tensor) -> None:
        x.mul_(1.5)
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1


def as_fully_shard_does(module: nn.Module) -> nn.Module:
    """Of a class that torch has derived from the user's."""
    module.__class__ = type("FSDPKeeps", (type(module),), {"__module__": "torch.distributed.fsdp"})
    return module


@pytest.mark.parametrize("made", [nn.Module.train, as_fully_shard_does])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_forward_that_is_run_again_for_its_weights_leaves_no_trace_of_the_first_run(
    name: str, made: Callable[[nn.Module], nn.Module]
) -> None:
    """Random numbers and buffers were put back. An input that the stage changes in place was changed twice, so that the
    microbatch had another loss and other gradients, and counters were one too high."""
    torch.manual_seed(0)
    modules = [made(Keeps().double()) for _ in range(2)]
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    x, y = batch(6)
    given = x.clone()
    on_ranks(name, 2, 3, lambda schedule, rank: schedule.step(given, target=y), modules=modules)
    torch.testing.assert_close(given, x * 1.5)
    for module in modules:
        assert (module.calls, module.seen, module.count) == (3, [1, 2, 3], 3)
        module._compiled_call_impl = None
    got = grads_of(modules)
    model = nn.Sequential(*modules)
    model.zero_grad()
    for rows, labels in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        (nn.functional.mse_loss(model(rows), labels) / 3).backward()
    assert close(got, grads_of(modules))


class OfTheUser(nn.Linear):
    """A layer whose attributes are put back."""


@pytest.mark.filterwarnings("error::penstock.errors.NotCompiled")
def test_a_graph_that_is_called_again_at_once_is_known_to_be_one() -> None:
    """The call of a stage was put back to that which asks whether there is a graph, and then went past the one that answers."""
    torch.manual_seed(0)
    modules = [OfTheUser(WIDTH, WIDTH).double() for _ in range(2)]
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) + modules[-1].weight.square().sum()

    x, y = batch(6)
    on_ranks("zb-h1", 2, 3, lambda schedule, rank: schedule.step(x, target=y), modules=modules, loss_fn=loss)


class CountingLoss(nn.Module):
    """Has a weight of the last stage, a norm, and a counter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.norm = nn.BatchNorm1d(WIDTH).double()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.mse_loss(self.norm(output @ self.weight), target)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_loss_that_is_run_again_for_its_weights_counts_each_microbatch_once(name: str) -> None:
    """The buffers of a loss that is a module were not put back: its batch norms saw the first microbatch twice."""
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    loss = CountingLoss(modules[-1])
    expected = copy.deepcopy(loss.norm)
    seen: list[Tensor] = []

    def look_on(norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not recomputing():
            seen.append(args[0].detach())

    loss.norm.register_forward_hook(look_on)
    x, y = batch(6)
    on_ranks(name, 2, 3, lambda schedule, rank: schedule.step(x, target=y), modules=modules, loss_fn=loss)
    assert (len(seen), loss.calls) == (3, 3)
    for one in seen:
        expected(one)
    for mine, other in zip(loss.norm.buffers(), expected.buffers(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_weights_that_were_put_in_the_place_of_others_hear_once_too(name: str) -> None:
    """What other code uses was known by the parameters of the first step. Those that `load_state_dict(assign=True)` puts there
    have the same guards, so nothing is compiled again, and their hooks fired for the graph and for the other code."""
    torch.manual_seed(0)
    modules = [ScaledOutside().double() for _ in range(2)]
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    fired: list[str] = []
    x, y = batch(6)

    def run(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)
        module = modules[rank]
        module.load_state_dict({key: value.clone() for key, value in module.state_dict().items()}, assign=True)
        for key, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, key=f"{rank}.{key}": fired.append(key))
        schedule.step(x, target=y)

    on_ranks(name, 2, 3, run, modules=modules)
    names = [f"{index}.{key}" for index, module in enumerate(modules) for key, _ in module.named_parameters()]
    assert {key: fired.count(key) for key in names} == dict.fromkeys(names, 3)


class EagerBehindAGraph(nn.Module):
    """A graph, and behind it an eager layer whose weight is also used otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager")
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.graph(x)) + self.layer.weight.mean()


def test_a_graph_before_a_layer_that_is_used_in_two_ways_keeps_its_gradient() -> None:
    """The first microbatch shows that a deferred weight is used in two ways, and its backward then runs twice. The weight work of
    graphs was taken from the first of these runs, in which graphs before the first deferred layer do not take part."""
    module = EagerBehindAGraph().double()
    x = torch.randn(2, WIDTH, dtype=torch.double, requires_grad=True)
    output, pending = run_compiled(Deferral(module), module, (x,), {})
    backward_input([output.sum()], [None], pending, inputs=[x])
    backward_weight(pending)
    got = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    module(x).sum().backward()
    for mine, expected in zip(got, (parameter.grad for parameter in module.parameters()), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_weight_of_a_graph_and_of_eager_code_hears_of_both_in_one_weight_pass() -> None:
    """The weight pass asked whether modules beside the compiled ones share their weights, and not what had run."""
    module = UsedOutside()
    compiled = torch.compile(module, backend="aot_eager")
    fired: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    x = torch.randn(2, WIDTH, requires_grad=True)
    output, pending = run_compiled(Deferral(compiled), compiled, (x,), {})
    backward_input([output.sum()], [None], pending, inputs=[x])
    backward_weight(pending)
    assert sorted(fired) == sorted(name for name, _ in module.named_parameters())


class TwoTables(nn.Module):
    """Two tables are added, of which one is kept flat: the graph returns one gradient, seen in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table, self.flat = nn.Parameter(torch.zeros(2, WIDTH)), nn.Parameter(torch.zeros(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.table + self.flat.view(2, WIDTH)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_gradients_that_a_graph_returns_in_one_memory_are_kept_apart(name: str) -> None:
    """Autograd kept both as they came, and each later microbatch was added to both."""
    compare(name, TwoTables, steps=1)


# -- a run without data


@functools.cache
def mask(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.float64).tril()


@functools.cache
def numbers(size: int) -> tuple[Tensor, ...]:
    return torch.tensor([float(n) for n in range(size)], dtype=torch.float64), torch.arange(size)


class Cached(nn.Module):
    """What is computed once is kept behind a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ mask(x.shape[-1]) + numbers(x.shape[-1])[0]


class CachedInAnAttribute(Cached):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.mask = self.linear.weight.new_ones(WIDTH, WIDTH).tril()
        return self.linear(x) @ self.mask


class CachedInADictionary(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if WIDTH not in self.masks:
            self.masks[WIDTH] = x.new_ones(WIDTH, WIDTH).tril()
        return self.linear(x) @ self.masks[WIDTH]


class CachedAsABuffer(Cached):
    def forward(self, x: Tensor) -> Tensor:
        if "mask" not in self._buffers:
            self.register_buffer("mask", x.new_ones(WIDTH, WIDTH).tril(), persistent=False)
        return self.linear(x) @ self.mask


class ValueAsABuffer(Cached):
    def forward(self, x: Tensor) -> Tensor:
        if "mean" not in self._buffers:
            self.register_buffer("mean", x.detach().mean() * 0, persistent=False)
        return self.linear(x) + self.mean


KEPT: dict[str, Tensor] = {}  # outside of all modules


class CachedByItsShape(Cached):
    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        if "mask" not in KEPT:
            KEPT["mask"] = torch.ones_like(self.linear.weight).tril() * x.new_full((WIDTH,), 2)
        return self.linear(x) @ KEPT["mask"]


class CachedByItsValue(Cached):
    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        if "mean" not in KEPT:
            KEPT["mean"] = x.detach().mean()
        return self.linear(x) + KEPT["mean"]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function:UserWarning")
@pytest.mark.parametrize("compiled", [None, (1,)])
@pytest.mark.parametrize(
    "kind",
    [Cached, CachedInAnAttribute, CachedInADictionary, CachedAsABuffer, ValueAsABuffer, CachedByItsShape],
)
def test_a_run_without_data_leaves_nothing_of_it_behind(
    kind: type[nn.Module], compiled: tuple[int, ...] | None
) -> None:
    """Before ranks compile, every stage runs on placeholders, compiled or not. What it computed then and kept, a mask, must be
    what it would have been, or be put back."""
    mask.cache_clear()
    numbers.cache_clear()
    KEPT.clear()
    compare("1f1b", kind, compiled=compiled)


def test_what_a_run_without_data_left_behind_all_the_same_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """What code keeps outside of its modules cannot be put back. It is NaN, so that no number follows from it unseen."""
    KEPT.clear()
    modules: list[nn.Module] = [CachedByItsValue().double() for _ in range(2)]
    compile_in_place(modules[1], {"backend": "aot_eager"})
    x, y = batch(6)
    on_ranks("1f1b", 2, 3, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    assert any(record.getMessage().startswith("stage 0 gave NaN for microbatch 0") for record in caplog.records)
    assert all(grad.isnan().any() for grad in grads_of(modules))


class Counting(Cached):
    """Counts its calls in a tensor that is no buffer, and changes a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())
        self.level = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.level.data.add_(1)
        return self.linear(x)


def test_a_run_without_data_changes_no_tensor() -> None:
    """Counters that are no buffers were one too high."""
    modules = [Counting().double() for _ in range(2)]
    compile_in_place(modules[1], {"backend": "aot_eager"})
    x, y = batch(6)
    on_ranks("1f1b", 2, 3, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    for module in modules:
        assert module.calls == 3
        assert torch.equal(module.level, torch.full_like(module.level, 3))


# -- functions that are swapped while a stage runs


def test_what_is_swapped_in_a_step_has_the_names_of_torch() -> None:
    """Inductor names kernels after functions of torch when it is first imported. Where that was in a step with W (a backend of
    the user's own around inductor), it wrote `_addmm`, a name of penstock's, into the code in its cache on disk, and other
    programs that found it there failed: 'KernelNamespace' object has no attribute '_addmm'."""
    with intercepted():
        assert torch.addmm.__name__ == "addmm"
        assert nn.functional.linear.__name__ == "linear"
