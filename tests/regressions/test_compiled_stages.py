"""Compiled stages that trained something else than they were asked to, each with its story."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from penstock.run import Schedule
from tests.run.pipes import WIDTH, batch, close, grads_of, loop_grads, on_ranks

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
            module.compile(backend="aot_eager")
    on_ranks(name, 2, 3, run, modules=modules)
    got = grads_of(modules)
    for module in modules:
        module._compiled_call_impl = None
    assert close(got, loop_grads(modules, x, y, 3))


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
