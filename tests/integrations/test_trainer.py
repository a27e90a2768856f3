"""`PipelineTrainer` over two processes, against the same Trainer in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.integrations.transformers import PipelineTrainer
from tests.gloo_pool import GlooPool
from tests.integrations.hf import as_torchrun, llama, padded

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    batch = padded(count, 8, seed)
    return [{name: value[k] for name, value in batch.items()} for k in range(count)]


def arguments(folder: str, **changes: Any) -> transformers.TrainingArguments:
    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
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


def run(kind: Any, folder: str, *, resume: str | None = None, options: Any = None, **changes: Any) -> dict[str, Any]:
    heard = Steps()
    trainer = kind(
        model=llama(),
        args=arguments(folder, **changes),
        train_dataset=rows(22, 1),
        eval_dataset=rows(6, 2),
        compute_metrics=accuracy,
        callbacks=[heard],
        **({} if options is None else {"pipeline_options": options}),
    )
    done = trainer.train(resume_from_checkpoint=resume)
    logs = [
        {k: v for k, v in log.items() if not k.endswith(("_runtime", "_per_second"))}
        for log in trainer.state.log_history[:-1]
    ]
    return {"logs": logs, "loss": done.training_loss, "heard": heard.heard}


def pipelined(folder: str) -> Any:
    with as_torchrun():
        options = {"microbatches": 2}
        first = run(PipelineTrainer, f"{folder}/a", options=options)
        again = run(PipelineTrainer, f"{folder}/b", resume=f"{folder}/a/checkpoint-2", options=options)
        return first, again


def test_a_trainer_trains_logs_evaluates_saves_and_resumes(gloo_pool: GlooPool, tmp_path: Path) -> None:
    found = gloo_pool.run(2, pipelined, str(tmp_path), timeout=240.0)
    expected = run(transformers.Trainer, str(tmp_path / "plain"))
    for first, again in found:
        assert first["heard"] == expected["heard"] == {"steps": 4, "saves": 2, "evaluations": 2}
        assert_logs(first["logs"], expected["logs"])
        assert_logs(again["logs"], expected["logs"])  # the first half comes out of the checkpoint
        assert first["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4").eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain" / "checkpoint-4").eval()
    with torch.no_grad():
        batch = padded(5, 7, seed=9)
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-3, atol=1e-4)


def assert_logs(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [sorted(log) for log in found] == [sorted(log) for log in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
