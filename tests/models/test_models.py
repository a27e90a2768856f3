"""Real architectures: the stages together are the model, in what they return and in every gradient.

They are compared in double precision: the pipeline adds up gradients of microbatches and of tied weights in another order
than one loop does, and in double precision a wrong sum cannot hide behind rounding. Outputs are the same bit by bit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.batch import merge_chunks
from penstock.capture import Pipe, SplitPoint, pipeline, split_modules
from penstock.capture.model_values import model_values
from penstock.comm.local import LocalTransport, LocalWorld
from penstock.errors import CaptureError
from penstock.nest import map_tensors
from penstock.plan import Plan
from penstock.run.schedule import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.capture.chain import assert_same
from tests.models.models import BY_MODULES, MODELS, Entry, Listed

MICROBATCHES = 4

Grads = dict[str, Tensor | None]


@dataclass(frozen=True)
class Captured:
    """A model and its stages, which hold the model's own parameters."""

    entry: Entry
    model: nn.Module
    two: Pipe  # captured in training, with the model's dropout
    four: Pipe  # captured in training, without dropout: microbatches draw in another order than a loop does


SIMILAR = {  # to one that is tested every time
    **dict.fromkeys(("gpt_neox", "opt", "bloom"), "gpt2"),
    **dict.fromkeys(("mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo"), "llama"),
    **dict.fromkeys(("electra", "roberta", "distilbert"), "bert"),
    "whisper": "bart",
}


def param(entry: Entry) -> Any:
    like = SIMILAR.get(entry.name)
    return pytest.param(entry, id=entry.name, marks=[] if like is None else pytest.mark.long(f"{like}, which is alike"))


@pytest.mark.parametrize("entry", [param(entry) for entry in MODELS])
def test_stages_train_like_the_model(entry: Entry, subtests: pytest.Subtests) -> None:
    """Captured once, cut into two and into four: what comes out and every gradient, one step with each schedule."""
    captured = _captured(entry)
    with subtests.test("two stages over two ranks"):
        _two_stages_draw_and_train_like_the_model(captured)
    for schedule in ("1f1b", "zbv"):
        with subtests.test(f"four stages, {schedule}"):
            _four_stages_train_like_the_model(captured, schedule)


def _captured(entry: Entry) -> Captured:
    torch.manual_seed(0)
    model = entry.make().to(entry.dtype).train()
    example = _example(entry)
    two = pipeline(model, (), example, split_spec={entry.cuts[1]: SplitPoint.BEGINNING}, dynamic_shapes={})
    _without_dropout(model)
    four = pipeline(model, (), example, split_spec=dict.fromkeys(entry.cuts, SplitPoint.BEGINNING))
    assert (two.num_stages, four.num_stages) == (2, 4)
    names = set(model.state_dict())
    for pipe in (two, four):
        assert set(pipe.state_dict()) == names
        assert all(set(pipe.get_stage_module(k).state_dict()) < names for k in range(pipe.num_stages))
    return Captured(entry, model, two, four)


def _two_stages_draw_and_train_like_the_model(captured: Captured) -> None:
    """One microbatch over two ranks draws the random numbers of dropout in the order of the model: bit by bit the same."""
    torch.manual_seed(0)
    model = captured.entry.make().to(captured.entry.dtype).train()
    model.load_state_dict(captured.model.state_dict())
    batch = _example(captured.entry)  # other values than at capture
    torch.manual_seed(1)
    expected = model(**batch)
    torch.manual_seed(1)
    assert_same(captured.two(**batch), expected)

    _loss(expected, None).backward()
    torch.manual_seed(1)
    output, grads = _pipelined(captured, captured.two, "1f1b", batch, microbatches=1)
    assert_same(output, merge_chunks([map_tensors(Tensor.detach, expected)]))
    _assert_close(grads, _grads(model))


def _four_stages_train_like_the_model(captured: Captured, schedule: str) -> None:
    """1F1B over four ranks, ZBV over two with two stages each; the same outputs in the same class, the same gradients."""
    torch.manual_seed(2)
    parts = [_example(captured.entry) for _ in range(MICROBATCHES)]
    model = captured.model
    model.zero_grad()
    expected = [model(**part) for part in parts]
    for one in expected:
        (_loss(one, None) / MICROBATCHES).backward()
    wanted = _grads(model)
    batch = {k: torch.cat([p[k] for p in parts]) if isinstance(v, Tensor) else v for k, v in parts[0].items()}
    output, grads = _pipelined(captured, captured.four, schedule, batch, microbatches=MICROBATCHES)
    assert_same(output, merge_chunks([map_tensors(Tensor.detach, one) for one in expected]))
    _assert_close(grads, wanted)


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.name) for entry in BY_MODULES])
def test_what_export_cannot_take_goes_through_its_modules(entry: Listed) -> None:
    torch.manual_seed(0)
    model = entry.make().double()
    _without_dropout(model)
    ids, labels = torch.randint(3, 60, (2, 8, 8))
    with pytest.raises(CaptureError) as caught:
        pipeline(model, (), {"input_ids": ids[:2]}, num_stages=2)
    assert re.search(entry.reason, str(caught.value), re.DOTALL), str(caught.value)
    assert f'penstock.split_modules(model, ["{entry.modules[0]}", ' in str(caught.value)

    for one, other in zip(ids.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
        (_entropy(model(one).logits, other) / MICROBATCHES).backward()
    wanted = _grads(model)
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in ids.chunk(MICROBATCHES)])
    for num_stages, schedule in ((2, "1f1b"), (4, "1f1b"), (4, "zbv")):
        recipe = get_schedule(schedule)
        plan = recipe(num_stages // (recipe.stages_per_rank or 1), MICROBATCHES)
        modules = split_modules(model, entry.modules, num_stages, calls=entry.calls, example=(ids[:2],))
        model.zero_grad()

        def rank(transport: LocalTransport, plan: Plan = plan, modules: list[Any] = modules) -> Any:
            own = plan.placement.stages_of(transport.rank)
            stages = [PipelineStage(modules[k], k, len(modules), "cpu", group=transport) for k in own]
            return Schedule.from_plan(plan, stages, loss_fn=_entropy).step(ids, target=labels)

        outputs = LocalWorld(plan.num_ranks).run(rank)
        assert torch.equal(outputs[plan.placement.rank_of(num_stages - 1)], expected)
        _assert_close(_grads(model), wanted)


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_cache_in_the_output_crosses_the_stages(name: str) -> None:
    """Nobody says use_cache=False: the keys and values of all layers are put together, also over microbatches."""
    entry = next(entry for entry in MODELS if entry.name == name)
    torch.manual_seed(0)
    model = entry.make().eval()
    parts = [{key: value for key, value in entry.example().items() if key != "use_cache"} for _ in range(2)]
    pipe = pipeline(model, (), parts[0], split_spec={entry.cuts[1]: SplitPoint.BEGINNING}, dynamic_shapes={})
    results = [map_tensors(Tensor.detach, pipe(**part)) for part in parts]
    expected = [map_tensors(Tensor.detach, model(**part)) for part in parts]
    assert results[0].past_key_values.get_seq_length() == expected[0].past_key_values.get_seq_length() > 0
    assert_same(results, expected)

    captured = Captured(entry, model, pipe, pipe)
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    output, _ = _pipelined(captured, pipe, "1f1b", batch, microbatches=2)
    assert type(output.past_key_values) is type(expected[0].past_key_values)
    assert_same(output, merge_chunks(expected))
    assert model_values.flatten(output.past_key_values)[0][0].shape[0] == batch["input_ids"].shape[0]


def _pipelined(
    captured: Captured, pipe: Pipe, name: str, batch: dict[str, Any], *, microbatches: int
) -> tuple[Any, Grads]:
    """One step with ranks as threads: the output on the last stage's rank, and the gradients."""
    recipe = get_schedule(name)
    plan = recipe(pipe.num_stages // (recipe.stages_per_rank or 1), microbatches)
    own = pipe.info().has_loss
    captured.model.zero_grad()

    def rank(transport: LocalTransport) -> Any:
        stages = [pipe.build_stage(k, "cpu", group=transport) for k in plan.placement.stages_of(transport.rank)]
        schedule = Schedule.from_plan(plan, stages, loss_fn=None if own else _loss)
        return schedule.step(**batch) if own else schedule.step(**batch, target=torch.zeros(2 * microbatches))

    outputs = LocalWorld(plan.num_ranks).run(rank)
    last = plan.placement.rank_of(plan.num_stages - 1)
    assert all(output is None for k, output in enumerate(outputs) if k != last)
    return outputs[last], _grads(captured.model)


def _loss(output: Any, target: Tensor | None) -> Tensor:
    loss = getattr(output, "loss", None)
    return loss if loss is not None else output.logits.square().mean()


def _grads(model: nn.Module) -> Grads:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def _assert_close(grads: Grads, wanted: Grads) -> None:
    """Up to the last few bits of the model's precision."""
    assert grads.keys() == wanted.keys()
    for name, expected in wanted.items():
        got = grads[name]
        if expected is None:
            assert got is None or not got.any(), name
        else:
            assert got is not None, name
            limit = 1e3 * torch.finfo(expected.dtype).eps
            off = float((got - expected).abs().max())
            assert off <= limit * max(1.0, float(expected.abs().max())), f"{name}: off by {off}"


def _example(entry: Entry) -> dict[str, Any]:
    example = entry.example()
    return example | {
        n: v.to(entry.dtype) for n, v in example.items() if isinstance(v, Tensor) and v.is_floating_point()
    }


def _without_dropout(model: nn.Module) -> None:
    """Every rate of dropout, of modules and of attributes that functional dropout is called with."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
