"""The front door over ranks as threads: the same losses, norms and parameters as the plain model, on every rank."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.capture import SplitPoint
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import BalanceError, PenstockError, RunError, StageError
from tests.front.models import WithLoss, Words, batch, loss_fn, make, train_plainly

STEPS = 3


def pipeline(transport: LocalTransport | None, model: nn.Module, **options: Any) -> penstock.Pipeline:
    tokens, labels = batch()
    settings: dict[str, Any] = {"loss_fn": loss_fn, "microbatches": 4, "profile": False, "example_target": labels}
    return penstock.Pipeline(model, (tokens,), group=transport, **{**settings, **options})


def train(transport: LocalTransport, steps: int = STEPS, *, model: dict[str, Any], **options: Any) -> Any:
    pipe = pipeline(transport, make(**model), **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        tokens, labels = batch(step)
        result = pipe.step(tokens, target=labels)
        assert result.loss is not None
        found.append((result.loss, pipe.clip_grad_norm_(0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: value.clone() for name, value in pipe.state_dict().items()}


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages", "tied"),
    [
        (1, "1f1b", 1, False),
        (3, "gpipe", 3, False),
        (2, "auto", None, False),
        (1, "interleaved1f1b", 2, True),
        (2, "1f1b", 2, True),
        (2, "zbv", 4, True),
    ],
)
def test_equals_the_plain_model(ranks: int, schedule: str, stages: int | None, tied: bool) -> None:
    reference = make(tied=tied)
    expected = train_plainly(reference, STEPS, clip=0.05)
    results = LocalWorld(ranks).run(train, model={"tied": tied}, schedule=schedule, num_stages=stages)
    wanted = reference.state_dict()
    seen: set[str] = set()
    for losses, state in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name])
        seen |= set(state)
    assert seen == set(wanted) - ({"head.weight"} if tied else set())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_compiled_stages_train_and_are_named_as_the_plain_model(schedule: str) -> None:
    """A captured model with a weight that two stages share; a step is followed by another after the parameters have moved."""
    torch._dynamo.reset()
    reference = make(tied=True)
    expected = train_plainly(reference, STEPS, clip=0.05)
    results = LocalWorld(2).run(train, model={"tied": True}, schedule=schedule, compile={"backend": "aot_eager"})
    wanted = reference.state_dict()
    for losses, state in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
        for name, value in state.items():
            torch.testing.assert_close(value, wanted[name])
    assert set().union(*(state for _, state in results)) == set(wanted) - {"head.weight"}
    torch._dynamo.reset()


def test_measured_profile_decides_and_all_ranks_agree() -> None:
    def run(transport: LocalTransport) -> Any:
        pipe = pipeline(transport, make(), profile=None)
        assert pipe.choice is not None
        assert pipe.timeline is not None
        assert pipe.timeline.makespan > 0
        assert all(layer.total > 0 for layer in pipe.choice.profile.layers)
        return pipe.choice.dumps(), pipe.explain(print_output=False)

    (first, text), (second, _) = LocalWorld(2).run(run)
    assert first == second
    assert "predicted: a step takes" in text
    assert all(word in text for word in ("candidates", "bubble", "embed"))


def test_without_a_profile_nothing_is_said_to_be_measured() -> None:
    def run(transport: LocalTransport) -> Any:
        pipe = pipeline(transport, make(), profile=False)
        assert pipe.choice is not None
        assert pipe.timeline is not None
        return pipe.choice.costs.latency, pipe.timeline.unit, pipe.explain(print_output=False)

    for latency, unit, text in LocalWorld(2).run(run):
        assert (latency, unit) == (0.0, "")
        assert "candidates at costs estimated by the number of parameters" in text
        assert "nothing was measured: costs are estimated by the number of parameters" in text
        assert "predicted" not in text


def test_explain_is_printed_by_the_first_rank_alone(capsys: pytest.CaptureFixture[str]) -> None:
    LocalWorld(2).run(lambda transport: pipeline(transport, make(), schedule="1f1b").explain())
    assert capsys.readouterr().out.count("schedule 1f1b: given") == 1


def test_one_process_needs_no_ranks() -> None:
    pipe = pipeline(None, make(), schedule="auto")
    tokens, labels = batch()
    result = pipe.step(tokens, target=labels, outputs="last")
    model = make()
    assert result.loss == pytest.approx(loss_fn(model(tokens), labels).item())
    assert len(result.losses) == 4
    torch.testing.assert_close(result.outputs, model(tokens))
    assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_uneven_batches_are_weighted() -> None:
    def run(transport: LocalTransport) -> Any:
        pipe = pipeline(transport, make(), schedule="1f1b")
        tokens, labels = batch(rows=7)
        return pipe.step(tokens, target=labels).loss, pipe.clip_grad_norm_(1e9)

    model = make()
    tokens, labels = batch(rows=7)
    loss = loss_fn(model(tokens), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for result in LocalWorld(2).run(run):
        assert result == pytest.approx((loss.item(), norm))


def test_norms_count_a_shared_parameter_once() -> None:
    kinds = (1.0, 2.0, float("inf"))

    def run(transport: LocalTransport) -> list[float]:
        pipe = pipeline(transport, make(tied=True), schedule="1f1b")
        tokens, labels = batch()
        pipe.step(tokens, target=labels)
        return [pipe.clip_grad_norm_(1e9, kind) for kind in kinds]

    model = make(tied=True)
    tokens, labels = batch()
    loss_fn(model(tokens), labels).backward()
    expected = [nn.utils.clip_grad_norm_(model.parameters(), 1e9, kind).item() for kind in kinds]
    for norms in LocalWorld(2).run(run):
        assert norms == pytest.approx(expected)


def test_a_tied_parameter_has_the_name_that_the_model_gives_it() -> None:
    """Not the first in the alphabet: an optimizer's groups are often made by name."""
    model = nn.Sequential()
    model.words = nn.Linear(4, 4, bias=False)
    model.body = nn.Linear(4, 4)
    model.back = nn.Linear(4, 4, bias=False)
    model.back.weight = model.words.weight

    def run(transport: LocalTransport) -> set[str]:
        mine = copy.deepcopy(model)
        options = {"schedule": "1f1b", "microbatches": 2, "profile": False}
        pipe = penstock.Pipeline(mine, example=(torch.ones(2, 4),), loss_fn=loss_fn, group=transport, **options)
        return {name for name, _ in pipe.named_parameters()} | set(pipe.state_dict())

    assert set().union(*LocalWorld(2).run(run)) == {name for name, _ in model.named_parameters()}


def test_evaluation_and_prediction_take_any_number_of_rows() -> None:
    sizes = (1, 3, 9)

    def run(transport: LocalTransport) -> Any:
        pipe = pipeline(transport, make(dropout=0.5), schedule="zbv")
        found = []
        for rows in sizes:
            tokens, labels = batch(rows=rows)
            result = pipe.evaluate(tokens, target=labels)
            found.append((result.loss, pipe.predict(tokens), pipe.predict(tokens, outputs=1)))
        assert all(stage.submod.training for stage in pipe.stages)
        assert all(p.grad is None for p in pipe.parameters())
        return found

    model = make(dropout=0.5).eval()
    for rank, found in enumerate(LocalWorld(2).run(run)):
        for rows, (loss, everywhere, chosen) in zip(sizes, found, strict=True):
            tokens, labels = batch(rows=rows)
            expected = model(tokens).detach()
            assert loss == pytest.approx(loss_fn(expected, labels).item())
            torch.testing.assert_close(everywhere, expected)
            assert (chosen is not None) == (rank == 1)


def test_train_and_eval_switch_dropout() -> None:
    def run(transport: LocalTransport) -> list[bool]:
        pipe = pipeline(transport, make(dropout=0.5), schedule="1f1b")
        tokens, labels = batch()
        losses = []
        for mode in (True, False):
            pipe.train(mode)
            losses.append([pipe.step(tokens, target=labels).loss for _ in range(2)])
        return [a == b for a, b in losses]

    assert LocalWorld(2).run(run) == [[False, True]] * 2


def test_a_model_with_its_own_loss() -> None:
    def run(transport: LocalTransport) -> Any:
        tokens, labels = batch()
        pipe = penstock.Pipeline(
            make(WithLoss), (tokens, labels), group=transport, schedule="1f1b", microbatches=4, profile=False
        )
        result = pipe.step(tokens, labels, outputs="all")
        return result.loss, result.outputs["scores"], pipe.clip_grad_norm_(1e9)

    model = make(WithLoss)
    tokens, labels = batch()
    output = model(tokens, labels)
    output["loss"].backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for loss, scores, total in LocalWorld(2).run(run):
        assert loss == pytest.approx(output["loss"].item())
        torch.testing.assert_close(scores, output["scores"].detach())
        assert total == pytest.approx(norm)


def test_hand_made_stages_and_their_names() -> None:
    def run(transport: LocalTransport) -> Any:
        torch.manual_seed(0)
        halves = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4))]
        stage = penstock.PipelineStage(halves[transport.rank], transport.rank, 2, "cpu", group=transport)
        pipe = penstock.Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss, microbatches=2)
        x = torch.arange(16.0).view(4, 4) / 16
        result = pipe.step(x, target=x)
        both = nn.Sequential(*halves)
        return result.loss, nn.functional.mse_loss(both(x), x).item(), list(pipe.state_dict()), pipe.plan.name

    for rank, (loss, expected, names, schedule) in enumerate(LocalWorld(2).run(run)):
        assert loss == pytest.approx(expected)
        assert names == [f"stages.{rank}.0.weight", f"stages.{rank}.0.bias"]
        assert schedule == "interleavedzerobubble", "the fastest with one stage a rank"


def test_a_loss_that_is_not_shared_stays_on_its_rank() -> None:
    def run(transport: LocalTransport) -> Any:
        tokens, labels = batch()
        return pipeline(transport, make(), schedule="1f1b", share_loss=False).step(tokens, target=labels).loss

    first, last = LocalWorld(2).run(run)
    assert first is None
    assert last is not None


def test_a_grad_scaler_scales_and_all_ranks_skip_an_overflow() -> None:
    def run(transport: LocalTransport, poison: bool) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        pipe = pipeline(transport, make().float(), schedule="1f1b", loss_scale=scaler)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        before = [p.detach().clone() for p in pipe.parameters()]
        if poison and transport.rank == 1:
            weight = dict(pipe.named_parameters())["head.weight"]
            weight.register_hook(lambda grad: grad * float("inf"))
        tokens, labels = batch()
        loss = pipe.step(tokens, target=labels).loss
        scaler.unscale_(optimizer)
        norm = pipe.clip_grad_norm_(1e9)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(old, new) for old, new in zip(before, pipe.parameters(), strict=True))
        return loss, norm, moved, scaler.get_scale()

    model = make().float()
    tokens, labels = batch()
    loss = loss_fn(model(tokens), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for found, total, moved, scale in LocalWorld(2).run(run, poison=False):
        assert (found, total) == pytest.approx((loss.item(), norm), rel=1e-5)
        assert (moved, scale) == (True, 1024.0)
    for _, _, moved, scale in LocalWorld(2).run(run, poison=True):
        assert (moved, scale) == (False, 512.0)


def test_autocast_reaches_the_stages() -> None:
    def run(transport: LocalTransport) -> Any:
        pipe = pipeline(transport, make().float(), schedule="1f1b")
        tokens, labels = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return pipe.step(tokens, target=labels, outputs="all")

    model = make().float()
    tokens, _ = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(tokens)
    for result in LocalWorld(2).run(run):
        assert result.outputs.dtype == torch.bfloat16
        torch.testing.assert_close(result.outputs, output.detach())


def test_a_model_on_the_meta_device_gets_its_values_stage_by_stage() -> None:
    def run(transport: LocalTransport) -> Any:
        with torch.device("meta"):
            model = Words().double()
        pipe = pipeline(transport, model, schedule="1f1b", weights=make().state_dict())
        tokens, labels = batch()
        return pipe.step(tokens, target=labels).loss

    model = make()
    tokens, labels = batch()
    assert LocalWorld(2).run(run) == pytest.approx([loss_fn(model(tokens), labels).item()] * 2)


def test_a_function_may_give_a_meta_model_its_values() -> None:
    values = make().state_dict()
    asked: set[str] = set()

    def init(name: str, tensor: torch.Tensor) -> None:
        asked.add(name)
        tensor.copy_(values[name])

    with torch.device("meta"):
        model = Words().double()
    pipe = pipeline(None, model, schedule="1f1b", init=init)
    assert asked == set(values)
    torch.testing.assert_close(pipe.state_dict(), values)


def test_a_mesh_without_a_pipeline_dimension_is_refused() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"))
    with pytest.raises(StageError, match=r"mesh_dim_names=\(\"dp\", \"pp\"\)"):
        pipeline(None, make(), mesh=mesh)


def test_a_pipeline_before_the_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun every process went through the whole model by itself, until something asked for the others."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StageError, match=r"rank 1 of 2, and there is no process group yet.*init_process_group"):
        pipeline(None, make())
    alone = pipeline(LocalWorld(1).transports[0], make(), schedule="1f1b", profile=False)
    assert alone.num_ranks == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert pipeline(None, make(), schedule="1f1b", profile=False).num_ranks == 1


def test_a_meta_model_without_values_says_so() -> None:
    with torch.device("meta"):
        model = Words().double()
    with pytest.raises(PenstockError, match="weights="):
        pipeline(None, model, schedule="1f1b")


def test_a_memory_limit_that_nothing_fits_is_explained_on_every_rank() -> None:
    world = LocalWorld(2)
    with pytest.raises(BalanceError, match="The smallest limit that would do is"):
        world.run(lambda transport: pipeline(transport, make(), memory_limit=1000))
    assert all(isinstance(error, BalanceError) for error in world.errors), "every rank can catch the same"
    assert all("bytes" in str(error) for error in world.errors)


def test_contradictions_are_refused() -> None:
    with pytest.raises(StageError, match="give one of them"):
        pipeline(None, make(), stages=2, num_stages=4)
    with pytest.raises(StageError, match="an example, or stages"):
        penstock.Pipeline()
    with pytest.raises(PenstockError, match="multiple of 2"):
        LocalWorld(2).run(lambda transport: pipeline(transport, make(), num_stages=3))


def test_marks_decide_where_to_cut() -> None:
    def run(transport: LocalTransport) -> Any:
        pipe = pipeline(transport, make(), split_spec={"blocks.1": SplitPoint.BEGINNING}, profile=None)
        return [name for name, _ in pipe.named_parameters()]

    first, second = LocalWorld(2).run(run)
    assert {name.split(".")[1] for name in first if name.startswith("blocks")} == {"0"}
    assert {name.split(".")[1] for name in second if name.startswith("blocks")} == {"1", "2", "3"}


def test_evaluation_under_autocast() -> None:
    """The graph of evaluation mode is made in the middle of a program that casts; the casts are not part of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3), nn.Dropout(0.5))
    x, y = torch.randn(8, 6), torch.randn(8, 3)

    def run(transport: Any) -> list[float | None]:
        mine = copy.deepcopy(model)
        loss = nn.functional.mse_loss
        pipe = penstock.Pipeline(
            mine, (x,), loss_fn=loss, schedule="1f1b", microbatches=2, num_stages=2, profile=False, group=transport
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = pipe.evaluate(x, target=y).loss
        return [cast, pipe.evaluate(x, target=y).loss]

    model.eval()
    plain = [nn.functional.mse_loss(model(x), y).item()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain.insert(0, nn.functional.mse_loss(model(x), y).item())
    model.train()
    for found in penstock.LocalWorld(2).run(run):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    assert plain[0] != plain[1]


def test_the_loss_is_a_tensor_on_every_rank_and_loss_factor_scales_gradients_alone() -> None:
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))

    def rank(transport: LocalTransport) -> tuple[float | None, float, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pipe = penstock.Pipeline(
            model, (x,), loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=4, group=transport
        )
        pipe.step(x, target=y)
        once = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        pipe.zero_grad()
        for _ in range(2):
            result = pipe.step(x, target=y, loss_factor=0.5)
        for one, p in zip(once, pipe.parameters(), strict=True):
            torch.testing.assert_close(p.grad, one)
        assert result.loss_tensor is not None
        assert result.loss_tensor.shape == ()
        with pytest.raises(RunError, match="loss_factor"):
            pipe.step(x, target=y, loss_factor="half")  # type: ignore[arg-type]
        return result.loss, result.loss_tensor.item(), once

    for loss, tensor, _ in LocalWorld(2).run(rank):
        assert loss == tensor
