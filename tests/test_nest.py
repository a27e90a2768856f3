"""Nests: opened, named, walked and put together again, in one place for everybody."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from penstock.errors import PenstockError
from penstock.nest import Nesting, has_tensor, leaf_names, map_tensors, open_node


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Box:
    content: Any
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


class Cache:
    def __init__(self, *layers: Any) -> None:
        self.layers = list(layers)
        self.name = "cache"


class Listed(list):  # type: ignore[type-arg]
    tag = ""


def tensor(number: float) -> torch.Tensor:
    return torch.tensor(number)


@pytest.mark.parametrize(
    "value",
    [
        (1, [2, {"a": 3}]),
        {"a": tensor(1), 2: tensor(2)},
        OrderedDict(b=tensor(1), a=None),
        defaultdict(list, a=tensor(1)),
        Pair(tensor(1), "text"),
        Box([tensor(1)]),
        (),
        {},
    ],
    ids=str,
)
def test_taking_apart_and_putting_together_are_inverses(value: Any) -> None:
    leaves, nest = Nesting().flatten(value)
    again = Nesting().unflatten(nest, leaves)
    assert type(again) is type(value)
    assert repr(again) == repr(value)
    assert nest.num_leaves == len(leaves) == len(leaf_names(nest))
    assert Nesting().flatten(again)[1] == nest


def test_leaves_have_the_names_that_a_user_would_write() -> None:
    value = {"ids": tensor(1), "states": [tensor(2), Pair(tensor(3), 4)], "a b": Box(tensor(5))}
    assert leaf_names(Nesting().flatten(value)[1]) == ["ids", "states[0]", "states[1].left", "['a b'].content"]
    assert leaf_names(Nesting().flatten((tensor(1),))[1], "batch") == ["batch[0]"]


def test_outputs_of_transformers_are_named_by_their_keys() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    node = open_node(CausalLMOutput(loss=tensor(1), logits=tensor(2)))
    assert node is not None
    assert list(node.keys) == ["loss", "logits"]
    assert type(node.build([1, 2])) is CausalLMOutput


@pytest.mark.parametrize("value", [Listed([1, 2]), UserDict(a=1), Box(1)], ids=lambda v: type(v).__name__)
def test_another_one_is_a_copy_and_the_users_object_stays_as_it_is(value: Any) -> None:
    value.tag = "kept"
    node = open_node(value)
    assert node is not None
    before = list(node.children)
    made = node.build(["other"] * len(before))
    again, unchanged = open_node(made), open_node(value)
    assert again is not None
    assert unchanged is not None
    assert type(made) is type(value)
    assert made.tag == "kept"
    assert set(again.children) == {"other"}
    assert list(unchanged.children) == before


def test_a_dataclass_is_made_again_without_running_its_constructor() -> None:
    node = open_node(Box(7))
    assert node is not None
    assert node.build([8, 1]) == Box(8)


def test_tensors_are_found_and_mapped_inside_objects() -> None:
    cache = Cache({"keys": tensor(1)}, None)
    assert has_tensor(cache)
    doubled = map_tensors(lambda t: 2 * t, {"cache": cache, "n": 3})
    assert doubled["cache"].layers[0]["keys"] == 2
    assert cache.layers[0]["keys"] == 1
    assert not has_tensor(Cache(torch.nn.Linear(1, 1)))


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    assert not has_tensor(value)
    with pytest.raises(PenstockError, match="contains itself"):
        Nesting().flatten(value)
