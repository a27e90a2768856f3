"""LoRA adapters on a pipelined model, trained over two processes; peft loads what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)

from penstock.errors import RunError
from penstock.integrations.adapters import adapter_weights
from penstock.integrations.transformers import PipelineTrainer, TransformersPipeline, pipeline
from tests.gloo_pool import GlooPool
from tests.integrations.hf import as_torchrun, llama, padded

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]

STEPS = 3


def adapted(*, meta: bool = False, norms: bool = False, layers: int = 2, **more: Any) -> Any:
    """With `norms` peft also trains whole modules, of which each rank has some."""
    base = llama(num_hidden_layers=layers)
    if meta:
        base = base.to("meta")
    torch.manual_seed(1)
    whole = ["norm"] if norms else None
    given = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": whole, **more}
    return get_peft_model(base, LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", **given))


def batch(step: int) -> dict[str, torch.Tensor]:
    return padded(6, 8, seed=step)


def trained(folder: str) -> Any:
    pipe = pipeline(adapted(norms=True), batch(0), microbatches=2)
    before = {name: p.detach().clone() for name, p in pipe.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(STEPS):
        losses.append(pipe.step(**batch(step)).loss)
        optimizer.step()
        optimizer.zero_grad()
    pipe.save_pretrained(folder)
    continued = by_a_trainer(pipe, f"{folder}/run")
    same = all(torch.equal(p, before[name]) for name, p in pipe.named_parameters() if name in before)
    return losses, same, continued, pipe.predict(**batch(9))["logits"]


def by_a_trainer(pipe: TransformersPipeline, folder: str) -> tuple[list[float], list[float]]:
    """The losses of a Trainer that goes on with the adapters, and of one that resumes from its checkpoint."""
    found = []
    with as_torchrun():
        for resume in (None, f"{folder}/checkpoint-1"):
            args = transformers.TrainingArguments(
                output_dir=folder,
                max_steps=2,
                per_device_train_batch_size=4,
                save_steps=1,
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            )
            rows = [{name: value[k] for name, value in padded(8, 8, seed=5).items()} for k in range(8)]
            trainer = PipelineTrainer(model=pipe, args=args, train_dataset=rows)
            trainer.train(resume_from_checkpoint=resume)
            found.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    return found[0], found[1]


def test_adapters_are_trained_and_loaded_by_peft(gloo_pool: GlooPool, tmp_path: Path) -> None:
    model = adapted(norms=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    expected = []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses, frozen, (once, resumed), logits in gloo_pool.run(2, trained, str(tmp_path), timeout=240.0):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert frozen  # the base stays as it was
        assert once == pytest.approx(resumed, abs=1e-6)
        read = PeftModel.from_pretrained
        with torch.no_grad():
            first = read(llama(), tmp_path).eval()(**batch(9)).logits
            torch.testing.assert_close(model.eval()(**batch(9)).logits, first, rtol=1e-3, atol=1e-4)
            last = read(llama(), tmp_path / "run/checkpoint-2").eval()(**batch(9)).logits
            torch.testing.assert_close(last, logits, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(first, last, atol=1e-5)


def test_a_base_that_no_rank_holds(tmp_path: Path) -> None:
    """The base comes out of its files under the names that peft gives it; adapters start as nothing."""
    base = llama()
    base.save_pretrained(tmp_path)
    pipe = pipeline(adapted(meta=True), batch(0), weights=tmp_path, microbatches=2)
    matrices = {name.split(".")[-3] for name, p in pipe.named_parameters() if p.requires_grad and p.abs().sum() > 0}
    assert matrices == {"lora_A"}
    with torch.no_grad():
        loss = base(**batch(0)).loss.item()
    assert pipe.step(**batch(0)).loss == pytest.approx(loss, abs=1e-5)
    assert all(p.grad is None for p in pipe.parameters() if not p.requires_grad)


def test_every_kind_of_adapter_is_found_again(tmp_path: Path) -> None:
    """peft shortens the names of some when it saves them: the magnitudes of DoRA."""
    model = adapted(norms=True, use_dora=True)
    pipe = pipeline(model, batch(0), microbatches=2)
    pipe.save_pretrained(tmp_path)
    trained = {name: p for name, p in pipe.named_parameters() if p.requires_grad}
    kinds = {part for name in trained for part in name.split(".") if part.startswith("lora_")}
    assert kinds == {"lora_A", "lora_B", "lora_magnitude_vector"}
    found = adapter_weights(tmp_path, pipe)
    assert found.keys() == trained.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, trained[name].detach())


def test_a_learnt_prompt(tmp_path: Path) -> None:
    """peft holds the embedding twice, so torch.export traced a copy in which no cut was found; and its prompt is before the
    first label, which therefore counts."""
    model = get_peft_model(llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    expected = model(**batch(0)).loss
    expected.backward()
    (prompt,) = (p for p in model.parameters() if p.requires_grad)
    wanted, prompt.grad = prompt.grad, None
    pipe = pipeline(model, batch(0), microbatches=2, schedule="zbv")
    assert len(pipe.stages) == 2
    assert pipe.step(**batch(0)).loss == pytest.approx(expected.item(), abs=1e-5)
    (trained,) = (p for p in pipe.parameters() if p.requires_grad)
    torch.testing.assert_close(trained.grad, wanted, rtol=1e-4, atol=1e-6)
    pipe.save_pretrained(tmp_path)
    with torch.no_grad():
        found = PeftModel.from_pretrained(llama(), tmp_path).eval()(**batch(0)).logits
        torch.testing.assert_close(found, pipe.predict(**batch(0))["logits"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            AdaLoraConfig(init_r=2, target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1),
            "AdaLoraConfig adds a term",
        ),
        (PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "in a cache"),
        (VeraConfig(r=2, target_modules=["q_proj"]), "save_projection=False"),
        (None, "default, other are active at once"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_adapters_that_need_the_whole_model_are_refused(config: Any, said: str) -> None:
    model = adapted() if config is None else get_peft_model(llama(), config)
    if config is None:
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
        model.base_model.set_adapter(["default", "other"])
    with pytest.raises(RunError, match=said):
        pipeline(model, batch(0), microbatches=2)
