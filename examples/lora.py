"""Fine-tune a Hugging Face model with LoRA, pipelined; the adapter is one that peft loads.

    pip install "penstock[hf]"
    torchrun --standalone --nproc-per-node 2 examples/lora.py

The model is a small Llama with random weights, so that nothing is downloaded; with a model of yours write
`AutoModelForCausalLM.from_pretrained(...)`. peft freezes the weights and adds the adapters before the model is cut: only
they get gradients, and the first stage sends none where nothing upstream needs one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import penstock


def make_base(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same on every rank
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--output", default="runs/lora")
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    model = get_peft_model(
        make_base(options.width),
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    tokens = torch.arange(16).repeat(8, 2) + torch.arange(8).unsqueeze(1)  # counting, which is easy to learn
    pipe = penstock.Pipeline(
        model,
        example_kwargs={"input_ids": tokens},
        loss_fn=loss_fn,
        schedule="1f1b",
        microbatches=4,
        profile=False,
    )
    trained = [p for p in pipe.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(options.steps):
        result = pipe.step(input_ids=tokens, target=tokens)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, options.steps - 1):
            print(f"step {step}: loss {result.loss:.4f}")
    pipe.save(f"{options.output}/checkpoint")
    after = pipe.evaluate(input_ids=tokens, target=tokens).loss

    if dist.get_rank() == 0:  # out of the pipeline, into peft's own format
        model.load_state_dict(penstock.load(f"{options.output}/checkpoint").model)
        model.save_pretrained(f"{options.output}/adapter")
        again = PeftModel.from_pretrained(make_base(options.width), f"{options.output}/adapter").eval()
        with torch.no_grad():
            found = loss_fn(again(input_ids=tokens), tokens).item()
        print(f"pipelined: loss {after:.5f}; the adapter loaded by peft: {found:.5f}")
        torch.testing.assert_close(found, after, rtol=1e-4, atol=1e-4)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
