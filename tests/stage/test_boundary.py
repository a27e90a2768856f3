"""flatten and unflatten are inverses, and a spec survives JSON."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import StageError
from penstock.stage.boundary import SINGLE, Spec, flatten, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Box:
    content: Any
    label: str = "box"
    later: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    content: Any


class Registered:
    def __init__(self, content: Any, name: str) -> None:
        self.content, self.name = content, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and (self.content, self.name) == (other.content, other.name)

    __hash__ = None  # type: ignore[assignment]


pytree.register_pytree_node(
    Registered,
    lambda value: ([value.content], value.name),
    lambda children, name: Registered(*children, name),
    serialized_type_name="tests.Registered",
)


class Colour(Enum):
    RED = 1


class Odd:
    pass


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down; tensors by identity."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Box | Frozen | Registered):
        return all(same(getattr(a, name), getattr(b, name)) for name in {*vars(a), *vars(b)})
    return bool(a == b) or (a != a and b != b)


constants = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
    | st.sampled_from([torch.float32, torch.device("cpu"), Colour.RED, Ellipsis, 2j, slice(1, None, 2)])
)  # fmt: skip
keys = st.text(max_size=3) | st.integers() | st.booleans()
values = st.recursive(
    constants | st.builds(lambda: torch.zeros(1)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Box, inner)
        | st.builds(Frozen, inner)
        | st.builds(Registered, inner, st.text(max_size=3))
    ),
    max_leaves=8,
)


@given(values)
def test_flatten_and_unflatten_are_inverses_also_over_json(value: Any) -> None:
    leaves, spec = flatten(value)
    assert spec.num_leaves == len(leaves)
    assert same(unflatten(spec, leaves), value)
    again = Spec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert same(unflatten(again, leaves), value)
    assert flatten(value)[1] == spec


def test_a_lone_tensor_takes_the_short_way() -> None:
    x = torch.ones(1)
    leaves, spec = flatten(x)
    assert spec is SINGLE
    assert unflatten(spec, leaves) is x
    assert Spec.from_json(spec.to_json()) is SINGLE


def test_specs_tell_constants_apart() -> None:
    specs = [flatten((value,))[1] for value in (1, 1.0, True, "1", None, 0.0, -0.0, b"1", 1j)]
    assert len(set(specs)) == len(specs)


def test_fields_that_the_constructor_does_not_take_are_kept() -> None:
    box = Box(torch.ones(1))
    box.later = 3
    leaves, spec = flatten(box)
    assert unflatten(spec, leaves).later == 3


def test_outputs_of_transformers_keep_their_class() -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    value = BaseModelOutputWithPast(last_hidden_state=torch.ones(1), hidden_states=(torch.ones(2), torch.ones(3)))
    leaves, spec = flatten(value)
    back = unflatten(Spec.from_json(json.loads(json.dumps(spec.to_json()))), leaves)
    assert type(back) is BaseModelOutputWithPast
    assert back.last_hidden_state is value.last_hidden_state
    assert list(back) == list(value)
    assert back.attentions is None


def test_an_unknown_type_is_named_with_its_place() -> None:
    with pytest.raises(StageError, match=r"value\['a'\]\[1\]\.content is a .*Odd, which cannot cross"):
        flatten({"a": [1, Box(Odd())]})
    with pytest.raises(StageError, match=r"a key of value is a .*Odd"):
        flatten({Odd(): 1})


def test_a_class_that_cannot_be_imported_is_an_error() -> None:
    @dataclass
    class Local:
        x: int

    with pytest.raises(StageError, match="defined inside a function"):
        flatten(Local(1))
    with pytest.raises(StageError, match="cannot be imported here"):
        Spec.from_json(["dataclass", ["no_such_module:Thing", []], []])


@pytest.mark.parametrize(
    "value",
    [
        ["dataclass", ["os:system", []], []],
        ["named", ["collections:OrderedDict", []], []],
        ["dataclass", [f"{__name__}:Box", ["content"]], ["tensor"]],
        ["registered", ["subprocess:Popen", ["plain", None]], []],
        ["nonsense", None, []],
        {"a": 1},
        ["tuple", {"x": 1}, []],
    ],
)
def test_what_another_rank_sends_is_checked(value: Any) -> None:
    with pytest.raises(StageError):
        Spec.from_json(value)


def test_the_number_of_tensors_must_fit() -> None:
    _, spec = flatten((torch.ones(1), 2))
    with pytest.raises(StageError, match="1 tensors cannot be made of 2"):
        unflatten(spec, [torch.ones(1)] * 2)
