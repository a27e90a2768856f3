"""Split == full over random small graphs of layers: frozen, shared, checkpointed, unused or changed in place."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.stage.backward import Deferral, backward_input, backward_weight, run_backward_full, run_deferred

WIDTH = 4
OPERATIONS = (
    "linear",
    "bare",
    "checkpointed",
    "reentrant",
    "norm",
    "tanh",
    "relu_",
    "add",
    "turn",
    "weight",
    "detach",
    "none",
)


class Program(nn.Module):
    """Each operation reads two earlier values and appends one."""

    def __init__(self, lines: list[tuple[str, int, int, int]], num_outputs: int) -> None:
        super().__init__()
        self.lines, self.num_outputs = lines, num_outputs
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bare = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for operation, first, second, which in self.lines:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(self.step(operation, a, b, which))
        return tuple(values[-self.num_outputs :])

    def step(self, operation: str, a: Tensor, b: Tensor, which: int) -> Tensor:
        layer, bare = self.layers[which % 3], self.bare[which % 2]
        match operation:
            case "linear":
                return layer(a)
            case "bare":
                return bare(a)
            case "checkpointed":
                return checkpoint(lambda y: bare(torch.tanh(layer(y))), a, use_reentrant=False)
            case "reentrant":
                return (
                    checkpoint(lambda y: torch.tanh(layer(y)), a, use_reentrant=True) if a.requires_grad else layer(a)
                )
            case "norm":
                return self.norm(a)
            case "tanh":
                return torch.tanh(a)
            case "relu_":
                return layer(a).relu_()
            case "add":
                return a + b
            case "turn":
                return a.transpose(0, 1).contiguous().transpose(0, 1) if which % 2 else a.flip(-1)[..., ::1]
            case "weight":
                return a * bare.weight.sum()
            case "detach":
                return b + a.detach()
            case _:
                return a


lines = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)),
    min_size=1,
    max_size=9,
)
shapes = st.sampled_from([(3, WIDTH), (2, 3, WIDTH)])


def run(program: Program, frozen: set[int], shape: tuple[int, ...], *, needs: bool, split: bool) -> list[Any]:
    for index, parameter in enumerate(program.parameters()):
        parameter.requires_grad_(index not in frozen)
    deferral = Deferral(program)
    found: list[Any] = []
    for microbatch in range(3):
        x = (
            torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
            .add(microbatch)
            .cos()
            .view(shape)
            .requires_grad_(needs)
        )
        value, pending = run_deferred(deferral, program, (x,), {}) if split else (program(x), None)
        outputs = [output for output in value if output.requires_grad]
        grads = [torch.arange(output.numel()).double().sin().view_as(output) for output in outputs]
        if pending is None:
            run_backward_full(outputs, grads)
        else:
            backward_input(outputs, grads, pending, inputs=[x])
            backward_weight(pending)
        found += [*value, x.grad]
    return [*found, *(parameter.grad for parameter in program.parameters())]


@settings(max_examples=100, deadline=None)
@given(lines, st.integers(1, 3), st.sets(st.integers(0, 9)), shapes, st.booleans())
def test_split_equals_full(
    lines: list[tuple[str, int, int, int]], num_outputs: int, frozen: set[int], shape: tuple[int, ...], needs: bool
) -> None:
    torch.manual_seed(0)
    program = Program(lines, num_outputs).double()
    full = run(program, frozen, shape, needs=needs, split=False)
    program.zero_grad()
    split = run(program, frozen, shape, needs=needs, split=True)
    for a, b in zip(full, split, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
