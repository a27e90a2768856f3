"""What is given to `step` and `eval`, right and wrong: every rank raises, says why, and the next step works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Microbatches, Replicate, Schedule, TensorChunkSpec, sum_reducer
from penstock.batch import weighted_mean
from penstock.errors import MergeError, PeerFailed, RunError, SplitError
from tests.run.pipes import batch, close, grads_of, loop_grads, make_modules, on_ranks

X, Y = batch(8)


def _step(*args: Any, **kwargs: Any) -> Callable[[Schedule], Any]:
    return lambda schedule: schedule.step(*args, **kwargs)


def _without_grad(schedule: Schedule) -> Any:
    with torch.no_grad():
        return schedule.step(X, target=Y)


WRONG: dict[str, tuple[Callable[[Schedule], Any], int, str]] = {  # what is called, which rank notices, what it says
    "no arguments": (_step(target=Y), 0, r"step\(\) without arguments; expected the model's input"),
    "no target": (_step(X), 2, r"there is a loss_fn and no target; write step\(..., target=labels\)"),
    "too few rows": (
        _step(X[:3], target=Y),
        0,
        "batch size 3 .* smaller than the number of microbatches, 4|3 rows of the target",
    ),
    "too few targets": (
        _step(X, target=Y[:3]),
        2,
        "batch size 3 .* smaller than the number of microbatches, 4|3 rows of the target",
    ),
    "a scalar": (_step(X, torch.tensor(1.0), target=Y), 0, r"args\[1\]"),
    "too many arguments": (_step(X, X, target=Y), 0, "positional arguments"),
    "a string": (_step("text", target=Y), 0, "str"),
    "other width": (_step(X[:, :3], target=Y), 0, "mat1 and mat2"),
    "other type": (_step(X.float(), target=Y), 0, "dtype"),
    "too few ready microbatches": (_step(Microbatches([X, X]), target=Y), 0, "2"),
    "no gradients": (_without_grad, 0, r"step\(\) under torch.no_grad\(\).*Call eval\(\) instead"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_wrong_inputs_raise_everywhere_and_the_next_step_works(what: str, warm: bool) -> None:
    call, culprit, words = WRONG[what]
    modules = make_modules(3)

    def rank(schedule: Schedule, rank: int) -> str:
        if warm:
            schedule.step(X, target=Y)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind; the words are compared below
            call(schedule)
        modules[rank].zero_grad()
        schedule.step(X, target=Y)
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = on_ranks("1f1b", 3, 4, rank, modules=modules)
    assert close(grads_of(modules), loop_grads(modules, X, Y, 4))
    for rank, text in enumerate(texts):
        assert re.search(words, text, re.DOTALL), f"rank {rank}: {text}"
    if what != "no gradients":
        assert not texts[culprit].startswith("PeerFailed")


def test_each_rank_gives_only_what_its_stages_read() -> None:
    modules = make_modules(3)

    def rank(schedule: Schedule, rank: int) -> Any:
        if rank == 0:
            return schedule.step(X)
        return schedule.step(target=Y) if rank == 2 else schedule.step()

    first, second, third = on_ranks("1f1b", 3, 4, rank, modules=modules)
    assert first is None
    assert second is None
    assert third.shape == Y.shape
    assert close(grads_of(modules), loop_grads(modules, X, Y, 4))


def test_losses_and_outputs() -> None:
    modules = make_modules(2)

    def rank(schedule: Schedule, rank: int) -> Any:
        losses: list[Tensor] = [torch.zeros(1)]  # what stands in it is replaced
        output = schedule.step(X, target=Y, losses=losses)
        without = schedule.step(X, target=Y, return_outputs=False)
        assert without is None
        return losses, output

    (first, nothing), (losses, output) = on_ranks("zb-h1", 2, 4, rank, modules=modules)
    assert len(first) == 1
    assert nothing is None
    want = nn.Sequential(*modules)(X)
    assert torch.allclose(output, want)
    assert not output.requires_grad
    assert [loss.requires_grad for loss in losses] == [False] * 4
    pieces = zip(want.tensor_split(4), Y.tensor_split(4), strict=True)
    assert torch.equal(torch.stack(losses), torch.stack([nn.functional.mse_loss(a, b).detach() for a, b in pieces]))


def test_the_loss_of_an_uneven_batch_is_that_of_the_batch() -> None:
    modules = make_modules(2)
    x, y = batch(7)

    def rank(schedule: Schedule, rank: int) -> list[Tensor]:
        losses: list[Tensor] = []
        schedule.step(x, target=y, losses=losses)
        return losses

    _, losses = on_ranks("1f1b", 2, 3, rank, modules=modules)
    whole = nn.functional.mse_loss(nn.Sequential(*modules)(x), y)
    assert torch.allclose(weighted_mean(losses, [3, 2, 2]), whole, rtol=1e-14)


def test_without_a_loss_a_step_is_an_evaluation() -> None:
    modules = make_modules(2)

    def rank(schedule: Schedule, rank: int) -> Any:
        return schedule.step(X)

    _, output = on_ranks("gpipe", 2, 4, rank, modules=modules, loss_fn=None)
    assert torch.equal(output, torch.cat([nn.Sequential(*modules)(rows) for rows in X.chunk(4)]))
    assert grads_of(modules) == []


def test_a_forward_only_schedule_evaluates() -> None:
    modules = make_modules(3)
    _, _, output = on_ranks("forward", 3, 4, lambda schedule, rank: schedule.step(X, target=Y), modules=modules)
    assert torch.equal(output, torch.cat([nn.Sequential(*modules)(rows) for rows in X.chunk(4)]))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_evaluation_takes_any_batch_and_gives_losses_if_it_has_targets(name: str) -> None:
    modules = make_modules(2 if name == "1f1b" else 4)
    model = nn.Sequential(*modules)

    def rank(schedule: Schedule, rank: int) -> Any:
        found = []
        for rows in (4, 9, 4, 30):
            x, y = batch(rows)
            losses: list[Tensor] = []
            found.append((schedule.eval(x), schedule.eval(x, target=y, losses=losses), losses))
            with torch.no_grad():
                schedule.eval(x)
        return found

    results = on_ranks(name, 2, 4, rank, modules=modules)
    last = results[0 if name != "1f1b" else 1]
    for rows, (plain, output, losses) in zip((4, 9, 4, 30), last, strict=True):
        assert torch.allclose(plain, model(batch(rows)[0]))
        assert torch.equal(plain, output)
        assert not output.requires_grad
        assert len(losses) == 4
    assert grads_of(modules) == []


def test_chunk_specs_and_merge_spec() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def forward(self, x: Tensor, table: Tensor, *, bias: Tensor) -> Tensor:
            return self.linear(x).sum(0) + table.sum() + bias

    class Both(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"rows": x.t(), "total": x.sum()}

    first, second = Table(), Both()
    x, table, bias = torch.randn(3, 8, 4).double(), torch.randn(5, 5).double(), torch.randn(1, 4).double()

    def rank(schedule: Schedule, rank: int) -> Any:
        return schedule.eval(x, table, bias=bias)

    _, output = on_ranks(
        "gpipe", 2, 4, rank, modules=[first, second], loss_fn=None,
        args_chunk_spec=(TensorChunkSpec(1), Replicate()), kwargs_chunk_spec={"bias": Replicate()},
        output_merge_spec={"rows": TensorChunkSpec(1), "total": sum_reducer},
    )  # fmt: skip
    whole = second(first(x, table, bias=bias))
    assert torch.allclose(output["rows"], whole["rows"])
    assert torch.allclose(output["total"], whole["total"])


def test_outputs_that_cannot_be_put_together_say_so_after_a_whole_step() -> None:
    """The step itself is done on every rank; asking for its outputs is what failed."""
    modules = make_modules(2)
    ready = Microbatches([torch.ones(2, n, 4, dtype=torch.float64) for n in (1, 2)])

    def rank(schedule: Schedule, rank: int) -> None:
        if rank == 1:
            with pytest.raises(MergeError, match="output"):
                schedule.step(ready, target=ready)
        else:
            schedule.step(ready, target=ready)
        assert schedule.step(ready, target=ready, return_outputs=False) is None

    on_ranks("1f1b", 2, 2, rank, modules=modules, loss_fn=lambda output, target: output.sum())


def test_ready_microbatches_with_keyword_arguments_each() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            return x * scale

    ready = Microbatches([((torch.ones(n, 2),), {"scale": float(n)}) for n in (1, 3)])
    _, output = on_ranks(
        "gpipe", 2, 2, lambda schedule, rank: schedule.eval(ready), modules=[Scaled(), nn.Identity()], loss_fn=None
    )
    assert output.tolist() == [[1.0, 1.0]] + [[3.0, 3.0]] * 3


def test_a_loss_that_is_no_number_is_refused() -> None:
    def rank(schedule: Schedule, rank: int) -> str:
        with pytest.raises(RuntimeError) as caught:
            schedule.step(X, target=Y)
        return str(caught.value)

    texts = on_ranks("1f1b", 2, 4, rank, loss_fn=lambda output, target: output - target)
    assert all("loss_fn returned a tensor of shape [2, 4]; expected a tensor with one number" in text for text in texts)


def test_errors_are_of_the_kinds_that_can_be_caught() -> None:
    assert issubclass(PeerFailed, RunError)
    assert issubclass(RunError, RuntimeError)
    assert issubclass(SplitError, ValueError)
