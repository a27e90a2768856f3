"""Weights under other names than the model's: transformers renames and puts together what older files have, and so does this.

weights = as_the_model_names_them("mixtral/", model)
weights["model.layers.0.mlp.experts.gate_up_proj"]       # made of the experts' matrices, which stand in the file one by one

transformers says what becomes of which name, and does the arithmetic. Only what one tensor of the model is made of is read
for it, so that here, too, no rank ever holds more than its own stages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from penstock.checkpoint.weight_files import Source, open_weights
from penstock.errors import CaptureError
from penstock.nest import Value


def as_the_model_names_them(source: Source, model: nn.Module) -> Source:
    """What `weights=` was given, or the same under the model's names if transformers would convert it while loading."""
    if isinstance(source, Mapping):
        return source
    given = open_weights(source)
    names = set(model.state_dict())
    if names <= set(given) or not hasattr(model, "base_model_prefix"):
        return source
    return NamedWeights(given, _converted(given, model), model)


def as_peft_names_them(source: Source, model: nn.Module) -> Source:
    """Weights of a base model under the names that they have inside a peft model."""
    given, made_of = open_weights(source), {}
    for name in model.state_dict():
        base = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if base in given:
            made_of[name] = _MadeOf(name, None, [(base, "")])
    return NamedWeights(given, made_of, model)


@dataclass
class _MadeOf:
    """What tensors of the model are made of."""

    first: str  # of their names
    converter: Value  # a WeightConverter of transformers; None: one tensor, under another name
    parts: list[tuple[str, str]] = field(default_factory=list)  # names in the file, and the pattern that each fits


def _converted(given: Mapping[str, Tensor], model: Value) -> dict[str, _MadeOf]:
    """By the rules that transformers has for this model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    state, prefix = model.state_dict(), model.base_model_prefix
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings: list[Value] = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    made_of: dict[str, _MadeOf] = {}
    for name in sorted(given, key=dot_natural_key):
        found, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if found not in state and name in state:
            found, pattern = name, None
        if pattern is None:
            made_of[found] = _MadeOf(found, None, [(name, "")])
            continue
        rule = by_pattern[pattern]
        recipe = made_of.setdefault(found, _MadeOf(found, rule))
        recipe.parts.append((name, pattern))
        for target in rule.target_patterns[1:]:
            made_of[found.replace(rule.target_patterns[0], target)] = recipe
    return made_of


@dataclass(frozen=True)
class NamedWeights(Mapping[str, Tensor]):
    """Weights under the model's names, each made when it is asked for."""

    given: Mapping[str, Tensor]
    made_of: Mapping[str, _MadeOf]
    model: Value

    def __getitem__(self, name: str) -> Tensor:
        recipe = self.made_of[name]
        if recipe.converter is None:
            return self.given[recipe.parts[0][0]]
        converter = copy.deepcopy(recipe.converter)
        for part, pattern in recipe.parts:
            converter.add_tensor(recipe.first, part, pattern, self.given[part])
        made = converter.convert(recipe.first, model=self.model, config=self.model.config)
        if name not in made:
            raise CaptureError(
                f"transformers makes {', '.join(made)} of {recipe.parts[0][0]}, and not {name}; load the model with "
                "transformers and give the model"
            )
        found: Tensor = made[name][0] if isinstance(made[name], list) else made[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.made_of)

    def __len__(self) -> int:
        return len(self.made_of)

    def __contains__(self, name: object) -> bool:
        return name in self.made_of
