"""Complex tensors between stages. A conjugated or negated view has plain memory and a mark: what arrives must be its values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.comm import DistributedTransport, LocalTransport, LocalWorld
from penstock.errors import ShapeError
from penstock.front.spread import receive_from, send_to
from penstock.run import Schedule1F1B
from penstock.stage.pipeline_stage import PipelineStage
from tests.gloo_pool import GlooPool

MICROBATCHES = 2
WIDTH = 4
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda value: value,
    "conjugate": torch.conj,
    "negated": torch._neg_view,
}


class First(nn.Module):
    """Gives a complex tensor, under a view."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.inner, self.view = nn.Linear(WIDTH, WIDTH), view

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return VIEWS[self.view](torch.complex(made, 2 * made * made))


class Last(nn.Module):
    """Takes one; the gradient that it sends back is under a view as well."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.inner, self.view = nn.Linear(WIDTH, WIDTH), view

    def forward(self, value: Tensor) -> Tensor:
        value = VIEWS[self.view](value)
        return self.inner(value.real) + 3 * value.imag


def modules(view: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [First(view), Last(view)]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)


def expected(view: str) -> list[dict[str, Tensor]]:
    first, last = modules(view)
    x, y = batch()
    for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (nn.functional.mse_loss(last(first(part)), target) / MICROBATCHES).backward()
    return [grads(first), grads(last)]


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.cpu() for name, parameter in module.named_parameters() if parameter.grad is not None}


def trained(rank: int, group: LocalTransport | None, device: torch.device, view: str) -> dict[str, Tensor]:
    """The gradients of the third step: the first describes its messages, the others do not."""
    module = modules(view)[rank].to(device)
    stage = PipelineStage(module, rank, 2, device, group=group)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x, y = (part.to(device) for part in batch())
    for _ in range(3):
        module.zero_grad()
        schedule.step(x, target=y)
    return grads(module)


def compare(found: list[dict[str, Tensor]], view: str) -> None:
    for one, other in zip(found, expected(view), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("view", VIEWS)
def test_between_threads(view: str) -> None:
    compare(LocalWorld(2).run(lambda t: trained(t.rank, t, torch.device("cpu"), view)), view)


def in_process(view: str) -> tuple[dict[str, Tensor], Tensor]:
    """Also an output that goes from rank to rank after the step."""
    transport, value = DistributedTransport.of(), VIEWS[view](torch.arange(WIDTH) * (1 + 2j))
    if transport.rank == 0:
        send_to(transport, [1], value)
    else:
        value = receive_from(transport, 0)
    return trained(transport.rank, None, torch.device("cpu"), view), value.resolve_conj().resolve_neg()


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("view", VIEWS)
def test_between_processes(gloo_pool: GlooPool, view: str) -> None:
    found = gloo_pool.run(2, in_process, view)
    compare([grads for grads, _ in found], view)
    assert torch.equal(found[0][1], found[1][1])


def test_a_message_by_hand_is_refused_under_a_view() -> None:
    def send(transport: LocalTransport) -> None:
        with pytest.raises(ShapeError, match=r"write tensor.resolve_conj\(\).resolve_neg\(\)"):
            transport.isend(torch.zeros(2, dtype=torch.complex64).conj(), 1 - transport.rank)

    LocalWorld(2).run(send)
