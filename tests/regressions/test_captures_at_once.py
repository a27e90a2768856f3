"""Worlds of threads that capture and train at once in one process, each as if it were alone."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

import penstock

ROWS, WIDTH = 4, 8


class Steep(torch.autograd.Function):
    """A square with a gradient of its own, which a trace has to keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x


class Model(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Steep.apply(torch.tanh(layer(x)))
        return x


def losses(model: nn.Module, schedule: str, steps: int) -> list[float]:
    x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)

    def rank(transport: penstock.comm.LocalTransport) -> list[float]:
        pipe = penstock.Pipeline(
            copy.deepcopy(model),
            example=(x[:2],),
            loss_fn=nn.functional.mse_loss,
            schedule=schedule,
            microbatches=2,
            profile=False,
            group=transport,
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found = []
        for _ in range(steps):
            found.append(pipe.step(x, target=torch.zeros_like(x)).loss)
            optimizer.step()
            optimizer.zero_grad()
        return found

    return penstock.LocalWorld(2).run(rank)[0]


def test_two_worlds_capture_at_once() -> None:
    """torch.export and the watch over autograd functions replace functions of the whole process while a model is traced. Two
    traces at once took each other's: an AssertionError of torch's, or stages whose wires differed between ranks."""
    torch.manual_seed(0)
    models = [(Model(4), "1f1b"), (Model(5), "gpipe")]
    alone = [losses(model, name, 1) for model, name in models]
    found: dict[int, list[float]] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: losses(*models[i], 1)}), daemon=True)
        for i in range(len(models))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert found == dict(enumerate(alone))


class Meets(nn.Module):
    """In a trace, lets another thread take a step before it goes on."""

    def __init__(self, traced: threading.Event, stepped: threading.Event) -> None:
        super().__init__()
        self.traced, self.stepped = traced, stepped
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> Meets:
        made = Meets(self.traced, self.stepped)
        made.first, made.last = copy.deepcopy(self.first, memo), copy.deepcopy(self.last, memo)
        return made

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            self.traced.set()
            self.stepped.wait(60)
        return self.last(torch.relu(self.first(x)))


def test_a_world_trains_while_another_captures() -> None:
    """While a model was traced, another thread called its own autograd functions as nodes of that trace (`NotImplementedError:
    Could not run 'penstock::function'`), and put off no weight work, since torch says of the whole process that it compiles: the
    gradients of a split backward were wrong, without an error."""
    torch.manual_seed(0)
    model = Model(4)
    alone = losses(model, "zb-h1", 3)
    traced, stepped = threading.Event(), threading.Event()
    found: list[list[float]] = []
    x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)

    def trained(transport: penstock.comm.LocalTransport) -> list[float]:
        pipe = penstock.Pipeline(
            copy.deepcopy(model),
            example=(x[:2],),
            loss_fn=nn.functional.mse_loss,
            schedule="zb-h1",
            microbatches=2,
            profile=False,
            group=transport,
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        values = []
        for step in range(3):
            if step == 1 and transport.rank == 0:
                capturing.start()
                assert traced.wait(60)
            values.append(pipe.step(x, target=torch.zeros_like(x)).loss)
            optimizer.step()
            optimizer.zero_grad()
        return values

    captured: list[object] = []
    capturing = threading.Thread(
        target=lambda: captured.append(penstock.pipeline(Meets(traced, stepped), (x,), num_stages=1)), daemon=True
    )
    try:
        found += penstock.LocalWorld(2).run(trained)
    finally:
        stepped.set()
        capturing.join(60)
    assert captured
    assert found[0] == alone
