"""What went wrong in pipelines before, silently or not, each with its story; the numbers are those of PITFALLS.md."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import Microbatches, Schedule
from penstock.batch import weighted_mean
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PeerFailed
from penstock.schedules import get_schedule
from tests.run.pipes import batch, close, grads_of, loop_grads, make_modules, on_ranks, stages_for

SPLIT = ["interleavedzerobubble", "zbv", "dualpipev", "zb-h1"]


def count_of(name: str) -> int:
    return 2 if name == "zb-h1" else 4


@pytest.mark.parametrize("name", SPLIT)
def test_split_backward_fires_gradient_hooks(name: str) -> None:
    """DDP reduces in hooks of the parameters. A split backward that wrote `.grad` itself fired none: replicas trained
    apart, without an error."""
    modules = make_modules(count_of(name))
    fired: list[int] = []
    for module in modules:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: fired.append(id(p)))
    x, y = batch(8)
    on_ranks(name, 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    assert len(fired) == 4 * 2 * len(modules)


@pytest.mark.parametrize("name", [*SPLIT, "1f1b", "gpipe"])
@pytest.mark.parametrize("frozen", ["prefix", "middle", "suffix", "all but one"])
def test_frozen_layers_leave_the_others_their_gradients(name: str, frozen: str) -> None:
    """Whether a stage has an input gradient was decided by its position. With a frozen embedding the first trainable
    stage got no gradient at all, or a wrong one."""
    modules = make_modules(2 if name in ("zb-h1", "1f1b", "gpipe") else 4)
    half = len(modules) // 2
    chosen = {
        "prefix": modules[:half],
        "middle": modules[1:-1] or modules[:1],
        "suffix": modules[half:],
        "all but one": modules[:-1],
    }[frozen]
    for module in chosen:
        module.requires_grad_(False)
    x, y = batch(8)
    on_ranks(name, 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    assert close(grads_of(modules), loop_grads(modules, x, y, 4))
    assert all(p.grad is None for module in chosen for p in module.parameters())


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
def test_accumulated_steps_add_up(name: str) -> None:
    """`.grad` was divided by the number of microbatches after each step, and so was what stood in it before: three
    accumulated steps weighed 1 : 1.5 : 1.75. An evaluation divided once more."""
    modules = make_modules(2 if name == "gpipe" else 4)
    x, y = batch(8)

    def rank(schedule: Schedule, rank: int) -> None:
        for _ in range(3):
            schedule.step(x, target=y)
            schedule.eval(x, target=y)

    on_ranks(name, 2, 4, rank, modules=modules)
    once = loop_grads(modules, x, y, 4)
    assert close(grads_of(modules), [grad * 3 for grad in once])


@pytest.mark.parametrize("scale", [True, False])
def test_means_sums_and_token_weights_each_have_an_exact_way(scale: bool) -> None:
    """A mean over rows: `scale_grads`. A sum, or a loss that weighs by tokens: as it is, with `scale_grads=False`."""
    modules = make_modules(2)
    x, y = batch(7)
    tokens = torch.arange(1.0, 8.0, dtype=torch.float64)

    def mean(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, target["y"])

    def weighted(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return ((output - target["y"]).pow(2).mean(1) * target["tokens"]).sum() / tokens.sum()

    loss = mean if scale else weighted
    target = {"y": y, "tokens": tokens}
    on_ranks(
        "1f1b", 2, 3, lambda schedule, rank: schedule.step(x, target=target),
        modules=modules, loss_fn=loss, scale_grads=scale,
    )  # fmt: skip
    got = [grad.clone() for grad in grads_of(modules)]
    model = nn.Sequential(*modules)
    model.zero_grad()
    loss(model(x), target).backward()  # the whole batch at once
    assert close(got, grads_of(modules))


def test_things_that_are_no_batch_are_not_cut() -> None:
    """A (sequence, width) table of positions was cut like a batch, because it had as many rows as microbatches."""

    class Positions(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x + table.sum(0)

    x, _ = batch(8)
    table = torch.ones(4, 4, dtype=torch.float64)

    def rank(schedule: Schedule, rank: int) -> str:
        with pytest.raises(Exception, match=r"args\[1\]") as caught:
            schedule.eval(x, table)
        return str(caught.value)

    texts = on_ranks("gpipe", 2, 4, rank, modules=[Positions(), nn.Identity()], loss_fn=None)
    assert all("Replicate()" in text for text in texts)


def test_a_shorter_message_is_not_received_into_a_longer_buffer() -> None:
    """Receive buffers were made for the first batch. A shorter one left stale rows in them, which were computed on."""
    modules = make_modules(3)
    model = nn.Sequential(*modules)
    sizes = [9, 5, 12, 5, 3]

    def rank(schedule: Schedule, rank: int) -> list[Tensor]:
        return [schedule.eval(batch(rows)[0]) for rows in sizes]

    *_, outputs = on_ranks("1f1b", 3, 3, rank, modules=modules)
    for rows, output in zip(sizes, outputs, strict=True):
        assert torch.allclose(output, model(batch(rows)[0]), rtol=1e-14)


def test_the_loss_of_microbatches_of_different_size() -> None:
    """The plain mean of the losses of 3, 2 and 2 rows is not the loss of 7 rows."""
    modules = make_modules(2)
    x, y = batch(7)
    found: list[Tensor] = []
    on_ranks("1f1b", 2, 3, lambda schedule, rank: schedule.step(x, target=y, losses=found), modules=modules)
    whole = nn.functional.mse_loss(nn.Sequential(*modules)(x), y)
    assert torch.allclose(weighted_mean(found, [3, 2, 2]), whole, rtol=1e-14)
    assert not torch.allclose(torch.stack(found).mean(), whole, rtol=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_schedule_survives_a_failed_step(name: str) -> None:
    """State of a microbatch was spread over objects and never reset: after one exception every later step failed."""
    modules = make_modules(2 if name == "1f1b" else 4)
    x, y = batch(8)

    def rank(schedule: Schedule, rank: int) -> None:
        for bad in (x[:, :2], x.float(), x[:2]):
            with pytest.raises((RuntimeError, ValueError)):
                schedule.step(bad, target=y)
        for index in schedule.placement.stages_of(rank):
            modules[index].zero_grad()
        schedule.step(x, target=y)

    on_ranks(name, 2, 4, rank, modules=modules)
    assert close(grads_of(modules), loop_grads(modules, x, y, 4))


@pytest.mark.parametrize("name", [*SPLIT, "gpipe"])
def test_outputs_that_are_views_or_not_contiguous(name: str) -> None:
    """A view could not be detached in place, a transposed tensor could not be sent."""

    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).view(-1, 4, 2).transpose(1, 2)[:, 1]

    torch.manual_seed(0)
    modules: list[nn.Module] = [View() for _ in range(count_of(name) if name != "gpipe" else 2)]
    x, y = batch(8)
    on_ranks(name, 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    assert close(grads_of(modules), loop_grads(modules, x, y, 4))


@pytest.mark.parametrize("name", ["1f1b", "interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev", "v-min"])
@pytest.mark.parametrize("num_microbatches", [1, 3, 7])
def test_any_number_of_microbatches(name: str, num_microbatches: int) -> None:
    """Fewer microbatches than stages, or no multiple of the number of ranks, were refused."""
    modules = make_modules(4 if name == "1f1b" else 8)
    x, y = batch(7)
    on_ranks(name, 4, num_microbatches, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    assert close(grads_of(modules), loop_grads(modules, x, y, num_microbatches))


def test_nests_constants_and_dict_targets_cross() -> None:
    """Only tuples of tensors with gradients could cross; a dict as the target was refused."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"hidden": self.linear(x), "mask": x > 0, "cache": None, "layers": (1, 2.5, "a"), "ids": x.long()}

    class Second(nn.Module):
        def forward(self, value: dict[str, Any]) -> dict[str, Any]:
            assert value["cache"] is None
            assert value["layers"] == (1, 2.5, "a")
            assert value["ids"].dtype is torch.int64
            return {"logits": value["hidden"] * value["mask"], "extra": None}

    torch.manual_seed(0)
    modules = [First(), Second()]
    x, y = batch(8)
    on_ranks(
        "1f1b", 2, 4, lambda schedule, rank: schedule.step(x, target={"y": y, "weight": 2.0}),
        modules=list(modules), loss_fn=lambda out, target: (out["logits"] - target["y"]).pow(2).mean() * target["weight"],
    )  # fmt: skip
    got = [grad.clone() for grad in grads_of(list(modules))]
    modules[0].zero_grad()
    ((modules[1](modules[0](x))["logits"] - y).pow(2).mean() * 2).backward()
    assert close(got, grads_of(list(modules)))


@pytest.mark.parametrize("name", ["zbv", "interleavedzerobubble"])
def test_checkpoints_recompute_once_with_a_split_backward(name: str) -> None:
    """The input pass recomputed the stage, and the weight pass did it again."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.runs = nn.Linear(4, 4).double(), 0

        def inner(self, x: Tensor) -> Tensor:
            self.runs += 1
            return torch.tanh(self.linear(x))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    modules = [Checkpointed() for _ in range(4)]
    x, y = batch(8)
    on_ranks(name, 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=list(modules))
    assert [module.runs for module in modules] == [2 * 4] * 4
    assert close(grads_of(list(modules)), loop_grads(list(modules), x, y, 4))


def test_nothing_waits_for_the_garbage_collector() -> None:
    """Reference cycles kept the activations of a step alive until the collector ran, at the worst time."""
    modules = make_modules(4)
    seen: list[weakref.ref[Tensor]] = []
    for module in modules:
        module.register_forward_hook(lambda _, args, output: seen.append(weakref.ref(output)))
    x, y = batch(8)

    def rank(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)
        schedule.step(x, target=y, return_outputs=False)

    gc.collect()
    gc.disable()
    try:
        on_ranks("zbv", 2, 4, rank, modules=modules)
        assert sum(ref() is not None for ref in seen[16:]) == 0
    finally:
        gc.enable()


def test_finding_shapes_does_not_run_the_model() -> None:
    """The model ran on zeros first: batch norm counted them, dropout moved the random state, integers were garbage."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.seen = nn.BatchNorm1d(4).double(), 0

        def forward(self, x: Tensor) -> Tensor:
            assert x.abs().sum() > 0
            self.seen += 1
            return self.norm(x)

    modules = [Counting(), Counting()]
    x, y = batch(8)
    before = torch.get_rng_state()
    on_ranks("1f1b", 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=list(modules))
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.seen for module in modules] == [4, 4]
    assert [int(module.norm.num_batches_tracked) for module in modules] == [4, 4]


@pytest.mark.parametrize("name", ["gpipe", "zbv", "dualpipev"])
def test_evaluation_with_another_batch_size(name: str) -> None:
    """Evaluation ran the training schedule over buffers of the training batch; with V placements it crashed."""
    modules = make_modules(2 if name == "gpipe" else 4)
    model = nn.Sequential(*modules)
    x, y = batch(8)
    wide, _ = batch(22)

    def rank(schedule: Schedule, rank: int) -> Any:
        schedule.step(x, target=y)
        return schedule.eval(wide)

    output = next(out for out in on_ranks(name, 2, 4, rank, modules=modules) if out is not None)
    assert torch.allclose(output, model(wide), rtol=1e-14)


@pytest.mark.parametrize("names", [("gpipe", "zb-h1", "1f1b"), ("zbv", "dualpipev", "interleaved1f1b")])
def test_dropout_does_not_depend_on_the_schedule(names: tuple[str, ...]) -> None:
    """Each schedule draws random numbers in another order, so no two of them agreed, nor with a single process."""
    torch.manual_seed(0)
    count = 2 if names[0] == "gpipe" else 4
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double() for _ in range(count)]
    x, y = batch(8)
    found = []
    for name in names:
        for module in modules:
            module.zero_grad()
        on_ranks(
            name, 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules, rng="per-microbatch", seed=3
        )
        found.append([grad.clone() for grad in grads_of(modules)])
    assert close(found[0], found[1])
    assert close(found[0], found[2])


def test_nothing_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, events and seeds of CUDA were taken for granted; later, that a pipeline uses the GPU of its machine."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("CUDA was asked for")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", refuse)

    for name in ("current_stream", "synchronize", "current_device", "Stream", "Event", "get_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    modules = make_modules(4)
    x, y = batch(8)
    on_ranks(
        "zbv", 2, 4, lambda schedule, rank: (schedule.step(x, target=y), schedule.eval(x)),
        modules=modules, rng="per-microbatch",
    )  # fmt: skip
    assert close(grads_of(modules), loop_grads(modules, x, y, 4))


def test_a_peer_that_failed_is_told_apart_from_ones_own_failure() -> None:
    """Ready microbatches of the wrong number: the rank that was given them says so, the others name it."""
    x, y = batch(8)

    def rank(schedule: Schedule, rank: int) -> None:
        if rank == 0:
            with pytest.raises(ValueError, match="3"):
                schedule.step(Microbatches([x, x, x]))
        else:
            with pytest.raises(PeerFailed, match="rank 0 failed: SplitError"):
                schedule.step(target=y)

    on_ranks("1f1b", 2, 4, rank)


class Counting(nn.Module):
    """Gives, beside its output, a buffer that every forward changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor, before: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        self.seen.add_(1)
        return x * self.seen.clone() + before, self.seen


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("train", [True, False])
def test_a_buffer_in_an_output_has_the_value_of_its_microbatch(num_ranks: int, train: bool) -> None:
    """A stage gave a running count beside its output. The next forwards added to it before the next stage had read it, or the
    outputs were put together, so that all microbatches saw a later count than in the unpipelined model."""
    x, y = batch(8)
    plan = get_schedule("loopedbfs")(num_ranks, 4, stages_per_rank=2 // num_ranks)
    modules: list[nn.Module] = [Counting(), Counting()]

    def rank(transport: LocalTransport) -> Any:
        schedule = Schedule.from_plan(plan, stages_for(plan, transport, modules), loss_fn=lambda out, _: out[0].mean())
        return (schedule.step if train else schedule.eval)(x.clone().requires_grad_(), target=y)

    values, counts = LocalWorld(num_ranks).run(rank)[-1]
    numbers = torch.arange(1, 5, dtype=torch.float64)
    assert torch.equal(counts, numbers)
    assert torch.equal(values, x * numbers.repeat_interleave(2)[:, None] ** 2 + numbers.repeat_interleave(2)[:, None])


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_hook_on_a_tied_parameter_changes_its_gradient_once(name: str) -> None:
    """A hook that halves the gradient of a weight that two stages hold (as those that let some rows of an embedding learn more
    slowly do) fired for each part of the gradient and again for their sum: the weight learnt at a quarter of its pace."""
    x, y = batch(8)
    modules: list[nn.Module] = [nn.Linear(4, 4, bias=False).double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    whole = nn.Parameter(modules[0].weight.detach().clone())  # type: ignore[arg-type, operator]
    for weight in (whole, *(module.weight for module in modules)):
        weight.register_hook(lambda grad: grad / 2)  # type: ignore[operator]
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.functional.mse_loss(a @ whole.T @ whole.T, b) / 4).backward()

    tied = [penstock.tie([(0, "weight"), (1, "weight")])]
    on_ranks(name, 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules, ties=tied)
    assert whole.grad is not None
    assert close(grads_of(modules), [whole.grad, whole.grad])


class Clamped(nn.Module):
    """Changes its input in place, for some microbatches."""

    def __init__(self, buffers: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        for number in range(buffers):
            self.register_buffer(f"buffer{number}", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().max() > 1:
            x[x > 1] = 1
        return self.linear(x)


def large_in_the_third() -> tuple[Tensor, Tensor]:
    x, y = batch(8)
    x = x.clamp(-0.5, 0.5)
    x[4] = 50
    return x, y


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"offload": True}, {"rng": "per-microbatch"}])
@pytest.mark.parametrize(("name", "buffers"), [("gpipe", 1), ("1f1b", 0), ("zb-h1", 0)])
def test_an_input_that_only_some_microbatches_change_in_place(name: str, buffers: int, options: dict[str, Any]) -> None:
    """Forwards of the first step are given copies of their inputs, which show whether any of them changes one in place (values
    to be clamped, rows to be masked): the step is right. Where only a later step does so, autograd refuses to change a leaf;
    what the forward has drawn and changed by then cannot be taken back, so that step fails, and the next one is right."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(4, 4).double(), Clamped(buffers)]
    with torch.no_grad():
        modules[0].weight.copy_(torch.eye(4))  # type: ignore[operator]
        modules[0].bias.zero_()  # type: ignore[operator]
    x, y = large_in_the_third()

    def found_at_once(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    def found_later(schedule: Schedule, rank: int) -> None:
        schedule.step(x.clamp(-0.5, 0.5), target=y)
        with pytest.raises(
            penstock.errors.PenstockError, match="changes its input in place for microbatch 2, and did not"
        ):
            schedule.step(x, target=y)
        for module in modules if rank == 0 else []:
            module.zero_grad()
        schedule.step(x, target=y)

    for steps in (found_at_once, found_later):
        for module in modules:
            module.zero_grad()
        on_ranks(name, 2, 4, steps, modules=modules, **options)
        assert close(grads_of(modules), loop_grads(modules, x, y, 4))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.table


class Looking(nn.Module):
    """Looks rows up in the table that the stage before gave it; the table's gradient is sparse."""

    def forward(self, table: Tensor) -> Tensor:
        return nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)


def test_a_sparse_gradient_goes_upstream_and_a_sparse_value_is_refused() -> None:
    """The sender of a sparse gradient failed with an error about memory formats, and so did that of a sparse value."""
    x, y = batch(8)
    modules: list[nn.Module] = [Table(), Looking()]
    on_ranks("1f1b", 2, 4, lambda schedule, rank: [schedule.step(x, target=y) for _ in range(2)], modules=modules)
    (expected,) = loop_grads(modules, x, y, 4)
    assert close(grads_of(modules), [2 * expected.to_dense()])

    def refused(schedule: Schedule, rank: int) -> None:
        with pytest.raises(penstock.errors.PenstockError, match=r"sparse_coo tensor of shape \[2, 4\] cannot be sent"):
            schedule.eval(x)

    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    on_ranks("gpipe", 2, 4, refused, modules=[Sparse(), Looking()])


def test_tied_parameters_that_were_replaced_stay_tied() -> None:
    """``load_state_dict(..., assign=True)`` puts other parameters in the places of the old ones. The gradients of the old ones
    were added up from then on, and the new ones each had a part of theirs."""
    x, y = batch(8)
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4, bias=False)).double() for _ in range(2)]
    state = {"0.weight": torch.randn(4, 4, dtype=torch.float64)}

    def rank(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)
        modules[rank].load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        schedule.step(x, target=y)

    tied = [penstock.tie([(0, "0.weight"), (1, "0.weight")])]
    on_ranks("1f1b", 2, 4, rank, modules=modules, ties=tied)
    whole = nn.Parameter(state["0.weight"].clone())
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.functional.mse_loss(a @ whole.T @ whole.T, b) / 4).backward()
    assert whole.grad is not None
    assert close(grads_of(modules), [whole.grad, whole.grad])


class SameTwice(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, bias=False).double() for _ in range(2))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).tanh())
        return out


@pytest.mark.parametrize("ties", [["a.weight", "b.weight"], ["b.weight", "a.weight"]])
def test_a_parameter_in_two_ties_is_refused(ties: list[str]) -> None:
    """Its gradient was added up once for each tie, so that the weight learnt at twice its pace, and what `.grad` held before was
    lost; three stages tied in two pairs each had another gradient. One tie with all names is what was meant."""
    x, y = batch(8)

    def refused(schedule: Schedule, rank: int) -> None:
        with pytest.raises(
            penstock.errors.StageError, match=r"in two ties: \w\.weight of stage 0 .* one tie with all holders"
        ):
            schedule.step(x, target=y)

    pairs = [penstock.tie([(0, name), (1, name)]) for name in ties]
    on_ranks("1f1b", 2, 4, refused, modules=[SameTwice(), SameTwice()], ties=pairs)


@pytest.mark.parametrize("where", [0, 1])
def test_a_tied_parameter_that_is_frozen_on_one_rank_is_named_on_all_that_hold_it(where: int) -> None:
    """There autograd said that element 0 of tensors does not require grad; the other rank had the gradient and went on, so that
    what was one parameter became two."""
    x, y = batch(8)
    modules: list[nn.Module] = [nn.Linear(4, 4).double() for _ in range(2)]
    modules[where].weight.requires_grad_(False)  # type: ignore[operator]

    def refused(schedule: Schedule, rank: int) -> None:
        weight = modules[rank].weight
        with pytest.raises(penstock.errors.StageError, match="a holder has it frozen while another trains it"):
            schedule.step(x, target=y)
        assert weight.grad is None
        weight.requires_grad_(False)  # type: ignore[operator]
        schedule.step(x, target=y)
        assert weight.grad is None

    on_ranks("zb-h1", 2, 4, refused, modules=modules, ties=[penstock.tie([(0, "weight"), (1, "weight")])])


class LayerDrop(nn.Module):
    """Leaves its batch norm out for some microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.norm(y) if x[0, 0] > 0 else y


def test_a_batch_norm_that_the_first_forward_leaves_out_counts_once_when_run_again() -> None:
    """The first forward showed which buffers a forward changes. A batch norm that it left out changes its statistics past
    autograd's count, so they were not put back before later forwards were run again, and took in those microbatches twice."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [LayerDrop(), nn.Linear(4, 4).double()]
    x, y = batch(8)
    x[:, 0] = torch.tensor([-1.0, -1, 1, 1, -1, -1, 1, 1])
    whole = nn.Sequential(*copy.deepcopy(modules))
    for part in x.chunk(4):
        whole(part)
    on_ranks("gpipe", 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules, recompute=True)
    for name, value in whole[0].named_buffers():
        assert torch.equal(value, dict(modules[0].named_buffers())[name]), name


class Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2)[:, 0]


def test_a_forward_that_gives_every_fourth_number_is_run_again() -> None:
    """Whether a run without a graph gives the same bits was asked of its bytes, which failed for a vector with gaps."""
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4).double(), Strided()), nn.Unflatten(0, (-1, 1))]
    x, y = batch(8)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output * target).mean()

    on_ranks("gpipe", 2, 4, lambda s, _: s.step(x, target=y), modules=modules, recompute=True, loss_fn=loss)
    (weight, bias), whole = grads_of(modules), nn.Sequential(*copy.deepcopy(modules))
    whole.zero_grad()
    loss(whole(x), y).backward()
    assert close([weight, bias], grads_of([whole]))


class CountsFirst(nn.Module):
    """Changes one input in place, and then another, which autograd refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        position += 1
        x.mul_(2)
        return self.linear(x) * position


class WithPosition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), torch.zeros(len(x), 1).double()


def test_a_forward_that_changed_another_input_is_not_run_again() -> None:
    """The first forward was run again with copies of the refused input alone: the other one was counted up twice."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [WithPosition(), CountsFirst()]
    x, y = batch(8)

    def rank(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    on_ranks("1f1b", 2, 4, rank, modules=modules)
    found = grads_of(modules)
    for module in modules:
        module.zero_grad()
    for one, target in zip(x.chunk(4), y.chunk(4), strict=True):
        hidden, position = modules[0](one)
        (nn.functional.mse_loss(modules[1](hidden * 1, position), target) / 4).backward()
    assert close(found, grads_of(modules))


class Branches(nn.Module):
    """The first microbatch leaves the layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.mean() > 0 else x * 1


class Keeps(Branches):
    """Keeps something of its own for all microbatches of a step."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.linear.weight + 1
        return x @ self.kept


class CountsGraphs(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.count += 1
        return self.linear(x)


@pytest.mark.parametrize("kind", [Branches, Keeps, CountsGraphs])
def test_a_forward_with_a_mind_of_its_own_is_recomputed(kind: type[Branches]) -> None:
    """Run without a graph, the first of two forwards says nothing of the gradients and buffers of the next ones, and leaves
    values without a graph behind. So user's own Python is run with one."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [kind(), nn.Linear(4, 4).double()]
    x, y = batch(8)
    x[:2], x[2:] = -x[:2].abs(), x[2:].abs()
    on_ranks("gpipe", 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules, recompute=True)
    on_ranks("gpipe", 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules, recompute=True)
    recomputed, count = grads_of(modules), getattr(modules[0], "count", torch.zeros(())).clone()
    for module in modules:
        module.zero_grad()
    modules[0].kept = None
    for _ in range(2):
        on_ranks("gpipe", 2, 4, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    assert all(grad is not None for grad in recomputed)
    assert close(recomputed, grads_of(modules))
    assert getattr(modules[0], "count", 2 * count) == 2 * count


def test_a_stage_without_data_runs_alone() -> None:
    """A lone rank had its stage's device for its own, whatever that was: on meta tensors, which show shapes and cost nothing, a
    step failed when it asked torch for the autocast of that device."""
    stage = penstock.PipelineStage(nn.Linear(4, 4, device="meta"), 0, 1, "meta")
    schedule = Schedule.from_plan(get_schedule("1f1b")(1, 2), [stage], loss_fn=lambda output, _: output.sum())
    x = torch.ones(4, 4, device="meta")
    with schedule.record() as recording:
        output = schedule.step(x, target=x)
    assert output.shape == (4, 4)
    assert recording.timeline.makespan > 0
