"""Hugging Face accelerate's pipelined inference, as its documentation shows it, with small random models."""

from __future__ import annotations

import sys

import torch
import torch.distributed.pipelining
from accelerate import PartialState
from accelerate.inference import prepare_pippy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)


def models():
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    yield GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=4, n_head=2, use_cache=False)), 1
    yield BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=4, max_position_embeddings=32)), 1
    yield (
        T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False)
        ),
        2,
    )
    yield LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, use_cache=False)), 1


def main() -> None:
    state = PartialState(cpu=True)
    torch.manual_seed(0)
    for model, inputs in models():
        model.eval()
        tokens = [torch.randint(0, 64, (2, 8)) for _ in range(inputs)]
        kwargs = {"input_ids": tokens[0], "decoder_input_ids": tokens[1]} if inputs == 2 else None
        args = (tokens[0],) if kwargs is None else ()
        with torch.no_grad():
            expected = model(*args, **(kwargs or {}))
        split = prepare_pippy(model, split_points="auto", example_args=args, example_kwargs=kwargs)
        with torch.no_grad():
            output = split(*args, **(kwargs or {}))
        if state.is_last_process:
            logits = output[0] if isinstance(output, tuple) else output  # what torch's stages give: the model's tensors
            torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-5)
            print(type(model).__name__, torch.distributed.pipelining.__name__, file=sys.stderr)


if __name__ == "__main__":
    main()
