"""Input pass plus weight pass == full backward: values, hooks and what waits, for modules of every kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.errors import NotDeferred, StageError
from penstock.stage.backward import Deferral, Pending, backward_input, backward_weight, run_backward_full, run_deferred

Make = Callable[[], nn.Module]


class Of(nn.Module):
    """A module of parts and a function of them."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def outputs_of(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple) else (value,)
    return [tensor for tensor in values if isinstance(tensor, Tensor) and tensor.requires_grad]


def count_hooks(module: nn.Module) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda _, name=name: counts.update([f"tensor {name}"]))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([f"post {name}"]))
    return counts


def grads_of(value: Tensor) -> Tensor:
    return torch.arange(value.numel(), dtype=value.dtype).sin().view_as(value)


def train(module: nn.Module, batches: list[Tensor], *, split: bool, needs: bool = True) -> dict[str, Any]:
    """Forward all microbatches, then differentiate all: several are in flight at once, twice over."""
    counts = count_hooks(module)
    found: dict[str, Any] = {}
    deferral = Deferral(module)
    waited = 0
    for step in range(2):
        flights = []
        for batch in batches:
            x = batch.detach().requires_grad_(needs)
            value, pending = run_deferred(deferral, module, (x,), {}) if split else (module(x), Pending(deferral))
            flights.append((x, outputs_of(value), pending))
        for index, (x, outputs, pending) in enumerate(flights):
            found[f"outputs {step} {index}"] = [output.detach().clone() for output in outputs]
            grads = [grads_of(output) for output in outputs]
            if split:
                backward_input(outputs, grads, pending, inputs=[x])
            else:
                run_backward_full(outputs, grads)
            found[f"input {step} {index}"] = x.grad
            waited += pending.num_waiting + (pending.kept is not None)
        if split:
            for _, _, pending in flights:
                backward_weight(pending)
        for name, parameter in module.named_parameters():
            found[f"{name} {step}"] = None if parameter.grad is None else parameter.grad.clone()
    found["hooks"] = dict(counts)
    found["waited"] = waited
    return found


def assert_same(full: dict[str, Any], split: dict[str, Any], *, exact: bool = True) -> None:
    assert full.keys() == split.keys()
    for name, value in full.items():
        other = split[name]
        if name == "waited":
            continue
        for a, b in zip(value, other, strict=True) if isinstance(value, list) else [(value, other)]:
            if not isinstance(a, Tensor):
                assert a == b, name
            elif exact:
                assert torch.equal(a, b), f"{name}: off by {(a - b).abs().max()}"
            else:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def compare(make: Make, batches: list[Tensor], *, exact: bool = True, needs: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    full = train(make(), batches, split=False, needs=needs)
    torch.manual_seed(0)
    split = train(make(), batches, split=True, needs=needs)
    assert_same(full, split, exact=exact)
    return split


def batches(*shape: int, dtype: torch.dtype = torch.float64, count: int = 3) -> list[Tensor]:
    return [torch.arange(torch.Size(shape).numel(), dtype=dtype).add(k).cos().view(shape) for k in range(count)]


def mlp(dtype: torch.dtype = torch.float64, *, bias: bool = True, act: nn.Module | None = None) -> nn.Sequential:
    act = act or nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8, bias), act, nn.Linear(8, 8, bias), act, nn.Linear(8, 4, bias)).to(dtype)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        if name.startswith(names):
            parameter.requires_grad_(False)
    return module


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (2, 3, 6), (2, 2, 3, 6), (0, 6), (6,)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_every_shape_and_dtype_give_the_same_bits(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    split = compare(lambda: mlp(dtype, bias=bias), batches(*shape, dtype=dtype))
    assert split["waited"] == (0 if len(shape) == 1 else 18)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x.transpose(0, 1)[0],
        lambda x: x[0].t().contiguous().t(),
        lambda x: x[0, :1].expand(7, -1),
        lambda x: torch.cat([x, x], -1)[..., 3:9],
    ],
)
def test_inputs_of_any_layout(view: Callable[[Tensor], Tensor], bias: bool) -> None:
    def make() -> nn.Module:
        layers = nn.Linear(6, 5, bias), nn.Linear(5, 3, bias)
        return Of(lambda m, x: m.b(torch.relu(m.a(view(x)))), a=layers[0], b=layers[1]).double()

    assert compare(make, batches(2, 4, 6))["waited"] == 12


@pytest.mark.parametrize(
    "names", ["0.", "2.", "4.", "0. 2.", "2. 4.", "0. 2. 4.", "2.weight", "2.bias", "0.weight 4.bias"]
)
@pytest.mark.parametrize("needs", [True, False])
def test_frozen_prefix_middle_and_suffix(names: str, needs: bool) -> None:
    compare(lambda: frozen(mlp(), *names.split()), batches(5, 6), needs=needs)


def test_a_stage_whose_inputs_need_no_gradient_waits_for_the_weight_pass() -> None:
    module, deferral = mlp(), Deferral()
    value, pending = run_deferred(deferral, module, (batches(2, 6)[0],), {})
    backward_input([value], [grads_of(value)], pending, inputs=[])
    assert all(parameter.grad is None for parameter in module.parameters())
    backward_weight(pending)
    assert all(parameter.grad is not None for parameter in module.parameters())


class Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class ReadyGradient(torch.autograd.Function):
    """A fused loss: its forward knows the gradient already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            rows, own = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.linear(rows, own).square().sum()
            ctx.save_for_backward(*torch.autograd.grad(loss, (rows, own)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, weight_grad * grad


class Conv1D(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


def twice(m: Any, x: Tensor) -> Tensor:
    return m.a(torch.tanh(m.a(torch.tanh(m.a(x)))))


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.mul_(2).add_(1)
    y[:, 0] = 1
    return m.b(y.tanh_())


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


MODULES: dict[str, tuple[Make, int | None]] = {
    "in-place activation": (lambda: mlp(act=nn.ReLU(inplace=True)), 3),
    "in-place operators": (lambda: Of(in_place, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), 2),
    "the same layer three times": (lambda: Of(twice, a=nn.Linear(6, 6)), 3),
    "weight used by linear and otherwise": (
        lambda: Of(lambda m, x: m.b(m.a(x)) + m.a.weight.sum(), a=nn.Linear(6, 6), b=nn.Linear(6, 6)), None),
    "bias used otherwise": (lambda: Of(lambda m, x: m.a(x) * m.a.bias, a=nn.Linear(6, 6)), None),
    "tied embedding and head": (
        lambda: tie(Of(lambda m, x: m.head(m.table(x.abs().long() % 5) + m.a(x)[..., None]),
                       table=nn.Embedding(5, 6), head=nn.Linear(6, 5, bias=False), a=nn.Linear(6, 6))), 1),
    "two layers with one weight": (
        lambda: tie(Of(lambda m, x: m.head(torch.tanh(m.table(x))), table=nn.Linear(6, 6), head=nn.Linear(6, 6))), 2),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 2)), 1),
    "parametrization": (lambda: parametrized(nn.Linear(6, 6)), 0),
    "merged LoRA": (
        lambda: Of(lambda m, x: F.linear(x, m.a.weight + m.down.weight.t() @ m.up.weight),
                   a=nn.Linear(6, 6).requires_grad_(False), down=nn.Linear(6, 2, False), up=nn.Linear(6, 2, False)), 0),
    "weight made of the input": (lambda: Of(lambda m, x: F.linear(m.a(x), x), a=nn.Linear(6, 6)), 1),
    "output is a view": (lambda: Of(lambda m, x: m.a(x).t()[1:], a=nn.Linear(6, 6)), 1),
    "output is the layer's": (lambda: nn.Linear(6, 6), 1),
    "several outputs, one from no layer": (
        lambda: Of(lambda m, x: (m.a(x), x * 2, m.b(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 2)), 2),
    "an output is an input": (lambda: Of(lambda m, x: (m.a(x), x), a=nn.Linear(6, 6)), 1),
    "an unused layer": (lambda: Of(lambda m, x: (m.b(x), m.a(x))[1], a=nn.Linear(6, 6), b=nn.Linear(6, 6)), 1),
    "a layer under no_grad": (lambda: Of(without_grad, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), 1),
    "a fused loss": (
        lambda: Of(lambda m, x: ReadyGradient.apply(m.a(x), m.b.weight), a=nn.Linear(6, 6), b=nn.Linear(6, 6)), 1),
    "no parameters": (lambda: Of(lambda m, x: x.relu()), 0),
    "input ignored": (lambda: Of(lambda m, x: m.a(torch.ones_like(x)), a=nn.Linear(6, 6)), 1),
    "norm and convolution": (
        lambda: Of(lambda m, x: m.a(m.conv(m.norm(x)[:, None])[:, 0]), a=nn.Linear(6, 6), norm=nn.LayerNorm(6),
                   conv=nn.Conv1d(1, 1, 3, padding=1)), 1),
    "batch norm, eval mode": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)).eval(), 2),
    "Conv1D of GPT-2": (lambda: nn.Sequential(Conv1D(6, 6), nn.Tanh(), Conv1D(6, 3)), 2),
    "linear and addmm with one weight": (
        lambda: Of(lambda m, x: torch.addmm(m.a.bias, m.a(x), m.a.weight), a=nn.Linear(6, 6)), 2),
    "addmm with factors": (lambda: Of(lambda m, x: torch.addmm(m.a.bias, x, m.a.weight, beta=2), a=nn.Linear(6, 6)), 0),
    "bias that is no parameter": (lambda: Of(lambda m, x: F.linear(x, m.a.weight, m.a.bias * 2), a=nn.Linear(6, 6)), 0),
    "keyword arguments": (
        lambda: Of(lambda m, x: F.linear(input=x, weight=m.a.weight, bias=m.a.bias), a=nn.Linear(6, 6)), 1),
    "vmap": (lambda: Of(lambda m, x: torch.vmap(lambda row: m.a(row[None])[0])(x), a=nn.Linear(6, 6)), 0),
    "functional gradient": (
        lambda: Of(lambda m, x: m.b(torch.func.grad(lambda y: m.a(y).square().sum())(x)),
                   a=nn.Linear(6, 6), b=nn.Linear(6, 6)), None),
}  # fmt: skip


def tie(module: Any) -> nn.Module:
    module.head.weight = module.table.weight
    return module


def parametrized(layer: nn.Linear) -> nn.Module:
    nn.utils.parametrize.register_parametrization(layer, "weight", Scale())
    return layer


def without_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.a(x)
    return m.b(x + y)


@pytest.mark.parametrize("name", MODULES)
def test_split_equals_full_and_defers_what_it_can(name: str) -> None:
    make, deferred = MODULES[name]
    split = compare(lambda: make().double(), batches(5, 6), exact="otherwise" not in name)
    if deferred is not None:
        assert split["waited"] == 6 * deferred


def test_attention_of_torch_defers_its_projections() -> None:
    assert compare(lambda: attention().double(), batches(2, 3, 6))["waited"] == 6 * 4


def test_module_backward_hooks_fire_once() -> None:
    calls: Counter[str] = Counter()

    def make() -> nn.Module:
        module = mlp()
        for name, part in module.named_modules():
            part.register_full_backward_hook(lambda *_, name=name: calls.update([name]))
            part.register_full_backward_pre_hook(lambda *_, name=name: calls.update([f"pre {name}"]))
        return module

    compare(make, batches(4, 6))
    assert set(calls.values()) == {12, 24} or set(calls.values()) == {12}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_checkpointing_recomputes_once_and_still_defers(reentrant: bool, bias: bool) -> None:
    runs: Counter[str] = Counter()

    def call(m: Any, x: Tensor) -> Tensor:
        def inner(layer: nn.Module, y: Tensor) -> Tensor:
            runs["any"] += 1
            return torch.tanh(layer(torch.tanh(y)))

        y = checkpoint(inner, m.b, m.a(x), use_reentrant=reentrant)
        return checkpoint(inner, m.c, y, use_reentrant=reentrant)

    split = compare(
        lambda: Of(call, a=nn.Linear(6, 6, bias), b=nn.Linear(6, 6, bias), c=nn.Linear(6, 6, bias)).double(),
        batches(4, 6),
    )
    assert split["waited"] == 6 * 3
    assert sum(runs.values()) == 2 * 6 * 2 * 2  # full and split; microbatches; regions; forward and recomputation


def test_checkpointed_inputs_are_not_kept_between_forward_and_backward() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
    value, pending = run_deferred(
        Deferral(),
        lambda x: checkpoint(module, x, use_reentrant=False),
        (torch.ones(8, 64).double().requires_grad_(),),
        {},
    )
    assert len(pending.calls()) == 2
    assert pending.records == []
    assert pending.work == []
    assert value.requires_grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_autocast_gives_the_same_bits(bias: bool, inside: bool, checkpointed: bool) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y = checkpoint(m.body, x, use_reentrant=False) if checkpointed else m.body(x)
        return m.last(y.float())

    split = compare(
        lambda: Of(call, body=mlp(torch.float32, bias=bias), last=nn.Linear(4, 2)), batches(3, 6, dtype=torch.float32)
    )
    assert split["waited"] == 6 * 4


def test_autocast_switched_on_and_off_between_microbatches() -> None:
    modes = [False, True, True, False, False, True] * 2

    def make() -> nn.Module:
        rest = iter(modes)

        def call(m: Any, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=next(rest)):
                return m.body(x).float()

        return Of(call, body=mlp(torch.float32))

    compare(make, batches(3, 6, dtype=torch.float32))


def test_weights_that_move_between_microbatches_are_seen() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        m.a.weight.data = m.a.weight.data * 2  # other storage
        m.a.bias.data.add_(1)
        return torch.tanh(m.a(x))

    compare(lambda: Of(call, a=nn.Linear(6, 6)).double(), batches(3, 6), exact=True)


def test_shapes_that_change_from_microbatch_to_microbatch() -> None:
    compare(mlp, [*batches(3, 6), *batches(5, 6), *batches(2, 3, 6), *batches(3, 6)])


def test_freezing_and_unfreezing_between_steps() -> None:
    results = []
    for split in (False, True):
        torch.manual_seed(0)
        module, deferral, grads = mlp(), Deferral(), []
        for name in ("0.weight", "0.bias", "4.weight", ""):
            frozen(module.requires_grad_(True), name) if name else module.requires_grad_(True)
            x = batches(3, 6)[0].requires_grad_()
            value, pending = run_deferred(deferral, module, (x,), {}) if split else (module(x), None)
            if pending is None:
                run_backward_full([value], [grads_of(value)])
            else:
                backward_input([value], [grads_of(value)], pending, inputs=[x])
                backward_weight(pending)
            grads += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        results.append(grads)
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_an_input_changed_in_place_after_its_layer_is_an_error() -> None:
    module = Of(lambda m, x: (y := x * 1, m.a(y), y.add_(1))[1] + 0 * y.sum(), a=nn.Linear(6, 6)).double()
    x = batches(3, 6)[0].requires_grad_()
    deferral = Deferral()
    value, pending = run_deferred(deferral, module, (x,), {})
    with pytest.raises(StageError, match="changed in place"):
        backward_input([value], [grads_of(value)], pending, inputs=[x])
    compare(mlp, batches(3, 6))


def test_each_pass_runs_once_and_in_order() -> None:
    module, x = mlp(), batches(3, 6)[0].requires_grad_()
    value, pending = run_deferred(Deferral(), module, (x,), {})
    with pytest.raises(StageError, match=r"backward_weight needs .* 'input', got 'forward'"):
        backward_weight(pending)
    backward_input([value], [grads_of(value)], pending, inputs=[x])
    with pytest.raises(StageError, match=r"backward_input needs .* 'forward', got 'input'"):
        backward_input([value], [grads_of(value)], pending, inputs=[x])
    backward_weight(pending)
    with pytest.raises(StageError, match="got 'weight'"):
        backward_weight(pending)


def test_a_loss_needs_no_gradient_and_outputs_without_one_take_no_part() -> None:
    module, x = mlp(), batches(3, 6)[0].requires_grad_()
    run_backward_full([module(x).sum()], [None])
    expected = x.grad
    x.grad = None
    y = module(x)
    run_backward_full([y, y * 3], [torch.ones_like(y), None])
    assert torch.equal(x.grad, expected)
    run_backward_full([y], [None])


def test_large_weights_go_to_the_engine_one_by_one_and_hooks_fire_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stage.batched.ENGINE_CALL_BYTES", 1)
    compare(mlp, batches(3, 6))
    compare(
        lambda: Of(lambda m, x: twice(m, m.b(twice(m, x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6)).double(),
        batches(3, 6),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (2, 2, 6)])
def test_equal_layers_are_batched_with_the_same_bits(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6, bias), nn.Tanh()) for _ in range(5))).to(dtype)

    assert compare(make, batches(*shape, dtype=dtype, count=5))["waited"] == 50
    compare(lambda: frozen(make(), "1.0.bias", "3.0.weight"), batches(*shape, dtype=dtype, count=5))


def test_batches_form_and_leave_gradients_of_their_own() -> None:
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    deferral = Deferral(module)
    for microbatch in range(4):
        x = torch.ones(4, 16, requires_grad=True)
        value, pending = run_deferred(deferral, module, (x,), {})
        backward_input([value], [grads_of(value)], pending, inputs=[x])
        assert len(pending.batches) == (microbatch >= 2)
        assert pending.num_waiting == 4
        module.zero_grad()
        module[1].bias.requires_grad_(microbatch != 3)
        backward_weight(pending)
        assert pending.num_waiting == 0
    assert all(p.grad.untyped_storage().nbytes() == p.nbytes for p in module.parameters() if p.requires_grad)
    assert [p.grad is None for p in module.parameters()] == [False, False, False, True, False, False, False, False]


def test_a_layer_that_one_microbatch_does_not_use() -> None:
    def make() -> nn.Module:
        turn = iter(range(100))

        def call(m: Any, x: Tensor) -> Tensor:
            values = [layer(x) for layer in m.layers]
            return sum(values[: 1 + next(turn) % 4])  # type: ignore[return-value]

        return Of(call, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(4))).double()

    compare(make, batches(4, 6, count=6))


def test_reentrant_checkpoint_beside_a_weight_used_in_two_ways() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(m.b(y)), m.a(x) * m.a.weight.sum(), use_reentrant=True)

    torch.manual_seed(0)
    module = Of(call, a=nn.Linear(6, 6), b=nn.Linear(6, 6)).double()
    full = train(module, batches(4, 6), split=False)
    module.zero_grad()
    split = train(module, batches(4, 6), split=True)
    full.pop("hooks"), split.pop("hooks")
    assert_same(full, split, exact=False)


class Float8Linear(nn.Linear):
    """Multiplies with its weight in 8 bits, as libraries for float8 do: not by `F.linear`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        rounded = (
            self.weight + (self.weight.detach().to(torch.float8_e4m3fn).to(self.weight.dtype) - self.weight).detach()
        )
        return input @ rounded.t() + self.bias


def test_layers_in_eight_bits_are_left_to_autograd_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stage.deferred._SAID", set())
    layer = nn.Sequential(Float8Linear(4, 4))
    with pytest.warns(NotDeferred, match=r"layers in 8 bits \(Float8Linear\) do all weight work in the input pass"):
        deferral = Deferral(layer)
    Deferral(layer)  # and not again
    x = torch.ones(2, 4, requires_grad=True)
    value, pending = run_deferred(deferral, layer, (x,), {})
    backward_input([value], [torch.ones_like(value)], pending, inputs=[x])
    assert pending.num_waiting == 0
    backward_weight(pending)
    assert layer[0].weight.grad is not None


def test_distributed_tensors_are_left_to_autograd_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stage.deferred._SAID", set())
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Shard(0)]))
        x = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()]).requires_grad_()
        with pytest.warns(NotDeferred, match=r"tensor-parallel weights \(DTensor\) do all weight work"):
            value, pending = run_deferred(Deferral(layer), layer, (x,), {})
        run_deferred(Deferral(layer), layer, (x,), {})  # and not again
        backward_input([value], [torch.ones_like(value)], pending, inputs=[x])
        assert pending.num_waiting == 0
        backward_weight(pending)
        assert isinstance(layer.weight.grad, DTensor)
    finally:
        dist.destroy_process_group()
