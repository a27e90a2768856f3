"""Pipeline(few_rows=True): the last, short batch of a loader trains as it would without a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock import Microbatches, Pipeline
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError, SplitError

X, Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SIZES = (8, 3, 8, 1, 3)  # rows of each step; there are four microbatches


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))).double()


def plain() -> tuple[list[float], list[torch.Tensor]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for rows in SIZES:
        loss = nn.functional.mse_loss(model(X[:rows]), Y[:rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b", {}), ("zbv", {}), ("dualpipev", {}), ("interleaved1f1b", {"recompute": {0: [1, 3], 2: [0, 1]}})],
)
def test_steps_of_few_rows_are_those_of_a_plain_loop(schedule: str, options: dict[str, Any]) -> None:
    def rank(transport: LocalTransport) -> Any:
        pipe = Pipeline(
            make(), (X,), loss_fn=nn.functional.mse_loss, schedule=schedule, microbatches=4, profile=False,
            few_rows=True, group=transport, **options,
        )  # fmt: skip
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        found = []
        for rows in SIZES:
            with pipe.schedule.watch() as watched:
                result = pipe.step(X[:rows], target=Y[:rows])
            assert len(result.losses) == min(rows, 4)
            assert watched.busy > 0  # whoever watches sees these steps too
            optimizer.step()
            optimizer.zero_grad()
            found.append(result.loss)
        assert pipe.schedule.steps == len(SIZES)
        return found, dict(pipe.named_parameters())

    losses, parameters = plain()
    first, second = LocalWorld(2).run(rank)
    assert first[0] == second[0] == pytest.approx(losses, rel=1e-12)
    trained = {**first[1], **second[1]}
    for (name, _), expected in zip(make().named_parameters(), parameters, strict=True):
        torch.testing.assert_close(trained[name].detach(), expected)


def test_without_it_such_a_batch_is_refused_on_every_rank() -> None:
    def rank(transport: LocalTransport) -> Any:
        given: dict[str, Any] = {"microbatches": 4, "profile": False, "group": transport, "schedule": "1f1b"}
        pipe = Pipeline(make(), (X,), loss_fn=nn.functional.mse_loss, **given)
        with pytest.raises(PenstockError) as refused:
            pipe.step(X[:3], target=Y[:3])
        return pipe.step(X, target=Y).loss, refused.value

    (first, why), (second, _) = LocalWorld(2).run(rank)
    assert isinstance(why, SplitError)
    assert first == second


def test_few_rows_are_grouped_as_well() -> None:
    """A step of rows in groups of even cost was refused when there were fewer rows than microbatches."""

    def rank(transport: LocalTransport) -> Any:
        pipe = Pipeline(
            make(), (X,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, profile=False, few_rows=True,
            group_rows=lambda x: [1 + 3 * (k % 2) for k in range(len(x))], group=transport,
        )  # fmt: skip
        found = [pipe.step(X[:rows], target=Y[:rows], outputs="all") for rows in SIZES]
        grads = {name: p.grad for name, p in pipe.named_parameters()}
        return [(result.loss, len(result.losses), result.outputs) for result in found], grads

    model = make()
    expected = []
    for rows in SIZES:
        output = model(X[:rows])
        loss = nn.functional.mse_loss(output, Y[:rows])
        loss.backward()
        expected.append((loss.item(), output))
    (found, grads), (_, others) = LocalWorld(2).run(rank)
    for (loss, count, output), (wanted, outputs), rows in zip(found, expected, SIZES, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-12)
        assert count == min(rows, 4)
        torch.testing.assert_close(output, outputs.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close({**grads, **others}[name], parameter.grad)


def test_ready_microbatches_may_be_few_too() -> None:
    pipe = Pipeline(
        make(), (X,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, profile=False, few_rows=True
    )
    for call in (pipe.step, pipe.evaluate):
        result = call(Microbatches([X[:3], X[3:4]]), target=Microbatches([Y[:3], Y[3:4]]))
        assert len(result.losses) == 2
        assert result.loss == pytest.approx(nn.functional.mse_loss(make()(X[:4]), Y[:4]).item(), rel=1e-12)
