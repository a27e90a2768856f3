"""A transformers model without its memory: made on the meta device, cut as its config says, and given values stage by stage.

model, weights = found("llama/")            # a folder with config.json and safetensors
fill = module_values(model, seed=0)         # what the files do not have: as the model itself would set it
"""

from __future__ import annotations

import copy
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.balance import LayerCost, Profile, balance
from penstock.capture import SplitPoint
from penstock.checkpoint import weight_files
from penstock.errors import CaptureError
from penstock.integrations.adapters import base_of
from penstock.integrations.needs import needed
from penstock.nest import Value

_RANDOM = threading.Lock()  # ranks may be threads, and torch has one random state for all
Source = nn.Module | type[nn.Module] | str | Path


def found(source: Source, config: Value) -> tuple[nn.Module, str | Path | None]:
    """The model, on the meta device unless it was given with values, and the folder of its weights."""
    transformers = needed("transformers", "hf")
    if isinstance(source, nn.Module):
        return source, None
    kind: Value = source
    folder = source if isinstance(source, str | Path) and (Path(source) / "config.json").is_file() else None
    if folder is not None:
        config = config or transformers.AutoConfig.from_pretrained(folder)
        name = (config.architectures or [""])[0]
        kind = getattr(transformers, name, None)
        if kind is None:
            raise CaptureError(
                f"{folder}/config.json names the architecture {name!r}, which transformers does not have"
            )
    # AutoModelForCausalLM and its like have the first.
    make = getattr(kind, "from_config", None) or getattr(kind, "_from_config", None)
    if make is None:
        raise CaptureError(
            f"pipeline({source!r}, ...): expected a model, a class of transformers with config=, or a folder with "
            "config.json and safetensors"
        )
    if config is None:
        raise CaptureError(f"pipeline({kind.__name__}, ...) without config=; which sizes has the model?")
    with torch.device("meta"):
        return make(config, dtype=getattr(config, "dtype", None) or torch.float32), folder


def on_meta(model: nn.Module) -> nn.Module:
    """A copy that has no memory: the same class, names, ties and config."""
    parameters = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    buffers = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, {**parameters, **buffers})  # it takes these as the copies that it has made already


def is_of_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers, or one with adapters of peft; neither has to be installed to ask."""
    return any(kind.__module__.startswith("transformers.") for kind in type(base_of(model)).__mro__)


def module_values(model: nn.Module, seed: int, *, only_missing: bool = False) -> Callable[[str, Tensor], None]:
    """Sets a tensor as the module that owns it would be initialised: `init=module_values(model, seed)`.

    One module at a time has memory. The random numbers of a module depend on the seed and on its name alone, so that
    any number of stages starts with the same values. With `only_missing`, there are files, and a parameter that they should
    have is not made up.
    """
    shell = on_meta(model)
    not_made_up = set(model.state_dict()) if only_missing else set[str]()
    made: dict[str, nn.Module] = {}  # the last module: its weight and its bias come one after another

    def fill(name: str, tensor: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        if name in not_made_up and not _is_adapter(owner):
            raise CaptureError(
                f"the weights have no value for {name}; give init=lambda name, tensor: ... for what is to be set otherwise, or "
                "load the model with transformers and give the model"
            )
        if owner not in made:
            made.clear()
            made[owner] = _initialised(shell, owner, seed)
        tensor.copy_(getattr(made[owner], leaf))

    return fill


def _initialised(shell: nn.Module, owner: str, seed: int) -> nn.Module:
    """A copy of one module without its children, with values."""
    module = shell.get_submodule(owner)
    alone = copy.copy(module)
    alone._modules, alone._parameters, alone._buffers = {}, dict(module._parameters), dict(module._buffers)
    alone.to_empty(device="cpu", recurse=False).requires_grad_(False)
    with _RANDOM, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed ^ zlib.crc32(owner.encode()))
        if not _is_adapter(owner):
            _initialiser(shell, owner)(alone)
        else:  # as peft starts it: its two matrices together are nothing
            for parameter in alone.parameters():
                nn.init.kaiming_uniform_(parameter, a=5**0.5) if ".lora_A." in f"{owner}." else parameter.zero_()
    return alone


def _initialiser(shell: Value, owner: str) -> Callable[[nn.Module], object]:
    """The initialiser of the innermost model around a module; models may be made of models."""
    places = owner.split(".") if owner else []
    around = (shell.get_submodule(".".join(places[:depth])) for depth in range(len(places), -1, -1))
    models: list[Callable[[nn.Module], object]] = [p._init_weights for p in around if hasattr(p, "_init_weights")]
    if not models:
        raise CaptureError(f"nothing says how to initialise {owner}; give weights= or init=lambda name, tensor: ...")
    return models[0]


def _is_adapter(owner: str) -> bool:
    return ".lora_A." in f"{owner}." or ".lora_B." in f"{owner}."


def cuts_of_plan(model: nn.Module, num_stages: int) -> dict[str, SplitPoint] | None:
    """Where a transformers model says that it can be cut: `base_model_pp_plan` of its config.

    The plan lists the children of the base model in the order in which they run; the one that is a list has the layers. They
    are spread over the stages by the size of their matrices, and what stands after them counts with the last.

    `split_spec` for this number of stages; None if the config has no plan, or too few layers.

    cuts_of_plan(llama, 2)  # {"model.layers.2": SplitPoint.BEGINNING}
    """
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or ()
    held = ((path, part) for path, part in model.named_modules() if plan and all(hasattr(part, name) for name in plan))
    prefix, base = next(held, ("", None))
    name = next((name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)), None)
    layers = getattr(base, name) if name is not None else ()
    if len(layers) < num_stages:
        return None
    work = [_work(layer) for layer in layers]
    work[-1] += max(_work(model) - sum(work), 0)  # the last one has the head
    path = f"{prefix}.{name}".strip(".")
    costs = [LayerCost(f"{path}.{index}", forward=float(weight)) for index, weight in enumerate(work)]
    return dict.fromkeys(balance(Profile(tuple(costs)), num_stages).names, SplitPoint.BEGINNING)


def _work(module: nn.Module) -> int:
    """Numbers in matrices that are multiplied; looking up a row of an embedding is no work, unless a head shares it."""
    used: dict[int, nn.Parameter] = {}
    for part in module.modules():
        if not isinstance(part, nn.Embedding):
            used |= {id(p): p for p in part.parameters(recurse=False)}
    return sum(p.numel() for p in used.values())


def as_the_model_names_them(source: weight_files.Source, model: nn.Module) -> weight_files.Source:
    """What `weights=` was given, or the same under the model's names if transformers would convert it while loading.

        weights = as_the_model_names_them("mixtral/", model)
        weights["model.layers.0.mlp.experts.gate_up_proj"]  # made of the experts' matrices, which stand in the file one by one

    transformers renames and puts together what older files have: it says what becomes of which name, and does the arithmetic.
    Only what one tensor of the model is made of is read for it, so that here, too, no rank ever holds more than its own stages.
    """
    if isinstance(source, Mapping):
        return source
    given = weight_files.open_weights(source)
    names = set(model.state_dict())
    if names <= set(given) or not hasattr(model, "base_model_prefix"):
        return source
    makers = _converted(given, model)
    return weight_files.Weights(makers, lambda name: makers[name]())


def as_peft_names_them(source: weight_files.Source, model: nn.Module) -> weight_files.Source:
    """Weights of a base model under the names that they have inside a peft model."""
    given = weight_files.open_weights(source)
    bases = {name: name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in model.state_dict()}
    known = {name: base for name, base in bases.items() if base in given}
    return weight_files.Weights(known, lambda name: given[known[name]])


def _converted(given: Mapping[str, Tensor], model: Value) -> dict[str, Callable[[], Tensor]]:
    """What makes each tensor of the model, by the rules that transformers has for this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    state, prefix = model.state_dict(), model.base_model_prefix
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings: list[Value] = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    parts: dict[str, list[tuple[str, str]]] = {}  # names in the file, and the pattern that each fits
    makers: dict[str, Callable[[], Tensor]] = {}

    def converted(name: str, first: str, rule: Value) -> Tensor:
        converter = copy.deepcopy(rule)
        for part, pattern in parts[first]:
            converter.add_tensor(first, part, pattern, given[part])
        made = converter.convert(first, model=model, config=model.config)
        if name not in made:
            raise CaptureError(
                f"transformers makes {', '.join(made)} of {parts[first][0][0]}, and not {name}; load the model with "
                "transformers and give the model"
            )
        found: Tensor = made[name][0] if isinstance(made[name], list) else made[name]
        return found

    for name in sorted(given, key=dot_natural_key):
        found, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if found not in state and name in state:
            found, pattern = name, None
        if pattern is None:
            makers[found] = partial(given.__getitem__, name)
            continue
        parts.setdefault(found, []).append((name, pattern))
        rule = by_pattern[pattern]
        for target in rule.target_patterns:
            one = found.replace(rule.target_patterns[0], target)
            makers[one] = partial(converted, one, found, rule)
    return makers
