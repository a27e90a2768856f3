"""Adapters of peft on a pipelined model: each rank holds those of its own stages, and one folder is written that peft loads.

model = get_peft_model(AutoModelForCausalLM.from_pretrained("llama/"), LoraConfig(...))
pipe = pipeline(model, batch)
...
pipe.save_pretrained("adapter/")
PeftModel.from_pretrained(base, "adapter/")                     # without penstock
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.checkpoint.weight_files import open_weights
from penstock.errors import RunError
from penstock.front.publish import write_tensors
from penstock.front.spread import gather_on_first
from penstock.integrations.needs import needed
from penstock.nest import Value
from penstock.stage.dtensors import whole_tensor

if TYPE_CHECKING:
    from penstock.integrations.transformers import TransformersPipeline


_IN_CACHE = "gives its tokens to the layers in a cache, which does not travel between stages. Take PromptTuningConfig"
_REFUSED = {
    "ADALORA": "adds a term of all its matrices to each loss, and spreads its ranks by the gradients of the whole model, which "
    "no rank of a pipeline has. Take LoraConfig, with rank_pattern= for layers of other ranks",
    "VERA": "saves matrices that every layer shares, and none trains. Write VeraConfig(..., save_projection=False)",
    "PREFIX_TUNING": _IN_CACHE,
    "CARTRIDGE": _IN_CACHE,
}


def is_adapted(model: object) -> bool:
    """Whether peft is around the model."""
    return isinstance(model, nn.Module) and hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Value) -> Value:
    """The model without what peft has put around it."""
    return model.get_base_model() if is_adapted(model) else model


def puts_prompt_first(model: Value) -> bool:
    """Whether the adapter is tokens that are learnt, put before those of each row; others than these change layers."""
    config = model.active_peft_config
    return bool(config.is_prompt_learning) and str(config.peft_type.value) not in _REFUSED


def refuse_adapter(model: nn.Module) -> None:
    """Adapters whose training asks for the whole model, or adds to the loss of each microbatch."""
    if not is_adapted(model):
        return
    shell: Value = model
    if len(shell.active_adapters) != 1:
        raise RunError(
            f"the adapters {', '.join(shell.active_adapters)} are active at once; a pipeline trains and saves one. Write "
            "model.set_adapter(name) first, and merge the others"
        )
    config = shell.active_peft_config
    kind = str(config.peft_type.value)
    if kind in _REFUSED and (kind != "VERA" or config.save_projection):
        raise RunError(f"{type(config).__name__} {_REFUSED[kind]}")


def save_adapter(folder: str | Path, pipe: TransformersPipeline) -> None:
    """Write adapter_model.safetensors and adapter_config.json. All ranks call it; adapters are small, and rank 0 writes."""
    peft = needed("peft", "hf")
    place = Path(folder)
    shell: Value = pipe.shell
    (name,) = shell.active_adapters
    names = {id(value): key for key, value in shell.named_parameters()}  # those of the user's model
    held = [(names.get(id(value), key), value) for key, value in pipe.tensors.counted() if value.requires_grad]
    parts = gather_on_first(pipe.transport, {key: whole_tensor(value.detach()) for key, value in held})

    def write() -> str:
        trained = {key: value for part in parts for key, value in part.items()}
        whole = peft.get_peft_model_state_dict(shell, state_dict=trained, adapter_name=name)  # asks for all of it
        place.mkdir(parents=True, exist_ok=True)
        write_tensors(place / "adapter_model.safetensors", whole)
        config = copy.deepcopy(shell.peft_config[name])
        config.inference_mode = True
        config.save_pretrained(str(place))
        return str(place)

    pipe.ranks.broadcast(f"writing the adapter to {place}", write)


def adapter_weights(folder: str | Path, pipe: TransformersPipeline) -> dict[str, Tensor]:
    """What a folder of peft has for this rank, under the names of the pipeline's model."""
    peft = needed("peft", "hf")
    shell: Value = pipe.shell
    given = open_weights(Path(folder) / "adapter_model.safetensors")
    (adapter,) = shell.active_adapters
    named = {name: torch.empty(0) for name in shell.state_dict()}  # peft says under which name it saves each of them
    saved = peft.get_peft_model_state_dict(shell, named, adapter, save_embedding_layers=False)
    names = {id(value): name for name, value in named.items()}
    held = {names[id(value)]: key for key, value in saved.items() if names.get(id(value)) in pipe.tensors.state}
    if missing := [key for key in held.values() if key not in given]:
        raise RunError(f"{folder} has no value for {missing[0]}; expected what this adapter was saved as")
    return {name: given[key] for name, key in held.items()}
