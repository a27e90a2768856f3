"""The cases of the parity tests: models, data and calls that a pipeline must do as a plain loop does.

Each function makes its case anew, with the same numbers every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.batch import Microbatches, Replicate, TensorChunkSpec
from tests.parity.harness import SEED, WIDTH, Case, MakeCase, Sizes, Step, given

DOUBLE = torch.float64
CASES: dict[str, MakeCase] = {}


def case(function: MakeCase) -> MakeCase:
    CASES[function.__name__] = function
    return function


# -- parts


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def blocks(sizes: Sizes, make: Callable[[], nn.Module] = block) -> list[nn.Module]:
    torch.manual_seed(SEED)
    return [make().to(DOUBLE) for _ in range(sizes.num_stages)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return given(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE))


def batch(sizes: Sizes, step: int = 0, *, per_microbatch: int = 2, extra: int = 0, **options: Any) -> Step:
    rows = per_microbatch * sizes.num_microbatches + extra
    return Step((random(rows, WIDTH, seed=2 * step),), random(rows, WIDTH, seed=2 * step + 1), **options)


def two_steps(sizes: Sizes, **options: Any) -> list[Step]:
    """A cold and a warm one."""
    return [batch(sizes, 0, **options), batch(sizes, 1, **options)]


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


class Adapter(nn.Module):
    """A stage around a function: `before` makes the block's input of the arguments, `after` the output of its output."""

    def __init__(self, before: Callable[..., Tensor], after: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block()
        self.before, self.after = before, after

    def forward(self, *args: Any) -> Any:
        return self.after(self.block(self.before(*args)), *args)


def nested(sizes: Sizes, wrap: Callable[[Tensor], Any], unwrap: Callable[..., Tensor]) -> list[nn.Module]:
    """Blocks that hand each other a nest; the first takes and the last returns a tensor."""
    torch.manual_seed(SEED)
    last = sizes.num_stages - 1

    def first_input(x: Tensor) -> Tensor:
        return x

    def keep(y: Tensor, *args: Any) -> Tensor:
        return y

    return [
        Adapter(first_input if index == 0 else unwrap, keep if index == last else lambda y, *args: wrap(y)).to(DOUBLE)
        for index in range(sizes.num_stages)
    ]


# -- the cases


@case
def plain(sizes: Sizes) -> Case:
    return Case(blocks(sizes), two_steps(sizes))


@case
def frozen_prefix(sizes: Sizes) -> Case:
    modules = blocks(sizes)
    for module in modules[: (len(modules) + 1) // 2]:
        freeze(module)
    return Case(modules, two_steps(sizes))


@case
def frozen_middle(sizes: Sizes) -> Case:
    modules = blocks(sizes)
    for module in modules[1:-1] or modules[:1]:
        freeze(module)
    return Case(modules, two_steps(sizes))


@case
def frozen_suffix(sizes: Sizes) -> Case:
    modules = blocks(sizes)
    for module in modules[len(modules) // 2 :]:
        freeze(module)
    return Case(modules, two_steps(sizes))


@case
def adapters_on_a_frozen_model(sizes: Sizes) -> Case:
    """As LoRA does: everything is frozen but one small layer in each stage."""
    modules = blocks(sizes)
    for module in modules:
        freeze(module)
        module[3].requires_grad_(True)  # type: ignore[index]
    return Case(modules, two_steps(sizes))


@case
def everything_frozen_but_the_last_layer(sizes: Sizes) -> Case:
    modules = blocks(sizes)
    for module in modules:
        freeze(module)
    modules[-1][3].requires_grad_(True)  # type: ignore[index]
    return Case(modules, two_steps(sizes))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.linear(x).chunk(3, dim=-1)
        both = torch.stack((first * second, third), dim=0)
        return both.transpose(0, 1).flatten(1)[:, ::2]  # every second column: not contiguous


@case
def noncontiguous_outputs(sizes: Sizes) -> Case:
    return Case(blocks(sizes, Turned), two_steps(sizes))


class View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(x.shape[0], 2, WIDTH)[:, 1]


@case
def view_outputs(sizes: Sizes) -> Case:
    return Case(blocks(sizes, View), two_steps(sizes))


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Reshape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, WIDTH)


@case
def stages_without_parameters(sizes: Sizes) -> Case:
    """One hands on its very input, one a view of it."""
    modules = blocks(sizes)
    for index in range(1, len(modules), 2):
        modules[index] = Same() if index % 4 == 1 else Reshape()
    return Case(modules, two_steps(sizes))


@case
def dict_outputs(sizes: Sizes) -> Case:
    def wrap(y: Tensor) -> dict[str, Any]:
        return {"hidden": y, "past": None, "count": 3, "scale": 0.5, "mask": y.detach() > 0, "rest": [y.sum(1), "word"]}

    def unwrap(value: dict[str, Any]) -> Tensor:
        assert value["past"] is None
        assert (value["count"], type(value["count"]), value["rest"][1]) == (3, int, "word")
        return value["hidden"] * value["scale"] + value["mask"] + value["rest"][0][:, None]

    return Case(nested(sizes, wrap, unwrap), two_steps(sizes))


@case
def tuple_outputs(sizes: Sizes) -> Case:
    def wrap(y: Tensor) -> tuple[Any, ...]:
        return y, None, 2, torch.arange(WIDTH), y * 2

    def unwrap(y: Tensor, nothing: None, number: int, places: Tensor, twice: Tensor) -> Tensor:
        assert nothing is None
        assert places.dtype is torch.int64
        return y * number + places + twice.sigmoid()

    return Case(nested(sizes, wrap, unwrap), two_steps(sizes))


@case
def list_outputs(sizes: Sizes) -> Case:
    return Case(nested(sizes, lambda y: [y, y.exp()], lambda y, e: y + e.log1p()), two_steps(sizes))


@dataclass
class Hidden:
    states: Tensor
    mask: Tensor | None
    steps: int


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@case
def dataclass_outputs(sizes: Sizes) -> Case:
    def unwrap(value: Hidden) -> Tensor:
        assert isinstance(value, Hidden)
        assert value.mask is None
        return value.states / value.steps

    return Case(nested(sizes, lambda y: Hidden(y, None, 2), unwrap), two_steps(sizes))


@case
def named_tuple_outputs(sizes: Sizes) -> Case:
    def unwrap(value: Pair) -> Tensor:
        assert isinstance(value, Pair)
        return value.left - value.right

    return Case(nested(sizes, lambda y: Pair(y, y.detach()), unwrap), two_steps(sizes))


@case
def unused_outputs(sizes: Sizes) -> Case:
    """The second and third output of a stage are never looked at; the third would need a gradient."""
    return Case(nested(sizes, lambda y: (y, y.new_zeros(3), y.pow(2)), lambda y, zeros, squares: y), two_steps(sizes))


@case
def last_output_in_a_nest(sizes: Sizes) -> Case:
    """What the last stage returns is for the loss and the user."""
    modules = blocks(sizes)
    last = Adapter(lambda x: x, lambda y, *args: {"logits": y, "hidden": (y * 2, None), "kind": "x"}).to(DOUBLE)
    modules[-1] = last

    def loss(output: dict[str, Any], target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output["logits"], target) + output["hidden"][0].mean()

    return Case(modules, two_steps(sizes), loss_fn=loss)


@case
def uneven_batch(sizes: Sizes) -> Case:
    """Weighted, so that the mean over the batch is what is differentiated."""
    steps = [batch(sizes, n, extra=extra) for n, extra in enumerate([1, 1, sizes.num_microbatches - 1])]
    return Case(blocks(sizes), steps)


class Sequence3(nn.Module):
    """(rows, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.mix(x.mean(1, keepdim=True))


def sequences(sizes: Sizes, length: int, seed: int, *, rows: int = 1) -> Step:
    shape = (rows * sizes.num_microbatches, length, WIDTH)
    return Step((random(*shape, seed=seed),), random(*shape, seed=seed + 1))


@case
def changing_length(sizes: Sizes) -> Case:
    """Shorter, longer, and shapes met before, in any order."""
    steps = [sequences(sizes, length, seed) for seed, length in enumerate([3, 5, 2, 5, 3, 3])]
    return Case(blocks(sizes, Sequence3), steps)


def _ragged(sizes: Sizes, seed: int) -> Step:
    lengths = [1 + (3 * m) % 4 for m in range(sizes.num_microbatches)]
    inputs = [random(2, n, WIDTH, seed=seed + m) for m, n in enumerate(lengths)]
    targets = [random(2, n, WIDTH, seed=seed + 50 + m) for m, n in enumerate(lengths)]
    return Step((Microbatches(inputs),), Microbatches(targets))


@case
def shapes_that_differ_between_microbatches(sizes: Sizes) -> Case:
    """A ready list of microbatches; the outputs cannot be put together, so the loss of each row is what comes out."""

    class Mean(Sequence3):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(1)

    modules = blocks(sizes, Sequence3)
    modules[-1] = Mean().to(DOUBLE)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target.mean(1))

    return Case(modules, [_ragged(sizes, 0), _ragged(sizes, 100)], loss_fn=loss)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        self.runs = 0

    def run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


@case
def checkpointed(sizes: Sizes) -> Case:
    return Case(blocks(sizes, Checkpointed), two_steps(sizes))


@case
def accumulated_over_three_steps(sizes: Sizes) -> Case:
    return Case(blocks(sizes), [batch(sizes, n, zero=n == 0) for n in range(3)])


@case
def the_same_step_three_times(sizes: Sizes) -> Case:
    """Three steps without zero_grad give three times the gradient, not 1, 1.5, 1.75 times."""
    return Case(blocks(sizes), [batch(sizes, 0, zero=n == 0) for n in range(3)])


@case
def evaluation_in_between(sizes: Sizes) -> Case:
    """With other batch sizes, and without touching the gradients that are there."""
    steps = [
        batch(sizes, 0, train=False, per_microbatch=3),
        batch(sizes, 1),
        batch(sizes, 2, train=False, zero=False, per_microbatch=1),
        batch(sizes, 3, zero=False),
        batch(sizes, 4, train=False, zero=False, extra=1),
        batch(sizes, 5, zero=False),
    ]
    return Case(blocks(sizes), steps)


class Twice(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y + torch.tanh(nn.functional.linear(y, self.linear.weight, self.linear.bias)) + y @ self.linear.weight


@case
def weight_used_twice(sizes: Sizes) -> Case:
    return Case(blocks(sizes, Twice), two_steps(sizes))


class Masked(nn.Module):
    keywords = ("mask", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: Tensor, mask: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.block(x) * mask + x * scale


class Shifted(nn.Module):
    keywords = ("shift", "table")

    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: Tensor, shift: Tensor, table: Tensor) -> Tensor:
        return self.block(x) + shift[:, None] + table.sum()


@case
def keyword_arguments_of_stages(sizes: Sizes) -> Case:
    """Each stage takes what it knows; one argument is no batch and says so."""
    torch.manual_seed(SEED)
    modules = [(Masked, Shifted)[index % 2]().to(DOUBLE) for index in range(sizes.num_stages)]
    steps = two_steps(sizes)
    for seed, step in enumerate(steps):
        rows = step.args[0].shape[0]
        step.kwargs = {
            "mask": random(rows, WIDTH, seed=seed + 70),
            "shift": random(rows, seed=seed + 80),
            "scale": 0.25,
            "table": Microbatches([random(3, 5, seed=90)] * sizes.num_microbatches),
        }
    return Case(modules, steps)


class Wide(nn.Module):
    """Its batch is the second dimension; and it has a table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x).transpose(0, 1).sum(1) + table


@case
def chunk_specs(sizes: Sizes) -> Case:
    """The loop gets what the specs say, by hand."""
    modules = blocks(sizes)
    modules[0] = Wide().to(DOUBLE)
    rows = 2 * sizes.num_microbatches
    steps = []
    for seed in (0, 10):
        x, table, target = (
            random(3, rows, WIDTH, seed=seed),
            random(1, WIDTH, seed=1),
            random(rows, WIDTH, seed=seed + 2),
        )
        steps.append(Step((x, table), target))
    options = {"args_chunk_spec": (TensorChunkSpec(1), Replicate())}
    return Case(modules, steps, options=options, cut=_by_specs)


def _by_specs(args: tuple[Tensor, Tensor], num_microbatches: int) -> list[Any]:
    return [(piece, args[1]) for piece in args[0].tensor_split(num_microbatches, dim=1)]


@case
def dict_targets_and_loss_kwargs(sizes: Sizes) -> Case:
    def loss(output: Tensor, target: dict[str, Any], *, smoothing: float, weight: Tensor) -> Tensor:
        off = (output - target["values"]).pow(2) * target["mask"]
        return off.mean() * smoothing + (output * weight).mean() + target["offset"]

    steps = two_steps(sizes)
    for step in steps:
        rows = step.args[0].shape[0]
        step.target = {"values": step.target, "mask": random(rows, 1, seed=5).abs(), "offset": 0.5, "note": None}
        step.loss_kwargs = {"smoothing": 0.3, "weight": random(WIDTH, seed=6)}
    return Case(blocks(sizes), steps, loss_fn=loss)


@case
def sum_loss(sizes: Sizes) -> Case:
    """A sum over rows is what it is: `scale_grads=False`, uneven or not."""
    return Case(
        blocks(sizes),
        two_steps(sizes, extra=1),
        loss_fn=lambda output, target: (output - target).pow(2).sum(),
        options={"scale_grads": False},
        weights="one",
    )


class InPlace(nn.Module):
    """In-place activations: inside, and as the very first operation on what the stage before sent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x))).mul_(2).add_(1)


class InPlaceAtOnce(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.elu(x, inplace=True))


@case
def in_place_activations(sizes: Sizes) -> Case:
    return Case(blocks(sizes, InPlace), two_steps(sizes))


@case
def in_place_on_the_input(sizes: Sizes) -> Case:
    torch.manual_seed(SEED)
    modules = [(InPlaceAtOnce if index else InPlace)().to(DOUBLE) for index in range(sizes.num_stages)]
    return Case(modules, two_steps(sizes))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.rand_like(x)


@case
def dropout_by_microbatch(sizes: Sizes) -> Case:
    """The same random numbers whatever the schedule, when asked for."""
    return Case(
        blocks(sizes, Noisy),
        [batch(sizes, 0), batch(sizes, 1), batch(sizes, 2, train=False), batch(sizes, 3)],
        options={"rng": "per-microbatch", "seed": SEED},
        rng=True,
    )


class NoisyCheckpointed(Noisy):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) + torch.rand_like(x)


@case
def dropout_by_microbatch_checkpointed(sizes: Sizes) -> Case:
    made = dropout_by_microbatch(sizes)
    made.modules = blocks(sizes, NoisyCheckpointed)
    return made


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 0.5


class Custom(nn.Module):
    """A convolution, a batch norm, an embedding, a custom function, a parameter used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)
        self.table, self.scale = nn.Embedding(3, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x[:, None]))
        picked = self.table((x.detach().sum(1) > 0).long())
        return Half.apply(self.out(y.flatten(1)) + picked) * self.scale


@case
def modules_of_many_kinds(sizes: Sizes) -> Case:
    return Case(blocks(sizes, Custom), two_steps(sizes))


@case
def input_with_a_gradient(sizes: Sizes) -> Case:
    """The user's own input may need a gradient: that of the parameters before the pipeline."""
    torch.manual_seed(SEED)
    modules = blocks(sizes)
    steps = two_steps(sizes)
    for step in steps:
        step.args = (given(step.args[0].clone().requires_grad_()),)
    return Case(modules, steps)


@case
def integer_inputs(sizes: Sizes) -> Case:
    modules = blocks(sizes)
    modules[0] = nn.Embedding(7, WIDTH).to(DOUBLE)
    rows = 2 * sizes.num_microbatches
    steps = [Step((given(torch.arange(rows) * (seed + 1) % 7),), random(rows, WIDTH, seed=seed)) for seed in range(2)]
    return Case(modules, steps)
