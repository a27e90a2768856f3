"""A model of transformers as a pipeline in one call: its loss and gradients are those of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.comm.local import LocalTransport, LocalWorld
from penstock.errors import CaptureError, SplitError
from penstock.integrations.hf_batches import completed, open_sizes
from penstock.integrations.hf_model import as_the_model_names_them, cuts_of_plan
from penstock.integrations.transformers import TransformersPipeline, pipeline
from tests.gloo_pool import GlooPool
from tests.integrations.hf import SIZES, llama, packed, padded


def trained(model: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss of the unsplit model, and its gradients."""
    model.zero_grad()
    model.config.use_cache = False  # as a Trainer sets it; with a cache, transformers takes packed rows for one text
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def over_two_ranks(source: Any, example: dict[str, Tensor], batches: list[dict[str, Tensor]], **options: Any) -> Any:
    """The losses and all gradients of each batch, and what an evaluation gives, with ranks as threads."""

    save = options.pop("save", None)

    def rank(transport: LocalTransport) -> Any:
        pipe = pipeline(source, example, group=transport, microbatches=2, **options)
        found = []
        for batch in batches:
            pipe.zero_grad()
            loss = pipe.step(**batch).loss
            found.append((loss, {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}))
        logits = pipe.predict(**{name: value for name, value in batches[-1].items() if name != "labels"})["logits"]
        if save is not None:
            pipe.save_pretrained(save)
        return found, logits, pipe.plan.placement.num_stages, [n for n, _ in pipe.named_parameters()]

    first, second = LocalWorld(2).run(rank)
    steps = [(loss, mine | others) for (loss, mine), (_, others) in zip(first[0], second[0], strict=True)]
    return steps, first[1], first[3], second[3]


def assert_same(found: Any, expected: Any) -> None:
    loss, grads = found
    assert loss == pytest.approx(expected[0], abs=2e-6)
    assert set(grads) == set(expected[1])
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][name], rtol=1e-4, atol=1e-6)


def test_padded_batches_of_changing_lengths_from_a_folder(tmp_path: Path) -> None:
    """Each rank reads its own stages out of sharded safetensors; every label counts once, however it is padded."""
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    batches = [padded(6, 9, seed=1), padded(5, 7, seed=2)]
    steps, logits, first, second = over_two_ranks(tmp_path, padded(6, 8), batches)
    for step, batch in zip(steps, batches, strict=True):
        assert_same(step, trained(model, batch))
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(**batches[-1]).logits, rtol=1e-4, atol=1e-5)
    assert "model.layers.0.mlp.up_proj.weight" in first
    assert "model.layers.0.mlp.up_proj.weight" not in second  # no rank holds the whole model


def most_held(call: Callable[[], Any]) -> int:
    """The largest number of bytes that this process held in memory during the call, beyond what it held before."""
    memory = Path("/proc/self")
    (memory / "clear_refs").write_text("5")  # the kernel begins its high-water mark anew

    def of_kernel(name: str) -> int:
        return next(1024 * int(line.split()[1]) for line in (memory / "status").open() if line.startswith(name))

    before = of_kernel("VmRSS")
    call()
    return of_kernel("VmHWM") - before


LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}


def loaded_from(folder: str) -> tuple[int, int]:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.ones(2, 4, dtype=torch.long)}
    config = transformers.LlamaConfig(**(SIZES | LARGE | {"hidden_size": 16, "intermediate_size": 32}))
    pipeline(transformers.LlamaForCausalLM, batch, config=config, microbatches=2)  # whatever a first time costs
    kept = []
    most = most_held(lambda: kept.append(pipeline(folder, batch, microbatches=2)))
    return most, sum(p.nbytes for p in kept[0].parameters())


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
def test_no_rank_ever_holds_the_whole_model(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Two processes, and what the kernel counts, which is more than weights: far from the other half, all the same."""
    with torch.device("meta"):
        model = llama(**LARGE)
    model.to_empty(device="cpu").save_pretrained(tmp_path, max_shard_size="5MB")  # one of them is in memory at a time
    whole = sum(p.nbytes for p in model.parameters())
    del model
    found = gloo_pool.run(2, loaded_from, str(tmp_path), timeout=120.0)
    assert sum(own for _, own in found) == whole > 60_000_000
    for most, own in found:
        assert own < 0.6 * whole
        assert most < own + (whole - own) * 2 / 3, f"{most} bytes for {own} of {whole}"


def saved_by_transformers(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    match kind:
        case "experts one by one":  # are put together
            config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
            return transformers.MixtralForCausalLM(config)
        case "two matrices in one":  # are taken apart
            small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
            return transformers.Dinov2Model(transformers.Dinov2Config(**small, patch_size=4, use_swiglu_ffn=True))
        case _:
            return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


@pytest.mark.parametrize("kind", ["experts one by one", "two matrices in one", "other names"])
def test_files_that_transformers_converts_while_it_loads_them(tmp_path: Path, kind: str) -> None:
    model = saved_by_transformers(kind)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if kind == "other names":  # as files of the first years have them
        old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in load_file(file).items()}
        save_file(old, file, {"format": "pt"})
    assert not set(model.state_dict()) <= set(load_file(file))
    weights = as_the_model_names_them(tmp_path, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name  # type: ignore[index, call-overload]


def test_a_mixture_of_experts_from_a_folder_and_back(tmp_path: Path) -> None:
    model = saved_by_transformers("experts one by one").eval()
    model.save_pretrained(tmp_path / "given")
    batch = padded(4, 8)
    steps, logits, _, _ = over_two_ranks(tmp_path / "given", batch, [batch], save=tmp_path / "saved")
    assert_same(steps[0], trained(model, batch))
    with torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()(**batch).logits
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-5)


def test_packed_rows_and_a_class_with_a_config() -> None:
    """What has no file is set as the model sets it, the same for any number of stages; positions begin again in a row."""
    config = transformers.LlamaConfig(**SIZES)
    batch = packed(4, 8)
    steps, _, _, _ = over_two_ranks(transformers.LlamaForCausalLM, batch, [batch], config=config, recompute=True)
    whole = pipeline(transformers.AutoModelForCausalLM, batch, config=config, microbatches=2)
    model = llama(seed=5)
    model.load_state_dict(whole.state_dict())
    assert_same(steps[0], trained(model, batch))
    spread = dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"].std().item()
    assert spread == pytest.approx(config.initializer_range, rel=0.2)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_packed_row_is_cut_only_where_its_texts_do_not_see_one_another(kind: str) -> None:
    """An encoder looks both ways along its row, whatever the positions are: its loss was that of texts on their own."""
    if kind == "llama":
        model = llama()
    else:
        torch.manual_seed(0)
        sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.dim() > 1 else 1)  # so that attention tells tokens apart
    model.eval()
    model.config.use_cache = False  # with a cache transformers lets texts see one another
    batch = packed(1, 12)
    expected = model(**batch).loss.item()
    pipe = pipeline(model, batch, microbatches=2, schedule="gpipe", profile=False)
    found = pipe.evaluate(**batch)
    assert len(found.losses) == (2 if kind == "llama" else 1)
    assert found.loss == pytest.approx(expected, rel=1e-4)


def test_a_model_that_ignores_the_number_of_labels() -> None:
    """BERT's loss is the mean over the labels that it is given; microbatches count by theirs."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **dropout))
    batch, half = padded(5, 8, seed=4), padded(5, 8, seed=5)
    half["labels"][3:] = -100  # a microbatch without any: its own loss is no number
    expected = [trained(model, one) for one in (batch, half)]
    model.zero_grad()
    pipe = TransformersPipeline(model, batch, microbatches=2, profile=False)
    for one, wanted in zip((batch, half), expected, strict=True):
        pipe.zero_grad()
        loss = pipe.step(**one).loss
        assert_same((loss, {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}), wanted)
    assert pipe.evaluate(**half).loss == pytest.approx(wanted[0], abs=2e-6)


def test_cuts_are_those_of_the_config() -> None:
    model = llama(num_hidden_layers=6)
    assert list(cuts_of_plan(model, 3) or ()) == ["model.layers.2", "model.layers.4"]
    heavy = llama(num_hidden_layers=6, vocab_size=4000)  # the head is work too
    assert list(cuts_of_plan(heavy, 2) or ()) == ["model.layers.5"]
    assert cuts_of_plan(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2)), 2) is None
    assert cuts_of_plan(model, 7) is None


@pytest.mark.filterwarnings("ignore:.*loss_type.*")
def test_a_model_that_names_no_loss_has_that_of_a_language_model() -> None:
    """GPT-2 is one: the first label of a row is no target, and does not count."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))
    batch = padded(4, 8, seed=4)
    with torch.no_grad():
        expected = model(**batch).loss.item()
    pipe = TransformersPipeline(model, batch, microbatches=2, profile=False)
    assert pipe.step(**batch).loss == pytest.approx(expected, abs=1e-5)


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"without config="):
        pipeline(transformers.LlamaForCausalLM, padded(4, 8))
    with pytest.raises(CaptureError, match=r"a folder with config\.json"):
        pipeline(tmp_path / "nothing", padded(4, 8))


def test_an_argument_that_the_example_lacks_is_named() -> None:
    tokens = {"input_ids": torch.ones(4, 8, dtype=torch.long, device="meta")}
    with pytest.raises(SplitError, match="make the pipeline with an example that has attention_mask too"):
        completed(padded(4, 8), {**tokens, "labels": tokens["input_ids"]})
    with pytest.raises(SplitError, match="the batch has output_attentions"):
        completed({"input_ids": torch.ones(4, 8), "output_attentions": True}, tokens)
    assert list(completed({"input_ids": torch.ones(4, 8), "use_cache": False}, tokens)) == ["input_ids"]


def test_what_predict_leaves_out_counts_for_nothing() -> None:
    tokens = torch.ones(4, 8, dtype=torch.long, device="meta")
    one, several = torch.ones(4, dtype=torch.long, device="meta"), torch.ones(4, 8, device="meta")
    images = {"pixel_values": torch.ones(4, 3, 4, 4, device="meta"), "labels": one}
    assert completed({"pixel_values": torch.ones(2, 3, 4, 4)}, images)["labels"].tolist() == [-100, -100]
    words = {"input_ids": torch.ones(2, 5)}
    assert completed(words, {"input_ids": tokens, "labels": tokens})["labels"].tolist() == [[-100] * 5] * 2
    classes = completed(words, {"input_ids": tokens, "labels": several})["labels"]  # each of eight, or not
    assert (classes.shape, classes.dtype) == ((2, 8), torch.float32)
    answers = completed(words, {"input_ids": tokens, "start_positions": one})
    assert answers["start_positions"].tolist() == [5, 5]  # behind the last token


def test_the_length_of_texts_is_open_also_where_a_row_has_several() -> None:
    auto = torch.export.Dim.AUTO
    rows = {"input_ids": torch.ones(4, 2, 8, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}
    assert open_sizes(rows) == {"input_ids": {0: auto, 2: auto}, "labels": {0: auto}}
    embedded = {"inputs_embeds": torch.ones(4, 8, 8), "attention_mask": torch.ones(4, 8)}
    assert open_sizes(embedded) == {"inputs_embeds": {0: auto, 1: auto}, "attention_mask": {0: auto, 1: auto}}


def test_a_parameter_that_the_files_lack_is_not_made_up(tmp_path: Path) -> None:
    from penstock.integrations.hf_model import module_values

    model = llama().to("meta")
    fill = module_values(model, 0, only_missing=True)
    with pytest.raises(CaptureError, match=r"no value for model\.norm\.weight"):
        fill("model.norm.weight", torch.empty(16))
    frequencies = torch.empty(4)
    fill("model.rotary_emb.inv_freq", frequencies)  # no file has it
    assert torch.equal(frequencies, llama().model.rotary_emb.inv_freq)


def test_checkpoints_inside_the_model_become_part_of_the_plan() -> None:
    model = llama()
    batch = padded(4, 8)
    expected = trained(model, batch)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    models = [model, copy.deepcopy(model)]
    inside = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert inside

    def rank(transport: LocalTransport) -> Any:
        pipe = pipeline(models[transport.rank], batch, group=transport, microbatches=4)
        loss = pipe.step(**batch).loss
        return loss, {n: p.grad for n, p in pipe.named_parameters()}, pipe.plan

    (loss, first, plan), (_, second, _) = LocalWorld(2).run(rank)
    assert next(plan.lines()) == "rank 0: 0F0 0F1 0R0 0B0 0F2 0R1 0B1 0F3 0R2 0B2 0R3 0B3"
    assert_same((loss, first | second), expected)
    assert all(module.gradient_checkpointing for module in inside)  # the user's model is as it was
