"""How much microbatches count is found out on the simulated accelerator, and its host waits for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import pipes
from tests.accelerator.pool import SimPool
from tests.accelerator.test_pipeline import MICROBATCHES, Noticed, piped, whole_model


def scaled_sum(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * ((output - target) ** 2).sum()


def of_labels(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels.flatten())


def labels() -> Tensor:
    found = torch.arange(MICROBATCHES * pipes.ROWS) % pipes.WIDTH
    found[: pipes.ROWS + 1] = -100  # all of a microbatch, and one of the next
    return found


LOSSES: dict[str, Any] = {
    "a sum": (scaled_sum, None),
    "labels": (of_labels, labels),
    "a module": (nn.CrossEntropyLoss(), labels),
}


def trains(device: torch.device, name: str, on_host: bool) -> dict[str, Any]:
    loss_fn, made = LOSSES[name]
    x, y = pipes.batch(MICROBATCHES)
    target = y if made is None else made()
    if not on_host:
        x, target = x.to(device), target.to(device)
    pipe = piped(device, loss_fn=loss_fn)
    noticed = Noticed(device)
    waits: list[str] = []
    for step in range(3):
        pipe.zero_grad()
        noticed.again()
        result = pipe.step(x, target=target)
        waits += noticed.sim.waits() if step else []
    grads = {name: p.grad.cpu() for name, p in pipe.named_parameters() if p.grad is not None}
    return {"loss": result.loss, "grads": grads, "waits": waits, "violations": noticed.sim.violations()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("on_host", [False, True])
def test_microbatches_count_as_in_the_whole_batch_without_a_wait(sim: SimPool, name: str, on_host: bool) -> None:
    loss_fn, made = LOSSES[name]
    x, y = pipes.batch(MICROBATCHES)
    model = whole_model()
    whole = loss_fn(model(x), y if made is None else made())
    whole.backward()
    told = sim.run(2, "lazy", trains, name, on_host)
    assert [one["loss"] for one in told] == [pytest.approx(whole.item(), rel=1e-12)] * 2
    found = {name: grad for one in told for name, grad in one["grads"].items()}
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()})
    assert [one["waits"] for one in told] == [[], []]
    assert [one["violations"] for one in told] == [[], []]
