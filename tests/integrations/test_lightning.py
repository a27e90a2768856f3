"""An ordinary LightningModule over two processes, against itself in one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from peft import AdaLoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.errors import RunError
from penstock.integrations.lightning import PipelineStrategy
from penstock.plan.ops import Op
from tests.checkpoint import attack
from tests.checkpoint.pipes import make
from tests.gloo_pool import GlooPool
from tests.integrations.hf import as_torchrun, llama, padded

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]
WIDTH = 8
IN_LIGHTNING = (  # what lightning 2.6 itself says or uses, of which none is about penstock
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*use_reentrant.*",
)


class Module(lightning.LightningModule):
    """Nothing here knows of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.seen: list[float] = []
        self.off = torchmetrics.MeanAbsoluteError()
        kinds = {"off": torchmetrics.MeanAbsoluteError(), "square": torchmetrics.MeanSquaredError(squared=False)}
        self.several = torchmetrics.MetricCollection({**kinds, "mean": torchmetrics.MeanSquaredError()}, prefix="of_")
        self.rows = torchmetrics.CatMetric()  # keeps every row that it was shown

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        out = self.net(2 * x)
        loss = nn.functional.mse_loss(out, y)
        self.off(out, y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=False)
        self.log("off", self.off, on_step=True, on_epoch=True)
        self.log("rows", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        out = self.net(2 * x)
        self.several.update(out, y)
        self.rows.update(out[:, 0])
        self.log_dict({"validation": nn.functional.mse_loss(out, y), "size": out.abs().mean()})
        self.log("most", out.max(), reduce_fx="max")
        self.log_dict(self.several)

    def on_validation_epoch_end(self) -> None:
        self.log("middle", self.rows.compute().median())
        self.rows.reset()

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.net(2 * batch[0]).sum(1)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Bar(TQDMProgressBar):
    """Remembers what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: set[str] = set()

    def get_metrics(self, trainer: Any, module: Any) -> Any:
        found = super().get_metrics(trainer, module)
        self.shown |= set(found)
        return found


def fit(folder: str, *, strategy: Any, epochs: int = 2, resume: str | None = None) -> dict[str, Any]:
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sin())  # in batches of 8 the last one has fewer rows than there are microbatches
    bar, kept = Bar(), ModelCheckpoint(dirpath=f"{folder}/kept", filename="{epoch}", save_top_k=-1)
    given = (
        {"plugins": [LightningEnvironment()], "devices": 2}
        if isinstance(strategy, PipelineStrategy)
        else {"devices": 1}
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        log_every_n_steps=1,
        precision="64-true",
        logger=CSVLogger(folder, name="log", version="0"),
        callbacks=[bar, kept],
        enable_model_summary=False,
        **given,
    )
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=12), ckpt_path=resume)
    predicted = trainer.predict(module, DataLoader(data, batch_size=8))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": module.seen, "metrics": metrics, "shown": sorted(bar.shown), "predicted": torch.cat(predicted)}


def strategy(**options: Any) -> PipelineStrategy:
    given = {"microbatches": 4, "schedule": "1f1b", "profile": False, **options}
    return PipelineStrategy("net", process_group_backend="gloo", **given)


def pipelined(folder: str) -> Any:
    with as_torchrun():
        first = fit(f"{folder}/a", strategy=strategy())
        whole = strategy(whole_outputs=True)  # what is validated is the same, in one piece on every rank
        again = fit(f"{folder}/b", strategy=whole, resume=f"{folder}/a/kept/epoch=0.ckpt")
        return first, again


@pytest.mark.filterwarnings(*IN_LIGHTNING)
def test_an_ordinary_module_trains_logs_and_resumes(gloo_pool: GlooPool, tmp_path: Path) -> None:
    expected = fit(str(tmp_path / "plain"), strategy="auto")
    for first, again in gloo_pool.run(2, pipelined, str(tmp_path), timeout=240.0):
        assert first["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        assert again["losses"] == pytest.approx(expected["losses"][len(expected["losses"]) // 2 :], abs=1e-6)
        assert first["metrics"] == pytest.approx(expected["metrics"], abs=1e-6)
        assert again["metrics"] == pytest.approx(expected["metrics"], abs=1e-6)
        assert first["shown"] == expected["shown"]
        torch.testing.assert_close(first["predicted"], expected["predicted"])
        torch.testing.assert_close(again["predicted"], expected["predicted"])
    assert (tmp_path / "a/log/0/metrics.csv").read_text().splitlines()[0] == (
        tmp_path / "plain/log/0/metrics.csv"
    ).read_text().splitlines()[0]


class Texts(lightning.LightningModule):
    """A model of transformers with its own loss, and the names of the rows beside their tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.names: list[Any] = []
        self.told: dict[str, float] = {}

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.told[name] = float(value)  # there is no Trainer

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.names.append(batch["names"])
        out = self.model(**{name: value for name, value in batch.items() if name != "names"})
        self.log("loss", out.loss.detach())
        self.log("rows", float(len(batch["names"])))
        return out.loss


@pytest.mark.filterwarnings(*IN_LIGHTNING)
def test_the_own_loss_of_a_model_counts_labels(tmp_path: Path) -> None:
    """Of a model without memory whose rotary buffers are in no file, in batches of changing lengths. Microbatches counted by
    their rows, and each had the names of all rows."""
    plain = llama(num_hidden_layers=1)
    plain.save_pretrained(tmp_path)
    plain.config.use_cache = False
    with torch.device("meta"):
        empty = llama(num_hidden_layers=1)
    module = Texts(empty)
    batches: list[dict[str, Any]] = [{**padded(5, 8, seed=4), "names": tuple("abcde")}]
    batches += [{**padded(5, 11, seed=5), "names": list("abcde")}, {**padded(4, 6, seed=6), "names": list("abcd")}]
    batches[2]["labels"][:2] = -100  # the mean over no label is no number
    made = PipelineStrategy(microbatches=2, weights=tmp_path, schedule="gpipe", device="cpu")
    steps = made._piped(module, batches[0], "training_step")
    for batch in batches:
        for one in (plain, steps.pipe):
            one.zero_grad()
        expected = plain(**{name: value for name, value in batch.items() if name != "names"}).loss
        expected.backward()
        module.names.clear()
        assert steps.run("training_step", batch, 0, divide=2).item() == pytest.approx(expected.item(), abs=1e-6)
        assert module.told["loss"] == pytest.approx(expected.item(), abs=1e-6)
        assert module.told["rows"] == (2.6 if len(batch["names"]) == 5 else 2)
        rows = batch["names"]
        half = (len(rows) + 1) // 2
        assert module.names == [
            rows,
            rows[:half],
            rows[half:],
        ]  # of the whole batch up to the call, and of microbatches
        given = dict(plain.named_parameters())
        for name, parameter in steps.pipe.named_parameters():
            torch.testing.assert_close(2 * parameter.grad, given[name].grad, rtol=1e-4, atol=1e-6)


class Counting(Texts):
    """Keeps count in all ways that a step can, of the rows it was given and of the losses it had."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.before, self.texts = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        kinds = {"a": torchmetrics.MeanMetric(), "b": torchmetrics.MeanMetric(), "all": torchmetrics.CatMetric()}
        self.losses = torchmetrics.MetricCollection(kinds)
        self.steps, self.seen = 0, nn.BatchNorm1d(1, affine=False)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.before.update(len(batch["input_ids"]))
        out = self.model(**batch)
        self.names.append(out.loss.item())
        self.steps += 1
        self.losses.update(out.loss.detach())
        self.seen(out.logits.detach().mean((1, 2))[:, None])
        self.log("rows", float(len(out.logits)), reduce_fx="sum")
        self.log("texts", self.texts(float(len(out.logits))))
        return out.loss


def counts(module: Counting) -> dict[str, float]:
    found = {"before": module.before.compute(), "texts": module.texts.compute(), **module.losses.compute()}
    return {name: float(value.sum()) for name, value in found.items()} | {
        "batches": int(module.seen.num_batches_tracked)
    }


@pytest.mark.filterwarnings(*IN_LIGHTNING)
def test_a_step_that_is_recomputed_counts_once() -> None:
    """With checkpointing as the model has it. Sums that were logged, metrics and lists had a microbatch of the last stage twice
    where its second run went to the end, as in every first step; metrics before the call had the whole batch once more."""
    model, batches = llama(num_hidden_layers=1), [padded(5, 8, seed=4), padded(4, 6, seed=6), padded(4, 6, seed=7)]
    model.gradient_checkpointing_enable()
    plain, module = Counting(llama(num_hidden_layers=1)), Counting(model)
    made = PipelineStrategy(microbatches=2, schedule="gpipe", device="cpu", profile=False)
    steps = made._piped(module, batches[0], "training_step")
    assert steps.pipe.plan.has(Op.R)
    for number, batch in enumerate(batches, 1):
        for one in (plain, steps.pipe):
            one.zero_grad()
        expected = plain.model(**batch).loss
        expected.backward()
        for start in (0, (len(batch["input_ids"]) + 1) // 2):  # what microbatches see
            rows = slice(start, start + (len(batch["input_ids"]) + 1) // 2)
            plain.training_step({name: value[rows] for name, value in batch.items()}, 0)
        assert steps.run("training_step", batch, 0, divide=1).item() == pytest.approx(expected.item(), abs=1e-6)
        assert module.told["rows"] == len(batch["input_ids"])
        assert counts(module) == pytest.approx(counts(plain), abs=1e-6)
        assert module.names == pytest.approx(plain.names, abs=1e-6)
        assert module.steps == 2 * number
        given = dict(plain.model.named_parameters())
        for name, parameter in steps.pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, given[name].grad, rtol=1e-4, atol=1e-6)


def test_adapters_that_need_the_whole_model_are_refused() -> None:
    config = AdaLoraConfig(init_r=2, target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1)
    module = Texts(get_peft_model(llama(num_hidden_layers=1), config))
    with pytest.raises(RunError, match="AdaLoraConfig adds a term"):
        PipelineStrategy(device="cpu")._piped(module, {**padded(4, 6, seed=6), "names": list("abcd")}, "training_step")


class Tagger(lightning.LightningModule):
    """A mean over the labels that count, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


@pytest.mark.parametrize("weighed", [True, False])
def test_a_loss_that_is_no_mean_over_rows(weighed: bool) -> None:
    def labels(batch: Any) -> Tensor:
        return (batch[1] != -100).sum()

    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    batch = (x, torch.tensor([0, -100, -100, 1, 2, 0]))
    expected = Tagger().training_step(batch, 0).item()
    made = PipelineStrategy(
        microbatches=2, device="cpu", schedule="gpipe", loss_weight=labels if weighed else None, profile=False
    )
    found = made._piped(Tagger(), batch, "training_step").run("training_step", batch, 0).item()
    assert (found == pytest.approx(expected, abs=1e-6)) is weighed


@pytest.mark.filterwarnings(*IN_LIGHTNING)
def test_a_checkpoint_runs_nothing(tmp_path: Path) -> None:
    """Lightning's part was unpickled as it was unless one asked for weights_only, from any file that the manifest named, and
    after the pipeline had taken its own part."""
    made, mark, name = strategy(), tmp_path / "was here", f"meta-{'0' * 32}.pt"
    pipe, _ = make()
    made._steps = SimpleNamespace(pipe=pipe)
    (tmp_path / "checkpoint").mkdir()
    for folder in (tmp_path, tmp_path / "checkpoint"):
        (folder / name).write_bytes(attack.evil_part(mark))
    before = {key: value.clone() for key, value in pipe.state_dict().items()}
    for rest in (name, f"../{name}", str(tmp_path / name), 3, None):
        pipe.save(tmp_path / "checkpoint" / "pipeline", extra={"rest": rest})
        for value in pipe.state_dict().values():
            value += 1.0
        for only in (None, True):
            with pytest.raises(RunError, match=r"cannot be read|as Lightning's part"):
                made.load_checkpoint(tmp_path / "checkpoint", weights_only=only)
        assert not mark.exists()
        for key, value in pipe.state_dict().items():
            value -= 1.0
            torch.testing.assert_close(value, before[key])


def test_what_cannot_be_is_said() -> None:
    from penstock.integrations.lightning_steps import LoggedSteps, Stand

    class Twice(Module):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(self.net(batch[0])).sum()

        def test_step(self, batch: Any, index: int) -> None:
            self.log("rows", len(batch[0]))

    module = Twice()
    module.net = Stand()
    steps = LoggedSteps(module, module.net)
    batch = (torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    (args, kwargs) = steps.call_of("training_step", batch, 0)
    assert torch.equal(args[0], batch[0])
    assert kwargs == {}
    steps._rest = ("training_step", (0,))
    with pytest.raises(RunError, match="calls its model once"):
        steps.loss(torch.ones(2, WIDTH), batch)
    with pytest.raises(RunError, match="does not call its model"):
        steps.call_of("test_step", batch, 0)
    made = strategy()
    made._accelerator = CPUAccelerator()
    for callback in (StochasticWeightAveraging(0.1), EMAWeightAveraging()):
        with pytest.raises(RunError, match=f"{type(callback).__name__} keeps a copy of the whole model"):
            made.setup(SimpleNamespace(callbacks=[TQDMProgressBar(), callback]))


def test_what_steps_log() -> None:
    from penstock.integrations.lightning_steps import LoggedSteps, Stand

    module = Module()
    with pytest.raises(RunError, match=r"Module trains net\.0\.0\.weight, .* beside the model"):
        LoggedSteps(module, Stand())
    module.net = Stand()
    steps = LoggedSteps(module, module.net)
    logged: dict[str, Any] = {}
    with steps._collecting(logged.__setitem__):
        module.log("off", module.off, True)
        module.log_dict({"a": 1, "b": 2}, False, on_epoch=True, sync_dist=True)
        with pytest.raises(RunError, match="their mean, sum, min or max"):
            module.log("rows", 3.0, reduce_fx=torch.median)
        with pytest.raises(RunError, match="a SumMetric that is no attribute of Module"):
            module.log("sum", torchmetrics.SumMetric())
    found = {name: (one.value, one.options) for name, one in logged.items()}
    flags = {"prog_bar": False, "on_epoch": True, "reduce_fx": "mean"}
    assert found == {
        "off": (None, {"prog_bar": True, "metric_attribute": "off"}),
        "a": (1.0, flags),
        "b": (2.0, flags),
    }
