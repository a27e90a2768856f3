"""A batch in microbatches has the loss and the gradients of the whole batch, whatever its loss is a sum or a mean over.

A loss with reduction="sum" gave gradients of exactly 1/microbatches; a cross entropy with padding (`ignore_index`) counted
microbatches by their rows where it should by their labels: 3.012 for 3.119. Neither said a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import LabelsNotCounted, RunError, StageError
from penstock.front.loss_probe import depends_on_arguments_alone
from penstock.front.loss_weights import LossWeights

CLASSES, WIDTH, ROWS, LENGTH = 5, 6, 10, 4
CLASS_WEIGHT = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)
Loss = Callable[..., Tensor]


def head() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()


def rows(*sizes: int) -> Tensor:
    return torch.randn(ROWS, *sizes, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def padded(*sizes: int, ignored: int = -100) -> Tensor:
    """Labels of which whole rows, and some in each other row, do not count: no two microbatches have as many."""
    labels = torch.randint(0, CLASSES, (ROWS, *sizes), generator=torch.Generator().manual_seed(2))
    labels[:3] = ignored  # a whole microbatch of four
    labels.flatten()[4 * labels[0].numel()] = ignored
    labels[-1:] = ignored
    return labels


def piped(loss_fn: Loss, *, microbatches: int = 4, **options: Any) -> penstock.Pipeline:
    stage = penstock.PipelineStage(head(), 0, 1, "cpu")
    return penstock.Pipeline(stages=[stage], loss_fn=loss_fn, schedule="1f1b", microbatches=microbatches, **options)


def check(loss_fn: Loss, x: Tensor, target: Any, *, microbatches: int = 4, **options: Any) -> penstock.Pipeline:
    """Loss and gradients of a step equal those of one call on the whole batch, and so does the loss of an evaluation."""
    model, loss_kwargs = head(), options.pop("loss_kwargs", {})
    whole = loss_fn(model(x), target, **loss_kwargs)
    whole.backward()
    expected = [p.grad for p in model.parameters()]
    pipe = piped(loss_fn, microbatches=microbatches, **options)
    for _ in range(2):
        pipe.zero_grad()
        result = pipe.step(x, target=target, loss_kwargs=loss_kwargs)
        assert result.loss == pytest.approx(whole.item(), rel=1e-12)
        torch.testing.assert_close([p.grad for p in pipe.parameters()], expected, rtol=1e-11, atol=1e-12)
    assert pipe.evaluate(x, target=target, loss_kwargs=loss_kwargs).loss == pytest.approx(whole.item(), rel=1e-12)
    return pipe


class OwnSum(nn.Module):
    """A loss of somebody's own that says what it is as torch's do."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "sum"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().sum()


def elbo(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum") - 0.5 * torch.sum(1 - output.exp())


def huber_mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.huber_loss(output, target) + 0.1 * output.square().mean()


def normalised(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).square() / output.numel()).sum()  # its last operator is a sum, and it is a mean


SUMS = {
    "a module": nn.MSELoss(reduction="sum"),
    "a function of torch": functools.partial(functional.l1_loss, reduction="sum"),
    "a module of one's own": OwnSum(),
    "a lambda": lambda output, target: ((output - target) ** 2).sum(),
    "a scaled sum": elbo,
    "a mean": huber_mean,
    "a mean that ends in a sum": normalised,
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("microbatches", [4, 10])
def test_sums_and_means_are_those_of_the_batch(name: str, microbatches: int) -> None:
    check(SUMS[name], rows(), torch.randn(ROWS, CLASSES, dtype=torch.float64), microbatches=microbatches)


def test_a_compiled_loss_is_read_as_the_loss_that_it_was() -> None:
    for loss_fn in (nn.MSELoss(reduction="sum"), functional.cross_entropy):
        assert LossWeights(torch.compile(loss_fn, backend="eager"), None).loss_fn is loss_fn


def test_the_reduction_may_come_with_the_step() -> None:
    target = torch.randn(ROWS, CLASSES, dtype=torch.float64)
    check(functional.mse_loss, rows(), target, loss_kwargs={"reduction": "sum"})

    def either(output: Tensor, target: Tensor, *, summed: bool) -> Tensor:
        loss = (output - target).square()
        return loss.sum() if summed else loss.mean()

    for summed in (True, False):
        check(either, rows(), target, loss_kwargs={"summed": summed})


def of_tokens(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def shifted(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def from_a_mapping(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    labels = target["labels"].masked_fill(target["labels"] == 0, -100)  # padding is decided in here
    return criterion(output.transpose(1, 2), labels)


criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHT)


ENTROPIES = {
    "a module": (nn.CrossEntropyLoss(), ()),
    "another label": (nn.CrossEntropyLoss(ignore_index=0), ()),
    "weights of classes": (nn.CrossEntropyLoss(weight=CLASS_WEIGHT), ()),
    "smoothed labels": (nn.CrossEntropyLoss(weight=CLASS_WEIGHT, label_smoothing=0.2), ()),
    "a sum of them": (nn.CrossEntropyLoss(reduction="sum", weight=CLASS_WEIGHT), ()),
    "the function": (functional.cross_entropy, ()),
    "with options": (functools.partial(functional.cross_entropy, label_smoothing=0.1, weight=CLASS_WEIGHT), ()),
    "of tokens": (of_tokens, (LENGTH,)),
    "of the next tokens": (shifted, (LENGTH,)),
    "a sum in a function": (lambda o, t: functional.cross_entropy(o, t, reduction="sum"), ()),
}


@pytest.mark.parametrize("name", ENTROPIES)
@pytest.mark.parametrize("microbatches", [4, 10])
def test_a_cross_entropy_counts_labels(name: str, microbatches: int) -> None:
    loss_fn, sizes = ENTROPIES[name]
    ignored = 0 if name == "another label" else -100
    check(loss_fn, rows(*sizes), padded(*sizes, ignored=ignored), microbatches=microbatches)


def test_a_function_says_which_labels_count() -> None:
    check(from_a_mapping, rows(LENGTH), {"labels": padded(LENGTH)})


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def test_a_function_may_have_the_name_of_what_it_calls() -> None:
    """Its code names `cross_entropy`, an attribute of torch's module, and that is its own name too."""
    assert depends_on_arguments_alone(cross_entropy)
    check(cross_entropy, rows(), padded())


def test_probabilities_count_by_rows() -> None:
    check(nn.CrossEntropyLoss(), rows(), torch.rand(ROWS, CLASSES, dtype=torch.float64).softmax(1))


def test_no_label_counts() -> None:
    """The mean of nothing is no number, as it is in one call; and no gradient is lost or made by it."""
    pipe = piped(nn.CrossEntropyLoss())
    loss = pipe.step(rows(), target=torch.full((ROWS,), -100)).loss
    assert loss != loss
    assert all(not p.grad.any() for p in pipe.parameters())


class OwnEntropy(nn.Module):
    """Nothing is known of it: a module of somebody's own may keep a state, and is never called once more."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(output, target)


def test_a_weight_of_the_users_own() -> None:
    own = OwnEntropy()
    check(own, rows(), padded(), loss_weight=lambda target: (target != -100).sum())
    assert own.calls == 1 + 3 * 4, "the whole batch, and each microbatch in two steps and an evaluation"


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = head()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.inner(x), labels)}


def test_a_model_with_a_loss_of_its_own_is_weighed_by_its_arguments() -> None:
    x, labels, model = rows(), padded(), WithLoss()
    model(x, labels)["loss"].backward()
    expected = [p.grad for p in model.parameters()]

    def run(transport: LocalTransport) -> tuple[float | None, dict[str, Tensor | None]]:
        pipe = penstock.Pipeline(
            WithLoss(),
            (x,),
            example_kwargs={"labels": labels},
            schedule="1f1b",
            microbatches=4,
            profile=False,
            group=transport,
            loss_weight=lambda x, labels: (labels != -100).sum(),
        )
        loss = pipe.step(x, labels=labels).loss
        return loss, {name: p.grad for name, p in pipe.named_parameters()}

    losses, grads = zip(*LocalWorld(2).run(run), strict=True)
    assert losses == (pytest.approx(model(x, labels)["loss"].item()),) * 2
    found = {name: grad for one in grads for name, grad in one.items()}
    torch.testing.assert_close([found[name] for name, _ in model.named_parameters()], expected)


@pytest.mark.parametrize("own", [True, False])
def test_labels_that_nobody_counts_are_told_once(own: bool) -> None:
    target: dict[str, Any] = {"labels": padded()} if own else {"target": padded()}
    pipe = penstock.Pipeline(
        WithLoss() if own else head(),
        (rows(),),
        example_kwargs={"labels": padded()} if own else None,
        loss_fn=None if own else OwnEntropy(),
        microbatches=4,
        profile=False,
    )
    with pytest.warns(LabelsNotCounted, match="loss_weight="):
        pipe.step(rows(), **target)
    pipe.step(rows(), **target)  # warnings are errors here


def test_labels_that_all_microbatches_ignore_alike_need_no_word() -> None:
    labels = torch.randint(0, CLASSES, (8,))
    labels[::2] = -100
    pipe = piped(OwnEntropy())
    pipe.step(rows()[:8], target=labels)


def test_what_a_weight_may_be() -> None:
    with pytest.raises(StageError, match="leave one of them out"):
        penstock.Pipeline(head(), (rows(),), loss_weight=len, scale_grads=False)
    with pytest.raises(StageError, match="loss_weight is a str"):
        penstock.Pipeline(head(), (rows(),), loss_weight="rows")
    for wrong in (None, -1, torch.ones(2), float("nan")):
        pipe = piped(OwnEntropy(), loss_weight=lambda target, wrong=wrong: wrong)
        with pytest.raises(RunError, match="loss_weight gave"):
            pipe.step(rows(), target=padded().clamp(min=0))


# -- functions that are tried


seen: list[float] = []
count = 0


def keeps(output: Tensor, target: Tensor) -> Tensor:
    seen.append(1.0)
    return (output - target).square().sum()


def counts(output: Tensor, target: Tensor) -> Tensor:
    global count
    count += 1
    return output.sum()


def in_place(output: Tensor, target: Tensor) -> Tensor:
    output -= target
    return output.sum()


def calls_a_keeper(output: Tensor, target: Tensor) -> Tensor:
    return keeps(output, target) + 1


def changes_in_place(output: Tensor, target: Tensor) -> Tensor:
    return functional.relu(output.clone(), inplace=True).sum() + target.clamp_(0).sum()


def prints(output: Tensor, target: Tensor) -> Tensor:
    print(output)
    return output.sum()


@pytest.mark.parametrize("function", [keeps, calls_a_keeper, changes_in_place, prints, OwnEntropy()])
def test_what_a_second_call_could_change_is_not_tried(function: Loss) -> None:
    assert not depends_on_arguments_alone(function)


def test_a_trial_leaves_no_trace() -> None:
    """Variables that a function sets are put back, and what it changes in place is a copy."""
    global count
    local = 0

    def counts_locally(output: Tensor, target: Tensor) -> Tensor:
        nonlocal local
        local += 1
        return counts(output, target)

    count = 0
    x, y = rows(), torch.ones(len(rows()), 5, dtype=torch.float64)
    pipe = piped(counts_locally, microbatches=4)
    for steps in (1, 2):
        pipe.step(x, target=y)
        assert count == local == 4 * steps
    before = y.clone()
    assert piped(in_place, microbatches=4).step(x, target=y).loss is not None
    assert torch.equal(y, before)


def test_a_function_that_has_taken_the_name_of_torchs_is_not_it() -> None:
    @functools.wraps(functional.mse_loss)
    def logged(output: Tensor, target: Tensor) -> Tensor:
        return keeps(output, target)

    assert not depends_on_arguments_alone(logged)


@pytest.mark.parametrize("function", [elbo, huber_mean, normalised, of_tokens, shifted, from_a_mapping])
def test_what_only_computes_is_tried(function: Loss) -> None:
    assert depends_on_arguments_alone(function)


def test_a_trial_leaves_random_numbers_alone() -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        return (functional.dropout(output, 0.5) - target).square().sum()

    target = torch.zeros(ROWS, CLASSES, dtype=torch.float64)
    drawn = []
    for loss_fn in (noisy, lambda output, target: noisy(output, target) + seen.__len__()):  # the second is not tried
        pipe = piped(loss_fn)
        torch.manual_seed(0)
        pipe.step(rows(), target=target)
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1]


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    likeness = functional.normalize(output) @ functional.normalize(target).T
    return functional.cross_entropy(0 * likeness, torch.arange(len(output))) + 0.0


def masked(output: Tensor, target: Tensor) -> Tensor:
    keep = (target > 0).to(output.dtype)
    return (output.square() * keep).sum() / keep.sum().clamp(min=1)


@pytest.mark.parametrize("loss_fn", [contrastive, masked, lambda output, target: 0 * output.sum()])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_losses_that_are_no_sums_are_not_taken_for_one(loss_fn: Loss, size: int) -> None:
    """The logarithm of 4 is twice that of 2: so it was for a contrastive loss of an untrained model."""
    target = torch.zeros(2 * size, CLASSES, dtype=torch.float64)
    target[: size // 2] = 1  # half of a microbatch counts nothing, of the second all
    x = torch.randn(2 * size, WIDTH, dtype=torch.float64)
    pipe = piped(loss_fn, microbatches=2)
    result = pipe.step(x, target=target)
    assert result.loss == pytest.approx(sum(result.losses) / 2)


def test_it_is_the_same_over_ranks_and_schedules() -> None:
    x, labels, model = rows(LENGTH), padded(LENGTH), head()
    whole = shifted(model(x), labels)
    whole.backward()

    def run(transport: LocalTransport, schedule: str) -> tuple[float | None, dict[str, Tensor | None]]:
        pipe = penstock.Pipeline(
            head(), (x,), loss_fn=shifted, schedule=schedule, microbatches=5, profile=False, group=transport,
            loss_scale=torch.amp.GradScaler("cpu", init_scale=2.0**10),
        )  # fmt: skip
        return pipe.step(x, target=labels).loss, {name: p.grad for name, p in pipe.named_parameters()}

    for schedule in ("gpipe", "1f1b", "zb-h1"):
        losses, grads = zip(*LocalWorld(2).run(run, schedule), strict=True)
        assert losses == (pytest.approx(whole.item(), rel=1e-12),) * 2
        found = {name: grad for one in grads for name, grad in one.items()}
        expected = {name: 2.0**10 * p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_plain_schedule_keeps_the_semantics_of_torch() -> None:
    """`scale_grads=True` divides by the microbatches there, as programs that were written for it expect."""
    module, x, y = nn.Linear(3, 3), torch.randn(4, 3), torch.randn(4, 3)
    loss_fn = nn.MSELoss(reduction="sum")
    penstock.ScheduleGPipe(penstock.PipelineStage(module, 0, 1, "cpu"), 4, loss_fn=loss_fn).step(x, target=y)
    expected = torch.autograd.grad(loss_fn(module(x), y) / 4, module.weight)[0]
    torch.testing.assert_close(module.weight.grad, expected)
