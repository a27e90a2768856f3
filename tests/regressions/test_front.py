"""What the front door let through, or said badly; each test tells what happened before."""

from __future__ import annotations

import copy
import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.balance import LayerCost, Profile
from penstock.batch import microbatch_sizes
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import BalanceError, PenstockError, RanksDisagree, RunError, SplitError, UnknownNameError
from penstock.front.model_profile import together
from penstock.plan import load
from penstock.schedules import Recipe, get_schedule
from penstock.stage.buffers import Tables
from penstock.train import run_report
from penstock.train.train_options import TrainOptions
from tests.checkpoint.pipes import WIDTH, batch, make
from tests.front.models import batch as words
from tests.front.models import loss_fn
from tests.front.models import make as make_model


def by_hand(transport: LocalTransport, module: nn.Module, **options: Any) -> penstock.Pipeline:
    stage = penstock.PipelineStage(module, transport.rank, transport.num_ranks, "cpu", group=transport)
    settings = {"schedule": "1f1b", "loss_fn": nn.functional.mse_loss, "microbatches": 4, **options}
    return penstock.Pipeline(stages=[stage], **settings)


def test_evaluation_leaves_frozen_modules_frozen() -> None:
    """`evaluate` and `predict` called train() on the whole stage afterwards: a batch norm that the user had frozen moved its
    statistics from the next step on."""

    def run(transport: LocalTransport) -> list[bool]:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        module[1].eval()
        pipe = by_hand(transport, module, microbatches=2)
        before = module[1].state_dict()["running_mean"].clone()
        x, y = batch(0)
        pipe.step(x, target=y)
        pipe.evaluate(x, target=y)
        pipe.predict(x)
        modes = [m.training for m in module.modules()]
        pipe.step(x, target=y)
        assert torch.equal(module[1].state_dict()["running_mean"], before)
        with pytest.raises(PenstockError):
            pipe.evaluate(x, target=y[:1])  # also after a failure
        assert [m.training for m in module.modules()] == modes
        return modes

    assert LocalWorld(2).run(run) == [[True, True, False, True]] * 2


def test_captured_stages_go_back_to_training() -> None:
    tokens, labels = words()
    pipe = penstock.Pipeline(make_model(dropout=0.5), (tokens,), loss_fn=loss_fn, microbatches=4, profile=False)
    first = pipe.evaluate(tokens, target=labels).loss
    assert pipe.evaluate(tokens, target=labels).loss == first, "no dropout"
    assert pipe.step(tokens, target=labels).loss != pipe.step(tokens, target=labels).loss, "dropout"


class PartlyFrozen(nn.Module):
    """Trains with its batch norm and its dropout in evaluation mode, as one does with a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm.eval()
        self.dropout = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x))))


def test_frozen_parts_of_captured_stages_stay_frozen() -> None:
    """After an evaluation the graph of a model that trains as a whole took the place of the captured one: dropout that the user
    had switched off was on again, and a frozen batch norm was an error. Sizes traced later were traced in evaluation mode."""
    x, y = batch(0)
    model = PartlyFrozen()
    loss = nn.functional.mse_loss
    pipe = penstock.Pipeline(copy.deepcopy(model), (x,), loss_fn=loss, microbatches=len(x) // 2, profile=False)
    expected = loss(model(x), y).item()
    assert pipe.step(x, target=y).loss == pytest.approx(expected)
    assert pipe.evaluate(x, target=y).loss == pytest.approx(expected)
    assert pipe.step(x, target=y).loss == pytest.approx(expected)
    half = slice(len(x) // 2)  # microbatches of one row, for which the model is traced on its own
    assert pipe.step(x[half], target=y[half]).loss == pytest.approx(loss(model(x[half]), y[half]).item())
    assert torch.equal(pipe.state_dict()["norm.running_mean"], torch.zeros(WIDTH))


@pytest.mark.parametrize("profile", [None, False])
def test_another_model_on_one_rank_is_refused(profile: Any) -> None:
    """With 4 layers on one rank and 6 on another the ranks trained something that was no model at all."""

    def run(transport: LocalTransport) -> str:
        model = make_model(layers=4 + 2 * transport.rank)
        with pytest.raises(RanksDisagree) as caught:
            penstock.Pipeline(model, (words()[0],), group=transport, loss_fn=loss_fn, profile=profile, microbatches=4)
        return str(caught.value)

    for text in LocalWorld(2).run(run):
        assert "number of parameters" in text
        assert "rank 0" in text
        assert "rank 1" in text


@pytest.mark.parametrize("other", ["width", "type", "tie", "buffer", "rows"])
def test_a_model_that_differs_in_a_detail(other: str) -> None:
    def run(transport: LocalTransport) -> None:
        model = make_model(tied=other == "tie" and transport.rank == 1)
        tokens = words(rows=8)[0]
        if transport.rank == 1:
            if other == "width":
                model.blocks[1].up = nn.Linear(16, 40).double()
                model.blocks[1].down = nn.Linear(40, 16).double()
            elif other == "type":
                model = model.float()
            elif other == "buffer":
                model.register_buffer("more", torch.zeros(3))
                model.head.register_buffer("scale", torch.ones(31, dtype=torch.float64))
                model.head.register_forward_hook(lambda m, _, y: y * m.scale)
            elif other == "rows":
                tokens = words(rows=4)[0]
        with pytest.raises(PenstockError, match=r"differ|failed|match|Build the same"):
            penstock.Pipeline(model, (tokens,), group=transport, loss_fn=loss_fn, profile=False, microbatches=4)

    LocalWorld(2).run(run)


def test_a_target_without_a_loss_is_said() -> None:
    """`step(x, target=y)` without a loss gave no gradients and no error."""

    def run(transport: LocalTransport) -> None:
        pipe = by_hand(transport, nn.Linear(WIDTH, WIDTH), loss_fn=None)
        x, y = batch(0)
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(RunError, match=r"without a loss.*loss_fn=function"):
                call(x, target=y)
        with pytest.raises(RunError, match="without a loss"):
            pipe.step(x)
        assert pipe.predict(x).shape == y.shape

    LocalWorld(2).run(run)


def test_evaluating_different_rows_harms_nothing() -> None:
    """Ranks with fewer rows than microbatches took another plan than the others; their messages met the wrong receives, and
    nothing worked afterwards."""

    def run(transport: LocalTransport) -> float | None:
        pipe = by_hand(transport, nn.Linear(WIDTH, WIDTH))
        x, y = batch(0)
        rows = 4 if transport.rank == 0 else 2
        for call in (pipe.evaluate, pipe.predict):
            with pytest.raises(RanksDisagree, match=r"rank 0: rows 4\n  rank 1: rows 2"):
                call(x[:rows], **({"target": y[:rows]} if call == pipe.evaluate else {}))
        with pytest.raises(PenstockError, match=r"no rows|cannot be cut"):
            pipe.evaluate(x[: 4 * transport.rank], target=y)
        pipe.ranks.barrier("a barrier afterwards")
        assert pipe.evaluate(x[:2], target=y[:2]).loss is not None
        assert pipe.predict(x).shape == y.shape
        return pipe.step(x, target=y).loss

    first, second = LocalWorld(2).run(run)
    assert first == second


def test_a_row_of_the_target_does_not_count_for_several_of_the_output() -> None:
    """Half as many rows in the target as in the input, and one in each microbatch: the loss was broadcast, and wrong."""

    def run(transport: LocalTransport) -> float | None:
        pipe = by_hand(transport, nn.Linear(WIDTH, WIDTH))
        x, y = (torch.cat([part, part]) for part in batch(0))
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(PenstockError, match="one row would count for all"):
                call(x, target=y[:4])
        return pipe.step(x, target=y).loss

    first, second = LocalWorld(2).run(run)
    assert first == second


def test_what_all_ranks_do_together_is_refused_inside_a_step() -> None:
    """Clipping in a hook sent messages among those of the step, which the others took for theirs."""

    def run(transport: LocalTransport) -> tuple[list[str], float | None]:
        pipe, refused = by_hand(transport, nn.Linear(WIDTH, WIDTH)), list[str]()
        x, y = batch(0)
        acts = {
            "clip_grad_norm_()": lambda: pipe.clip_grad_norm_(1.0),
            "evaluate()": lambda: pipe.evaluate(x, target=y),
            "any()": lambda: pipe.ranks.any(True),
            "a barrier": lambda: pipe.ranks.barrier("a barrier"),
        }

        def intrude(grad: Tensor) -> None:
            handle.remove()
            for name, act in acts.items():
                with pytest.raises(RunError, match="a hook in a step, is in one"):
                    act()
                refused.append(name)

        first = next(iter(pipe.parameters()))
        if transport.rank == 0:
            handle = first.register_hook(intrude)
        pipe.step(x, target=y)
        return refused, pipe.step(x, target=y).loss

    first, second = LocalWorld(2).run(run)
    assert (len(first[0]), len(second[0])) == (4, 0)
    assert first[1] == second[1]


# -- errors that teach


def never(*_: Any) -> Tensor:
    raise AssertionError("work was done before the options were looked at")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss_func": None}, "no option loss_func=; did you mean loss_fn="),
    ({"micro_batches": 4}, "no option micro_batches=; did you mean microbatches="),
    ({"zzz": 1}, r"no option zzz=; docs/guides/options\.md"),
    ({"example": torch.ones(3)}, r"example=\(x,\)"),
    ({"microbatches": 0}, "microbatches=0; expected a whole number from 1"),
    ({"microbatches": "8"}, "microbatches='8'"),
    ({"microbatches": True}, "microbatches=True"),
    ({"schedule": "1f2b"}, "1f2b"),
    ({"schedule": None}, "schedule=None"),
    ({"placement": "w"}, "placement='w'"),
    ({"memory_limit": "12 GBs"}, "memory_limit='12 GBs'"),
    ({"num_stages": -1}, "num_stages=-1"),
    ({"stages": 2, "num_stages": 3}, "give one of them"),
    ({"stages": []}, "PipelineStages of this rank"),
    ({"stages": [nn.Linear(1, 1)]}, "PipelineStages of this rank"),
    ({"profile": 3}, "profile is a int"),
    ({"profile": True}, "leave it out to measure"),
    ({"profile": "no such file"}, "no such file"),
    ({"data_parallel": "dpp"}, "data_parallel='dpp'"),
    ({"mesh": 3}, "mesh is a int"),
    ({"device": "gpu"}, "device='gpu'"),
    ({"loss_fn": 3}, "loss_fn is a int"),
    ({"loss_scale": 3}, "loss_scale is a int"),
    ({"rng": "per-step"}, "rng='per-step'"),
    ({"seed": "x"}, "seed='x'"),
    ({"ties": 3}, "ties has 3"),
    ({"example_kwargs": 3}, "example_kwargs is a int"),
    ({"init": 3}, "init is a int"),
    ({"split_spec": 3}, "split_spec is a int"),
    ({"split_policy": 3}, "split_policy is a int"),
]


@pytest.mark.parametrize(
    ("options", "words"), WRONG, ids=[str(sorted(one)[0]) + str(i) for i, (one, _) in enumerate(WRONG)]
)
def test_a_wrong_option_is_named_before_any_work(options: dict[str, Any], words: str) -> None:
    """A misspelt option was reported by another class, after the model had been captured and measured."""

    class Untouched(nn.Module):
        forward = never

    settings: dict[str, Any] = {"model": Untouched(), "example": (torch.ones(4, 2),), **options}
    with pytest.raises(PenstockError, match=words):
        penstock.Pipeline(**settings)


def test_an_unknown_option_is_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean"):
        penstock.Pipeline(nn.Linear(1, 1), (torch.ones(1, 1),), shedule="1f1b")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pipe, x, y: pipe.step(x, target=y, outputs="first"), "outputs='first'"),
        (lambda pipe, x, y: pipe.predict(x, outputs=7), "outputs=7"),
        (lambda pipe, x, y: pipe.evaluate(x[:0], target=y[:0]), "no rows"),
        (lambda pipe, x, y: pipe.step(x[:0], target=y[:0]), "no rows"),
        (lambda pipe, x, y: pipe.save("/dev/null/checkpoint"), "Not a directory"),
        (lambda pipe, x, y: pipe.save("here", keep=0), "keep=0"),
        (lambda pipe, x, y: pipe.save("here", scheduler=3), "scheduler is a int"),
        (lambda pipe, x, y: pipe.load("nowhere"), "is no checkpoint"),
        (lambda pipe, x, y: penstock.load("nowhere"), "is no checkpoint"),
        (lambda pipe, x, y: pipe.load_state_dict({}), "lacks tensors"),
        (lambda pipe, x, y: pipe.load_state_dict(3), "the state dict is a int"),
        (lambda pipe, x, y: pipe.clip_grad_norm_(1.0, norm_type=0), "norm_type=0"),
    ],
)
def test_calls_that_cannot_be_say_what_to_write(
    call: Callable[..., Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipe, _ = make()
    with pytest.raises(PenstockError, match=words):
        call(pipe, *batch(0))


def test_no_rows_are_no_microbatches() -> None:
    """The advice for an empty batch was "use at most 1 microbatches"."""
    with pytest.raises(SplitError, match="the batch has no rows"):
        microbatch_sizes(0, 4)


# -- files


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=10,
)


@given(data=st.data(), value=JSON)
def test_any_profile_is_read_or_refused(data: st.DataObject, value: Any) -> None:
    whole = Profile((LayerCost("a", 1.0, output_bytes=8, shared=frozenset({"w"})), LayerCost("b", 2.0)), {"w": 8}, (4,))
    body = json.loads(whole.dumps())
    target: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
        if not isinstance(target[key], dict | list) or not target[key] or data.draw(st.booleans()):
            target[key] = value
            break
        target = target[key]
    with suppress(BalanceError):
        Profile.loads(json.dumps(body))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "3", "[]", '{"format": 3}'])
def test_what_a_run_left_behind_may_be_damaged(tmp_path: Path, text: str) -> None:
    """JSONDecodeError, AttributeError and KeyError came out of files that had been cut off."""
    for name in ("options.json", "report.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(PenstockError):
        TrainOptions(resume=True, output=str(tmp_path)).resumed([])
    with pytest.raises(PenstockError):
        run_report.rewrite(tmp_path)
    with pytest.raises(BalanceError):
        Profile.loads(text)
    (tmp_path / "profile.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BalanceError, match="no text"):
        Profile.load(tmp_path / "profile.json")


@given(st.dictionaries(st.sampled_from(["ranks", "schedule", "stages", "resume", "learning_rate", "what"]), JSON))
def test_any_options_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    file = tmp_path_factory.getbasetemp() / "options.json"
    file.write_text(json.dumps(options))
    with suppress(PenstockError):
        TrainOptions.of_file(file)


def test_a_plan_file_is_bounded(tmp_path: Path) -> None:
    """A plan file of 118 MB took 3.6 GB and more than 200 s."""
    file = tmp_path / "plan.csv"
    file.write_text("0F0,0B0\n")
    with file.open("ab") as stream:
        os.truncate(stream.fileno(), 200_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(
            PenstockError, match=r"200,000,000 bytes; such files are read up to 16,000,000.*limit=200000000"
        ):
            load(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    file.write_text("0F0,0B0\n")
    assert load(file, limit=8).num_actions == 2
    with pytest.raises(PenstockError, match="8 bytes; such files are read up to 7"):
        load(file, limit=7)


def test_a_recipe_that_nobody_registered_pipelines_a_model() -> None:
    """It was looked up by its name: UnknownNameError, or the schedule that somebody else had registered under that name."""
    recipe = Recipe("mine", "a schedule of the user's", get_schedule("gpipe").rank_actions, stages_per_rank=1)
    x, y = batch(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def run(transport: LocalTransport) -> list[str]:
        pipe = penstock.Pipeline(
            model,
            (x,),
            loss_fn=nn.functional.mse_loss,
            schedule=recipe,
            microbatches=4,
            profile=False,
            group=transport,
        )
        pipe.step(x, target=y)
        return [pipe.plan.name, *pipe.plan.lines()]

    assert LocalWorld(2).run(run) == [["mine", *get_schedule("gpipe")(2, 4).lines()]] * 2


class LosesOne:
    """The place of a rank whose first meeting fails."""

    transport = None

    def __init__(self) -> None:
        self.met: list[str] = []

    @property
    def own(self) -> LosesOne:
        return self

    def barrier(self, what: str) -> None:
        self.all_gather(what, None)

    def all_gather(self, what: str, value: object) -> list[object]:
        self.met.append(what)
        if len(self.met) == 1:
            raise RunError("the first meeting fails")
        return [value]


def test_ranks_meet_once_before_they_measure_also_if_that_fails() -> None:
    """A rank whose meeting had failed went to it again, while the others had gone on to the next one."""
    ends: Any = LosesOne()

    def measure(barrier: Callable[[], None]) -> Profile:
        barrier()
        return Profile((LayerCost("only", 1.0),))

    outcome = together(ends, measure)
    assert ends.met == ["about to measure the layers", "what the layers cost on each rank"]
    with pytest.raises(RunError, match="the first meeting fails"):
        outcome()


class Attributes(dict[str, Any]):
    """As addict and munch have them: whatever is asked for is there."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, Attributes())


def test_a_dictionary_with_every_attribute_is_put_back() -> None:
    """It was taken for a list, since it answered to `extend`; what it held was gone by then."""
    table = Attributes(rate=1.0)
    before = Tables([table])
    table["rate"] = 2.0
    before.put_back()
    assert table == {"rate": 1.0}


def test_a_plan_file_given_to_run_plan_is_answered_with_the_function_that_reads_it(tmp_path: Path) -> None:
    """The error named penstock.load, which reads a checkpoint."""
    stage = penstock.PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")
    schedule = penstock.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    file = tmp_path / "plan.csv"
    penstock.plan.dump(schedule.plan, file)
    with pytest.raises(penstock.errors.RunError, match=r"penstock\.plan\.load\(file\) reads one"):
        schedule.run_plan(str(file))  # type: ignore[arg-type]
    schedule.run_plan(penstock.plan.load(file))
