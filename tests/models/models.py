# ruff: noqa: E501
"""Small random models of real architectures: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn

_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
}
_GQA = _SMALL | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Entry:
    """A model, an example, and where it is cut into 4; the cut into 2 is the middle one of these."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], dict[str, Any]]
    cuts: tuple[str, str, str]
    dtype: torch.dtype = torch.float64  # some operators know only narrower ones


def _ids(length: int = 6, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 60, (batch, length))


def _lm() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": _ids(), "use_cache": False}


def _masked() -> dict[str, Any]:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": _ids(), "attention_mask": mask, "labels": _ids()}


def _seq2seq() -> dict[str, Any]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(4), "labels": _ids(4), "use_cache": False}


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def _clip() -> dict[str, Any]:
    return {"input_ids": _ids(), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def _whisper() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": _ids(4), "use_cache": False}


def _layers(prefix: str, *at: int) -> tuple[str, str, str]:
    first, second, third = at or (1, 2, 3)
    return f"{prefix}.{first}", f"{prefix}.{second}", f"{prefix}.{third}"


_PARTS = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
}

# fmt: off
MODELS = [
    Entry("gpt2", lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=64)), _lm, _layers("transformer.h")),
    Entry("gpt_neox", lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_SMALL, max_position_embeddings=64)), _lm, _layers("gpt_neox.layers")),
    Entry("opt", lambda: tf.OPTForCausalLM(tf.OPTConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_dim=64, vocab_size=64, max_position_embeddings=64, word_embed_proj_dim=32)), _lm, _layers("model.decoder.layers")),
    Entry("bloom", lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=64)), _lm, _layers("transformer.h")),
    Entry("llama", lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GQA)), _lm, _layers("model.layers")),
    Entry("mistral", lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GQA, sliding_window=4)), _lm, _layers("model.layers")),
    Entry("mixtral", lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_GQA, num_local_experts=2)), _lm, _layers("model.layers"), torch.float32),
    Entry("qwen2", lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GQA)), _lm, _layers("model.layers")),
    Entry("qwen3", lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GQA, head_dim=8)), _lm, _layers("model.layers")),
    Entry("gemma2", lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_GQA, head_dim=8, sliding_window=4)), _lm, _layers("model.layers")),
    Entry("phi3", lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_GQA, sliding_window=4)), _lm, _layers("model.layers")),
    Entry("olmo", lambda: tf.OlmoForCausalLM(tf.OlmoConfig(**_GQA)), _lm, _layers("model.layers")),
    Entry("bert", lambda: tf.BertForMaskedLM(tf.BertConfig(**_SMALL, max_position_embeddings=64)), _masked, _layers("bert.encoder.layer")),
    Entry("roberta", lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**_SMALL, max_position_embeddings=64)), _masked, _layers("roberta.encoder.layer")),
    Entry("electra", lambda: tf.ElectraForMaskedLM(tf.ElectraConfig(**_SMALL, embedding_size=16, max_position_embeddings=64)), _masked, _layers("electra.encoder.layer")),
    Entry("distilbert", lambda: tf.DistilBertForMaskedLM(tf.DistilBertConfig(dim=32, n_layers=4, n_heads=4, hidden_dim=64, vocab_size=64, max_position_embeddings=64)), _masked, _layers("distilbert.transformer.layer")),
    Entry("t5", lambda: tf.T5ForConditionalGeneration(tf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0)), _seq2seq, ("encoder.block.1", "decoder.block.0", "decoder.block.1")),
    Entry("bart", lambda: tf.BartForConditionalGeneration(tf.BartConfig(**_PARTS, max_position_embeddings=64)), _seq2seq, ("model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1")),
    Entry("vit", lambda: tf.ViTForImageClassification(tf.ViTConfig(**_VIT)), _image, _layers("vit.layers")),
    Entry("resnet", lambda: tf.ResNetForImageClassification(tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic")), _image, _layers("resnet.encoder.stages")),
    Entry("clip", lambda: tf.CLIPModel(tf.CLIPConfig(text_config=_GQA | {"eos_token_id": 63}, vision_config=_VIT, projection_dim=16)), _clip, ("vision_model.encoder.layers.2", "text_model.encoder.layers.0", "text_model.encoder.layers.2")),
    Entry("whisper", lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_PARTS, num_mel_bins=8, max_source_positions=8, max_target_positions=16)), _whisper, ("model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1")),
]
# fmt: on


@dataclass(frozen=True)
class Listed:
    """A model that torch.export cannot take: why not, and the submodules that are called in order instead."""

    name: str
    make: Callable[[], nn.Module]
    reason: str  # as the error of the capture gives it
    modules: tuple[str, ...]
    calls: dict[str, Callable[..., Any]]


def _longformer_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Without padding and without tokens that see everything."""
    none = torch.zeros(x.shape[:2], dtype=torch.bool)
    return layer(
        x, attention_mask=none.to(x.dtype), is_index_masked=none, is_index_global_attn=none, is_global_attn=False
    )[0]


_LONG = _SMALL | {
    "max_position_embeddings": 64,
    "attention_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# fmt: off
BY_MODULES = [
    Listed("longformer", lambda: tf.LongformerForMaskedLM(tf.LongformerConfig(**_LONG)), "guard on data-dependent expression .* in longformer.encoder.layer.0.attention.self .* if is_global_attn:",
           ("longformer.embeddings", *(f"longformer.encoder.layer.{i}" for i in range(4)), "lm_head"), {"longformer.encoder.layer.*": _longformer_layer}),
]
# fmt: on
