"""`PipelineTrainer` over two processes, against the same Trainer in one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from penstock.errors import RunError
from penstock.integrations.transformers import PipelineTrainer
from penstock.plan.ops import Op
from tests.gloo_pool import GlooPool
from tests.integrations.hf import as_torchrun, llama, packed, padded

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    batch = padded(count, 8, seed)
    return [{name: value[k] for name, value in batch.items()} for k in range(count)]


def arguments(folder: str, **changes: Any) -> transformers.TrainingArguments:
    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return transformers.TrainingArguments(output_dir=folder, **(given | changes))


def accuracy(predictions: transformers.EvalPrediction) -> dict[str, float]:
    counted = predictions.label_ids[:, 1:] != -100
    same = predictions.predictions[:, :-1].argmax(-1) == predictions.label_ids[:, 1:]
    return {"accuracy": float(same[counted].mean()), "rows": len(predictions.predictions)}


class Steps(transformers.TrainerCallback):
    """Counts what it is told of."""

    def __init__(self) -> None:
        self.heard = {"steps": 0, "saves": 0, "evaluations": 0}

    def on_step_end(self, *given: Any, **more: Any) -> None:
        self.heard["steps"] += 1

    def on_save(self, *given: Any, **more: Any) -> None:
        self.heard["saves"] += 1

    def on_evaluate(self, *given: Any, **more: Any) -> None:
        self.heard["evaluations"] += 1


def run(kind: Any, folder: str, *, model: Any, resume: str | None = None, **changes: Any) -> dict[str, Any]:
    heard = Steps()
    options = changes.pop("options", None)
    trainer = kind(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=rows(21, 1),  # the last batch has one row, and there are two microbatches
        eval_dataset=rows(10, 2),
        compute_metrics=accuracy,
        callbacks=[heard],
        **({} if options is None else {"pipeline_options": options}),
    )
    before = trainer.evaluate()["eval_loss"]
    done = trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/best")
    logs = [
        {k: v for k, v in log.items() if not k.endswith(("_runtime", "_per_second", "_time"))}
        for log in trainer.state.log_history[:-1]
    ]
    found = {"logs": logs, "loss": done.training_loss, "heard": heard.heard, "before": before}
    found["work"] = trainer.state.total_flos
    return {**found, "pipe": trainer.pipe} if kind is PipelineTrainer else found


def pipelined(folder: str) -> Any:
    with as_torchrun():
        first = run(
            PipelineTrainer, f"{folder}/a", model=llama(), options={"microbatches": 2}, gradient_checkpointing=True
        )
        pipe = first.pop("pipe")
        again = run(PipelineTrainer, f"{folder}/b", model=pipe, resume=f"{folder}/a/checkpoint-2")
        again.pop("pipe")
        return first, again, [str(action) for action in pipe.plan.actions(0)]


def test_a_trainer_trains_logs_evaluates_saves_and_resumes(gloo_pool: GlooPool, tmp_path: Path) -> None:
    found = gloo_pool.run(2, pipelined, str(tmp_path), timeout=240.0)
    expected = run(transformers.Trainer, str(tmp_path / "plain"), model=llama())
    for first, again, actions in found:
        assert first["heard"] == expected["heard"] == {"steps": 4, "saves": 2, "evaluations": 3}
        assert first["before"] == pytest.approx(expected["before"], abs=1e-5)
        assert_logs(first["logs"], expected["logs"])
        assert_logs(again["logs"], expected["logs"])  # the first half comes out of the checkpoint
        assert first["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert first["work"] == pytest.approx(expected["work"])
        assert "0R0" in actions  # gradient_checkpointing is in the plan
    read = transformers.AutoModelForCausalLM.from_pretrained
    for folder, other in (("a/best", "best"), ("b/best", "best"), ("a/checkpoint-4", "checkpoint-4")):
        with torch.no_grad():
            found, expected = (
                read(tmp_path / f).eval()(**padded(5, 7, seed=9)).logits for f in (folder, f"plain/{other}")
            )
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def assert_logs(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [sorted(log) for log in found] == [sorted(log) for log in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("kind", ["smoothed", "function", "bf16"])
def test_other_losses_in_one_process(kind: str, tmp_path: Path) -> None:
    """Microbatches of a batch, and batches that are accumulated, add up to the loss of all their labels."""
    found = []
    for made, options in ((PipelineTrainer, {"pipeline_options": {"microbatches": 2}}), (transformers.Trainer, {})):
        changes: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
        changes |= {"load_best_model_at_end": False, "bf16": kind == "bf16"}
        changes |= {"label_smoothing_factor": 0.1} if kind == "smoothed" else {}
        given: dict[str, Any] = {"compute_loss_func": summed} if kind == "function" else {}
        args = arguments(str(tmp_path), **changes)
        trainer = made(model=llama(), args=args, train_dataset=rows(16, 1), **given, **options)
        trainer.train()
        found.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history[:-1]])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=2e-2 if kind == "bf16" else 1e-4)


def test_steps_are_under_the_precision_of_the_trainer(tmp_path: Path) -> None:
    """accelerate wraps a model for it, and a pipeline is left alone."""
    seen: list[tuple[bool, torch.dtype]] = []

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), outputs.logits.dtype))
        return summed(outputs, labels, num_items_in_batch or 1)

    args = arguments(
        str(tmp_path), max_steps=1, bf16=True, load_best_model_at_end=False, eval_strategy="no", save_strategy="no"
    )
    given = {"train_dataset": rows(8, 1), "eval_dataset": rows(8, 2), "compute_loss_func": loss}
    trainer = PipelineTrainer(model=llama(), args=args, pipeline_options={"microbatches": 2}, **given)
    trainer.train()
    assert set(seen) == {(True, torch.bfloat16)}
    seen.clear()
    trainer.predict(rows(8, 2))
    assert set(seen) == {(True, torch.bfloat16)}


@pytest.mark.parametrize("kind", ["own loss", "function"])
def test_a_packed_row_is_cut_between_its_texts(kind: str, tmp_path: Path) -> None:
    """`DataCollatorWithFlattening` makes one row of a batch: its texts are the microbatches, and the loss is that of the row."""
    texts = [{"input_ids": (torch.arange(2 + k % 5) * (k + 3) % 37 + 3).tolist()} for k in range(21)]
    flat = transformers.DataCollatorWithFlattening(
        **({"return_seq_idx": True, "return_flash_attn_kwargs": True} if kind == "function" else {})
    )
    found, cut = [], []
    for made, options in ((PipelineTrainer, {"pipeline_options": {"microbatches": 3}}), (transformers.Trainer, {})):
        changes: dict[str, Any] = {"num_train_epochs": 1, "max_steps": -1, "save_strategy": "no", "eval_strategy": "no"}
        given: dict[str, Any] = {"compute_loss_func": summed} if kind == "function" else {}
        args = arguments(str(tmp_path), **changes, load_best_model_at_end=False)
        trainer = made(
            model=llama(),
            args=args,
            train_dataset=texts,
            eval_dataset=texts[:5],
            data_collator=flat,
            **given,
            **options,
        )
        if made is PipelineTrainer:
            step = trainer.pipe.step
            trainer.pipe.step = lambda *a, step=step, **b: cut.append(len((r := step(*a, **b)).losses)) or r
        trainer.train()
        logs = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history[:-1]]
        found.append([*logs, (trainer.evaluate(metric_key_prefix="it")["it_loss"], 0.0)])
    assert cut == [3, 3, 3, 3, 3, 1]  # the last batch has one text
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


class OwnLoss(PipelineTrainer):
    def compute_loss(self, *given: Any, **more: Any) -> Any:
        raise AssertionError("a pipeline has no place for it")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (PipelineTrainer, {"neftune_noise_alpha": 5.0, "bf16_full_eval": True}, "bf16_full_eval, neftune_noise_alpha"),
        (OwnLoss, {}, "an overridden compute_loss.*compute_loss_func="),
        (PipelineTrainer, {"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    ],
)
def test_what_would_not_be_heeded_is_refused(kind: Any, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=said):
        kind(model=llama(), args=arguments(str(tmp_path), **changes), train_dataset=rows(8, 1), eval_dataset=rows(8, 2))


def test_the_checkpoint_of_another_trainer_is_not_half_resumed(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no", "load_best_model_at_end": False}
    for kind, resume in ((transformers.Trainer, None), (PipelineTrainer, True)):
        trainer = kind(model=llama(), args=arguments(str(tmp_path), **changes), train_dataset=rows(8, 1))
        if resume is None:
            trainer.train()
            continue
        with pytest.raises(RunError, match="the optimizer of a Trainer without a pipeline"):
            trainer.train(resume_from_checkpoint=resume)


class Lines(torch.utils.data.IterableDataset):
    """Rows of changing lengths, two texts packed in each: what comes when cannot be asked for by number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for k in range(self.count):
            row = {name: value[k % 5] for name, value in packed(5, 6 + k % 4).items()}
            yield {**row, "input_ids": (row["input_ids"] * (k + 3)) % 37 + 3}


def padded_to_the_longest(lines: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fills = {"input_ids": 0, "position_ids": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([line[name] for line in lines], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }


def with_lines(kind: Any, folder: str, *, batch: int, layers: int, resume: str | None = None, **options: Any) -> Any:
    changes = {"max_steps": 3, "eval_steps": 3, "per_device_train_batch_size": batch}
    changes |= {"per_device_eval_batch_size": batch, "load_best_model_at_end": False}
    trainer = kind(
        model=llama(num_hidden_layers=layers), args=arguments(folder, **changes, gradient_checkpointing=kind is PipelineTrainer),
        train_dataset=Lines(64), eval_dataset=list(Lines(12)), data_collator=padded_to_the_longest,
        compute_metrics=accuracy, **options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/last")
    logs = trainer.state.log_history[:-1]
    return trainer, [
        {k: v for k, v in log.items() if not k.endswith(("_runtime", "_per_second", "_time"))} for log in logs
    ]


def replicated(folder: str, stages: int) -> Any:
    """Two replicas under DDP; of more than one stage also under FSDP, from a checkpoint of theirs."""
    found = []
    with as_torchrun():
        mesh = init_device_mesh("cpu", (2, stages), mesh_dim_names=("dp", "pp"))
        for kind, resume in (("ddp", None), ("fsdp", f"{folder}/ddp/checkpoint-2"))[:stages]:
            given = {"mesh": mesh, "microbatches": 2, "data_parallel": kind}
            made, logs = with_lines(
                PipelineTrainer, f"{folder}/{kind}", batch=3, layers=stages, resume=resume, pipeline_options=given
            )
            found.append((logs, made.pipe.plan.has(Op.R)))
    return found


@pytest.mark.parametrize(
    "stages", [1, pytest.param(2, marks=pytest.mark.long("one stage shows what replicas are to a Trainer"))]
)
def test_replicas_take_lines_of_changing_lengths_in_turn(gloo_pool: GlooPool, tmp_path: Path, stages: int) -> None:
    """Two replicas, three rows each: what one process makes of six."""
    _, expected = with_lines(transformers.Trainer, str(tmp_path / "plain"), batch=6, layers=stages)
    for found in gloo_pool.run(2 * stages, replicated, str(tmp_path), stages, timeout=240.0):
        for logs, recomputes in found:
            assert_logs(logs, expected)
            assert recomputes == (stages > 1)  # a backward that follows its own forward needs none
    read = transformers.AutoModelForCausalLM.from_pretrained
    batch = padded(5, 7, seed=9)
    wanted = read(tmp_path / "plain/last").eval()(**batch).logits.detach()
    for kind in ("ddp", "fsdp")[:stages]:
        torch.testing.assert_close(
            read(tmp_path / kind / "last").eval()(**batch).logits.detach(), wanted, rtol=1e-3, atol=1e-4
        )
