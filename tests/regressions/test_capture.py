"""What went wrong when models were captured, each with its story; the numbers are those of PITFALLS.md."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from penstock import MultiUseParameterConfig, Schedule, SplitPoint, pipe_split, pipeline
from penstock.capture import Pipe, materialise
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import CaptureError
from penstock.plan import Plan
from penstock.schedules import get_schedule

SEVERAL = ["loopedbfs", "interleaved1f1b", "interleavedzerobubble", "zbv", "dualpipev", "v-half"]  # stages on each rank


def plan_of(name: str, num_stages: int, num_microbatches: int) -> Plan:
    recipe = get_schedule(name)
    per_rank = recipe.stages_per_rank or 2
    return recipe(num_stages // per_rank, num_microbatches, stages_per_rank=per_rank)


def on_ranks(plan: Plan, pipe: Pipe, work: Callable[[Schedule, Pipe], Any], **options: Any) -> list[Any]:
    """`work(schedule, pipe)` on every rank, each with a copy of the pipe, as processes have it; the last stage's first."""

    def rank(transport: LocalTransport) -> Any:
        own = copy.deepcopy(pipe)
        stages = [own.build_stage(k, "cpu", group=transport) for k in plan.placement.stages_of(transport.rank)]
        return work(Schedule.from_plan(plan, stages, **options), own)

    found = LocalWorld(plan.num_ranks).run(rank)
    last = plan.placement.rank_of(plan.num_stages - 1)
    return [found[last], *found[:last], *found[last + 1 :]]


class Words(nn.Module):
    """Embedding and head share their weight; returns its own loss when it is given labels."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, mask: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        weight = torch.ones_like(each) if mask is None else mask.flatten()
        return {"rows": ids.shape[0], "loss": (each * weight).sum() / weight.sum(), "logits": logits}


LAYERS = {"layers.0": SplitPoint.BEGINNING, "layers.1": SplitPoint.BEGINNING, "head": SplitPoint.BEGINNING}


def words(rows: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, 11, (2, rows, 3), generator=generator)
    return {"ids": ids, "mask": torch.rand(rows, 3, generator=generator, dtype=torch.float64), "labels": labels}


def make_words(**options: Any) -> tuple[nn.Module, Pipe]:
    torch.manual_seed(0)
    model = Words().double()
    example = {name: value[:2] for name, value in words().items()}
    return copy.deepcopy(model), pipeline(model, (), example, split_spec=LAYERS, **options)


def loop(model: nn.Module, batch: dict[str, Tensor], count: int) -> list[Tensor]:
    """The model itself over the microbatches, each weighed by its rows."""
    pieces = {name: value.tensor_split(count) for name, value in batch.items()}
    losses = []
    for m in range(count):
        part = {name: piece[m] for name, piece in pieces.items()}
        loss = model(**part)["loss"]
        (loss * (len(part["ids"]) / len(batch["ids"]))).backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved1f1b"])
@pytest.mark.parametrize("way", list(MultiUseParameterConfig))
def test_tied_weights_stay_one(name: str, way: MultiUseParameterConfig) -> None:
    """Embedding and head became two parameters: each got half of the gradient, and they drifted apart step by step.

    Whether the weight is held by both stages or sent from one to the other, training is that of the unsplit model.
    """
    model, pipe = make_words(multi_use_param_spec=way)
    batch = words()

    def train(schedule: Schedule, own: Pipe) -> dict[str, Tensor]:
        modules = [stage.submod for stage in schedule.stages]
        for _ in range(3):
            for module in modules:
                module.zero_grad()
            schedule.step(**batch)
            with torch.no_grad():
                for parameter in {id(p): p for module in modules for p in module.parameters()}.values():
                    parameter -= 0.5 * parameter.grad
        return {name: value for module in modules for name, value in module.state_dict().items()}

    states = on_ranks(plan_of(name, 4, 3), pipe, train)
    for _ in range(3):
        model.zero_grad()
        loop(model, batch, 3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    wanted = model.state_dict()
    assert {key for state in states for key in state} == set(wanted)
    for state in states:
        for key, value in state.items():
            torch.testing.assert_close(value, wanted[key], rtol=1e-10, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.first(x)))
        pipe_split()
        return self.dropout(self.second(x))


def test_train_and_eval_do_what_they_do_on_the_model() -> None:
    """Export writes the mode into the graph: dropout stayed on after .eval(), and batch norm went on counting.

    Batch norm in training means, as in a loop over the microbatches: normalised with the statistics of each microbatch,
    the running ones moved once by each. In evaluation the running ones are used, and stay.
    """
    torch.manual_seed(0)
    model = Modes().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    reference, pipe = copy.deepcopy(model), pipeline(model, (x[:2],))

    def work(schedule: Schedule, own: Pipe) -> tuple[Any, Tensor | None, Any]:
        modules = [stage.submod for stage in schedule.stages]
        noisy = schedule.step(x, target=x)
        mean = modules[0].norm.running_mean.clone() if hasattr(modules[0], "norm") else None
        for module in modules:
            module.eval()
        quiet = schedule.eval(x)
        after = schedule.eval(x)
        return noisy, mean, (quiet, after)

    found = on_ranks(get_schedule("1f1b")(2, 3), pipe, work, loss_fn=nn.functional.mse_loss)
    (noisy, _, (quiet, after)), (_, mean, _) = found
    for part in x.chunk(3):
        reference(part)
    torch.testing.assert_close(mean, reference.norm.running_mean)
    assert (noisy == 0).any()
    reference.eval()
    assert torch.equal(quiet, torch.cat([reference(part) for part in x.chunk(3)]))
    assert torch.equal(quiet, after)


@pytest.mark.parametrize("count", range(1, 8))
def test_every_layer_lands_in_a_stage(count: int) -> None:
    """Seven layers over three stages: a balance by rounding lost the last layer, or made fewer stages than asked for."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
    pipe = pipeline(model, (torch.randn(2, 4),), num_stages=count)
    assert pipe.num_stages == count
    held = [name for k in range(count) for name, _ in pipe.get_stage_module(k).named_parameters()]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    assert all(len(list(pipe.get_stage_module(k).parameters())) for k in range(count))


def test_a_rotary_model_runs_and_returns_its_own_class() -> None:
    """Llama and its kin could be traced, and then failed: the rotary table, made in stage 0, was used by every layer.

    Those that ran returned a bare tuple, and a cache in the output (the default) stopped the others.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config).double()
    ids = torch.randint(0, 32, (4, 5))
    split = {f"model.layers.{i}": SplitPoint.BEGINNING for i in (1, 2, 3)}
    pipe = pipeline(model, (), {"input_ids": ids[:2], "labels": ids[:2]}, split_spec=split)

    def work(schedule: Schedule, own: Pipe) -> Any:
        return schedule.step(input_ids=ids, labels=ids)

    output, other = on_ranks(plan_of("interleaved1f1b", 4, 2), pipe, work)
    expected = [model(input_ids=part, labels=part) for part in ids.chunk(2)]
    assert type(output) is type(expected[0])
    assert other is None
    torch.testing.assert_close(output.logits, torch.cat([one.logits for one in expected]).detach())
    keys = torch.cat([one.past_key_values.layers[3].keys for one in expected])
    torch.testing.assert_close(output.past_key_values.layers[3].keys, keys.detach())


@pytest.mark.parametrize("rows", [6, 7, 5])
def test_labels_and_masks_go_to_the_stage_that_reads_them(rows: int) -> None:
    """A model called with labels= could not be pipelined: only the first stage was given the arguments of the step.

    The same call on every rank; the model's own loss is found though a number stands before it, and an uneven batch,
    given by name alone, is weighed by its rows.
    """
    model, pipe = make_words()
    batch = words(rows)

    def work(schedule: Schedule, own: Pipe) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        losses: list[Tensor] = []
        schedule.step(**batch, losses=losses)
        return losses, {n: p.grad for stage in schedule.stages for n, p in stage.submod.named_parameters()}

    found = on_ranks(plan_of("1f1b", 4, 3), pipe, work, output_merge_spec=ignore_rows(rows))
    wanted = loop(model, batch, 3)
    torch.testing.assert_close(torch.stack(found[0][0]), torch.stack(wanted))
    grads = dict(model.named_parameters(remove_duplicate=False))
    for _, own in found:
        for key, grad in own.items():
            torch.testing.assert_close(grad, grads[key].grad, rtol=1e-10, atol=1e-13)


def ignore_rows(rows: int) -> Any:
    """The number in the output differs between microbatches of different size: say how one is made of them."""
    from penstock.batch import CustomReducer

    return {"rows": CustomReducer(0, lambda total, some: total + some)} if rows % 3 else {"rows": None}


class Skipping(nn.Module):
    """Values of the first stage are used by all others."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.parts[0](x)
        for part in self.parts[1:]:
            pipe_split()
            x = part(x.tanh()) * first
        return x


@pytest.mark.parametrize("name", SEVERAL)
def test_skip_connections_with_several_stages_on_a_rank(name: str) -> None:
    """Refused by every schedule with several stages on a rank; values used by several later stages were sent to one."""
    torch.manual_seed(0)
    model = Skipping().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    reference, pipe = copy.deepcopy(model), pipeline(model, (x[:2],))

    def work(schedule: Schedule, own: Pipe) -> dict[str, Tensor | None]:
        schedule.step(x, target=x)
        return {n: p.grad for stage in schedule.stages for n, p in stage.submod.named_parameters()}

    found = on_ranks(plan_of(name, 4, 3), pipe, work, loss_fn=nn.functional.mse_loss)
    for part in x.chunk(3):
        (nn.functional.mse_loss(reference(part), part) / 3).backward()
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    grads = {n: grad for own in found for n, grad in own.items()}
    torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-13)


def test_a_gradient_that_another_stage_of_the_rank_has_added_is_kept() -> None:
    """Stages 1 and 3 sit on one rank and read the same value. When stage 1 also sent one of its own weights away, its
    split backward set the value's gradient instead of adding to it, and what stage 3 had added was lost, silently.
    """

    class Sending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first = self.first(x)
            pipe_split()
            x = self.shared(first)
            pipe_split()
            x = self.shared(x.tanh())
            pipe_split()
            return self.last(x) * first

    torch.manual_seed(0)
    model = Sending().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (x[:2],), multi_use_param_spec=MultiUseParameterConfig.TRANSMIT)

    def work(schedule: Schedule, own: Pipe) -> Tensor | None:
        schedule.step(x, target=x)
        return own.get_stage_module(0).get_parameter("first.weight").grad

    found = on_ranks(plan_of("interleavedzerobubble", 4, 3), pipe, work, loss_fn=nn.functional.mse_loss)
    for part in x.chunk(3):
        (nn.functional.mse_loss(reference(part), part) / 3).backward()
    torch.testing.assert_close(found[1], reference.first.weight.grad, rtol=1e-10, atol=1e-13)


def test_a_model_can_be_captured_again_and_adjacent_marks_lose_nothing() -> None:
    """Marks were put in by replacing the forwards of the user's modules: a second call recursed without end. Of two
    adjacent marks (the end of a layer, the beginning of the next) one stage vanished.
    """
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.randn(2, 4)
    before = {key: value for module in model for key, value in vars(module).items()}
    both = {"0": SplitPoint.END, "2": SplitPoint.BEGINNING}
    for _ in range(3):
        pipe = pipeline(model, (x,), split_spec=both)
        assert pipe.num_stages == 3
        assert torch.equal(pipe(x), model(x))
    after = {key: value for module in model for key, value in vars(module).items()}
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] for key in before)
    with pytest.raises(CaptureError, match="nothing is computed between the end of 0 and the beginning of 1"):
        pipeline(model, (x,), split_spec={"0": SplitPoint.END, "1": SplitPoint.BEGINNING})


def test_a_model_that_fits_nowhere_is_trained_stage_by_stage() -> None:
    """The whole model had to be built on every rank before it could be cut. Here nobody ever has all of it: it is traced
    on the meta device, and each rank gives memory to its own stages alone.
    """
    torch.manual_seed(0)
    real = Words().double()
    batch = words()
    with torch.device("meta"):
        model = Words().double()
    pipe = pipeline(model, (), {name: value[:2] for name, value in batch.items()}, split_spec=LAYERS)
    plan = plan_of("1f1b", 4, 3)

    def rank(transport: LocalTransport) -> tuple[list[bool], list[Tensor]]:
        own = copy.deepcopy(pipe)
        stage = own.get_stage_module(transport.rank)
        report = materialise(stage, real.state_dict())
        assert not report.missing
        schedule = Schedule.from_plan(plan, own.build_stage(transport.rank, "cpu", group=transport))
        losses: list[Tensor] = []
        schedule.step(**batch, losses=losses)
        return [any(p.is_meta for p in own.get_stage_module(k).parameters()) for k in range(4)], losses

    found = LocalWorld(4).run(rank)
    for rank_number, (on_meta, _) in enumerate(found):
        assert on_meta == [k != rank_number for k in range(4)]
    torch.testing.assert_close(torch.stack(found[3][1]), torch.stack(loop(real, batch, 3)))


def test_a_microbatch_of_one_row() -> None:
    """Export takes a size of 1 for a constant, so such a call is traced anew; with one row of ids and, since only the
    last stage reads them, still two rows of labels, the loss did not fit.
    """
    torch.manual_seed(0)
    auto = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    model, batch = Words().double(), words(3)
    example = {name: value[:2] for name, value in batch.items()}
    pipe = pipeline(model, (), example, split_spec=LAYERS, dynamic_shapes=dict.fromkeys(example, auto))
    longer = {name: torch.cat([value, value[:, :2]], 1) for name, value in batch.items()}

    def work(schedule: Schedule, own: Pipe) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[], []]
        for losses, given in zip(found, (batch, longer), strict=True):
            schedule.step(**given, losses=losses)
        return found

    found = on_ranks(plan_of("1f1b", 4, 3), pipe, work)[0]
    for losses, given in zip(found, (batch, longer), strict=True):
        torch.testing.assert_close(torch.stack(losses), torch.stack(loop(model, given, 3)))


def test_a_model_captured_in_evaluation_trains_though_it_is_cut_before_a_batch_norm() -> None:
    """In training a batch norm counts its batches before it normalizes. With the cut between the two, the stage before it was to
    add to a count that it does not have, and switching to training was an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    x = torch.randn(8, 4)
    pipe = pipeline(copy.deepcopy(model), (x,), num_stages=3)
    for mode in (True, False, True):
        model.train(mode)
        pipe.train(mode)
        torch.testing.assert_close(pipe(x), model(x))
    assert pipe.get_stage_module(1).state_dict()["1.num_batches_tracked"] == 2


class TakesTarget(nn.Module):
    """Computes its own loss from an argument that has the name of one of `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.last(self.first(x)), target)}


def test_an_argument_called_target_is_given_by_its_place() -> None:
    """The error asked to pass the argument that the call did have: `step` had taken it for itself."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    stage = pipeline(TakesTarget(), (x[:2], y[:2]), num_stages=1).build_stage(0, "cpu")
    schedule = Schedule.from_plan(get_schedule("gpipe")(1, 4), stage)
    with pytest.raises(CaptureError, match="target= is an argument of step itself: give the model's by its place"):
        schedule.step(x, target=y)
    losses: list[Tensor] = []
    schedule.step(x, y, losses=losses)
    assert len(losses) == 4


class Chance(nn.Module):
    """Adapters of peft ask so before they add to a layer; here they are also held under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.second
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.second(x) if torch.rand(1) > self.rate else x


def test_a_rate_of_zero_lets_everything_pass() -> None:
    """LoHa and LoKr could not be traced: a random number is above zero, and nobody said so."""
    model, x = Chance(), torch.randn(6, 4)
    pipe = pipeline(model, (x,), split_spec={"second": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(x), model(x))


class Frozen(nn.Module):
    """Takes its weight without its gradient, as adapters of peft do that turn the layer's own weight (HRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.turn = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.turn(nn.functional.linear(x, self.weight.data))


def test_the_data_of_a_parameter_is_that_parameter() -> None:
    """It was taken for a constant whose values nobody knows."""
    model, x = nn.Sequential(Frozen(), Frozen()), torch.randn(6, 4)
    pipe = pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    torch.testing.assert_close(pipe(x), model(x))
    with torch.no_grad():
        pipe.get_stage_module(1).get_parameter("1.weight").zero_()
    torch.testing.assert_close(pipe(x), model[1].turn.bias.expand(6, 4))


def test_a_module_with_two_names_is_cut_by_both() -> None:
    """A module noted the last of its names alone, so that a cut by the other one was refused: the model never calls it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.first(torch.tanh(x)))

    model, x = Twice(), torch.randn(2, 4)
    pipe = pipeline(model, (x,), split_spec={"first": SplitPoint.BEGINNING, "again": SplitPoint.END})
    assert pipe.num_stages == 3
    assert torch.equal(pipe(x), model(x))


class NamedLikeAnOperator(nn.Module):
    """Has an argument of the name that the graph gives to what its first layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor, linear: Tensor) -> Tensor:
        return self.second(self.first(x)) * linear


def test_an_argument_may_be_called_like_an_operator() -> None:
    """The two were one value to whoever went by names: the layers could not be measured, and the cut was an estimate."""
    model, x, y = NamedLikeAnOperator(), torch.randn(6, 4), torch.randn(6, 8)
    pipe = pipeline(model, (x, y), num_stages=2)
    assert "measured" in pipe.info().cut_by
    assert torch.equal(pipe(x, y), model(x, y))
    inputs = pipe.info().stage_inputs[1]
    assert len({wire.name for wire in inputs}) == len(inputs) == 2


class OtherConstants(nn.Module):
    """Multiplies by tensors that it makes on the way, by one more of them in evaluation and for a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pipe_split()
        if not self.training or x.shape[0] == 1:
            x = x * torch.tensor([5.0])
        return self.second(x) * torch.tensor([3.0])


def test_constants_of_another_mode_or_size_are_its_own() -> None:
    """The first constant of each trace has the same name, and the stage went on with that of the mode it was captured in."""
    model, x = OtherConstants(), torch.randn(6, 4)
    pipe = pipeline(model, (x,))
    for mode in (True, False, True):
        for made in (pipe.train(mode), copy.deepcopy(pipe)):
            for rows in (6, 1):
                torch.testing.assert_close(made(x[:rows]), model.train(mode)(x[:rows]))


def test_constants_of_another_mode_follow_a_change_of_type_and_are_held_once() -> None:
    """Those of a mode that is first run after `.to(torch.bfloat16)` stayed float32, and equal ones were held for each."""
    model, x = OtherConstants(), torch.randn(6, 4)
    pipe = pipeline(copy.deepcopy(model), (x,)).to(torch.bfloat16)
    for mode in (True, False):
        for rows in (6, 1):
            found = pipe.train(mode)(x[:rows].bfloat16())
            torch.testing.assert_close(found, model.train(mode)(x[:rows]).bfloat16(), rtol=0.1, atol=0.1)
    values = [buffer.item() for buffer in pipe.buffers() if buffer.numel()]
    assert {*values} == {3.0, 5.0}
    assert len(values) < 6


class NamesThatMeet(nn.Module):
    """Reads the plain tensors `inner.table` and `inner_table`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner.table, self.inner_table = torch.full((4,), 2.0), torch.full((4,), 5.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.inner.table + self.inner_table
        pipe_split()
        return self.last(x)


def test_constants_whose_names_differ_in_a_dot_alone_are_two() -> None:
    """Both were called `_constant_model_inner_table` in the stage, which went on with the first for both."""
    model, x = NamesThatMeet(), torch.randn(3, 4)
    torch.testing.assert_close(pipeline(model, (x,))(x), model(x))


class TakesMore(nn.Module):
    """Takes a tensor and a flag among further arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        return self.last(torch.relu(self.first(x)) + more["bias"] * (2 if more.get("twice") else 1))


def test_further_arguments_are_named_as_torch_export_names_them_and_none_is_made_up() -> None:
    """`dynamic_shapes` may say them under the name of `**more`. A flag that was left out was taken from the capture, silently."""
    model, rows, x = TakesMore(), torch.export.Dim.AUTO, torch.randn(4, 4)
    shapes = {"x": {0: rows}, "more": {"bias": {0: rows}, "twice": None}}
    split = {"last": SplitPoint.BEGINNING}
    pipe = pipeline(
        model, (x,), {"bias": x, "twice": True}, split_spec=split, dynamic_shapes=shapes, output_loss_value_spec={}
    )
    other = torch.randn(7, 4)
    torch.testing.assert_close(pipe(other, bias=other, twice=True), model(other, bias=other, twice=True))
    with pytest.raises(CaptureError, match="argument 'twice' is missing"):
        pipe(other, bias=other)


class SummedOver(torch.autograd.Function):
    """Takes its dimensions as a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        ctx.shape = x.shape
        return x.sum(dims, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return 3 * grad.expand(ctx.shape), None


class CallsWithAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = SummedOver.apply(self.first(x), [1])
        pipe_split()
        return self.last(x.expand(-1, 4))


@pytest.mark.parametrize("rows", [3, 1])
def test_an_autograd_function_may_be_given_a_list(rows: int) -> None:
    """Capture looked such calls up by their hash, which those with a list among their arguments do not have: a TypeError."""
    model, x = CallsWithAList(), torch.randn(rows, 4)
    pipe = pipeline(model, (torch.randn(3, 4),))
    torch.testing.assert_close(pipe(x), model(x))
    expected = torch.autograd.grad(model(x).sum(), model.first.weight)
    torch.testing.assert_close(
        torch.autograd.grad(pipe(x).sum(), [pipe.get_stage_module(0).get_parameter("first.weight")]), expected
    )
