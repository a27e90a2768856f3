"""Microbatches put together, and that this is the inverse of cutting."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch import (
    CustomReducer,
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    split_batch,
    split_target,
    sum_reducer,
)
from penstock.errors import MergeError, SplitError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    inside: Any
    label: str


def same(one, other):
    """Equal trees: types, keys, tensors."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Box):
        return one.label == other.label and same(one.inside, other.inside)
    return one == other


@st.composite
def leaves(draw, batch_size, num_microbatches):
    """A value and a spec for it."""
    kind = draw(st.sampled_from(["default", "dim", "replicate", "other size", "constant"]))
    if kind == "constant":
        return draw(st.sampled_from([None, 3, "word", True, 0.5])), None
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    if kind == "replicate":
        return torch.randn(shape), draw(st.sampled_from([Replicate, Replicate()]))
    if kind == "default":
        return torch.randn([batch_size, *shape]), None
    dim = draw(st.integers(0, len(shape)))
    size = batch_size if kind == "dim" else draw(st.integers(num_microbatches, 3 * batch_size))
    shape.insert(dim, size)
    return torch.randn(shape), TensorChunkSpec(dim - draw(st.sampled_from([0, len(shape)])))


@st.composite
def trees(draw, batch_size, num_microbatches, depth=2):
    kind = draw(st.sampled_from(["leaf", "tuple", "list", "dict", "pair", "box", "ordered"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves(batch_size, num_microbatches))
    count = {"pair": 2, "box": 1}.get(kind) or draw(st.integers(0, 3))
    parts = [draw(trees(batch_size, num_microbatches, depth - 1)) for _ in range(count)]
    values, specs = [value for value, _ in parts], [spec for _, spec in parts]
    keys = "abc"[:count]
    match kind:
        case "tuple":
            return tuple(values), tuple(specs)
        case "list":
            return values, specs
        case "dict":
            return dict(zip(keys, values, strict=True)), dict(zip(keys, specs, strict=True))
        case "ordered":
            return collections.OrderedDict(zip(keys, values, strict=True)), dict(zip(keys, specs, strict=True))
        case "pair":
            return Pair(*values), Pair(*specs)
    return Box(values[0], "label"), {"inside": specs[0]}


@st.composite
def batches(draw):
    num_microbatches = draw(st.integers(1, 5))
    batch_size = num_microbatches + draw(st.integers(0, 6))
    args = [draw(trees(batch_size, num_microbatches)) for _ in range(draw(st.integers(0, 2)))]
    kwargs = {name: draw(trees(batch_size, num_microbatches)) for name in draw(st.sampled_from(["", "x", "xy"]))}
    return num_microbatches, batch_size, args, kwargs


@settings(deadline=None, max_examples=200)
@given(batches())
def test_split_then_merge_is_nothing(batch):
    num_microbatches, batch_size, args, kwargs = batch
    args_spec = tuple(spec for _, spec in args)
    args = tuple(value for value, _ in args)
    kwargs_spec = {name: spec for name, (_, spec) in kwargs.items()}
    kwargs = {name: value for name, (value, _) in kwargs.items()}
    split_args, split_kwargs = split_batch(
        args, kwargs, num_microbatches, args_spec=args_spec, kwargs_spec=kwargs_spec, batch_size=batch_size
    )
    assert len(split_args) == len(split_kwargs) == num_microbatches
    assert same(merge_chunks(split_args, args_spec), args)
    assert same(merge_chunks(split_kwargs, kwargs_spec), kwargs)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(0, 9), st.lists(st.integers(0, 3), max_size=2))
def test_merge_then_split_is_nothing(num_microbatches, more, shape):
    whole = torch.randn([num_microbatches + more, *shape])
    parts = split_target(whole, num_microbatches)
    again = split_target(merge_chunks(parts), num_microbatches)
    assert all(map(same, parts, again))


def test_torch_style_calls():
    """As existing programs call it: positional specs, a spec for each value, tensors of several sizes."""
    args = (torch.randn(8, 3), torch.randn(16, 3))
    kwargs = {"x": torch.randn(8, 3), "y": torch.randn(32)}
    specs = TensorChunkSpec.from_tuple((0, 0)), TensorChunkSpec.from_dict({"x": 1, "y": 0})
    args_split, kwargs_split = split_args_kwargs_into_chunks(args, kwargs, 2, *specs)
    assert args_split[0][1].shape == (8, 3)
    assert kwargs_split[0]["x"].shape == (8, 2)
    assert same(merge_chunks(args_split, specs[0]), args)
    assert same(merge_chunks(kwargs_split, specs[1]), kwargs)


def test_outputs_of_several_kinds():
    chunks = [
        {"y": torch.full((rows, 2), float(rows)), "loss": torch.tensor(float(rows)), "n": rows, "k": "v", "none": None}
        for rows in (3, 2)
    ]
    merged = merge_chunks(chunks, {"n": sum_reducer})
    assert merged["y"].shape == (5, 2)
    assert merged["loss"].tolist() == [3.0, 2.0], "one entry for each microbatch"
    assert (merged["n"], merged["k"], merged["none"]) == (5, "v", None)
    assert merge_chunks(chunks, {"n": sum_reducer, "loss": sum_reducer})["loss"].item() == 5.0


def test_reducers():
    assert merge_chunks([2, 5, 3], CustomReducer(0, max)) == 5
    order = merge_chunks([1, 2, 3], CustomReducer((), lambda seen, value: (*seen, value)))
    assert order == (1, 2, 3)
    total = merge_chunks([torch.tensor(1.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)], sum_reducer)
    assert total.dtype == torch.float64
    assert total.item() == 3.5


def test_one_microbatch_is_the_output():
    y = torch.randn(3)
    assert merge_chunks([y]) is y
    assert merge_chunks([(y, 1)])[0] is y


def test_gradients_flow_through_a_merge():
    parts = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    (merge_chunks(parts) * torch.arange(3)).sum().backward()
    assert [part.grad.tolist() for part in parts] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("chunks", "spec", "says"),
    [
        ([], None, "no microbatches"),
        (
            [{"n": 1}, {"n": 2}],
            None,
            r"output\['n'\] is 1 in microbatch 0, but 2 in microbatch 1.*\{'n': CustomReducer",
        ),
        ([torch.zeros(2), torch.zeros(2) + 1], Replicate(), r"output is a tensor of shape \(2,\)"),
        (
            [(torch.zeros(2, 3),), (torch.zeros(2, 4),)],
            None,
            r"output\[0\]: microbatch 0 has shape \(2, 3\), microbatch 1",
        ),
        ([torch.tensor(1.0)] * 2, TensorChunkSpec(0), "output has no dimension.*output_merge_spec=sum_reducer"),
        ([torch.zeros(2), None], None, "output is a tensor in microbatch 0, but None in microbatch 1"),
        ([{"a": 1}, {"b": 1}], None, r"output has \['a'\] in microbatch 0, but \['b'\] in microbatch 1"),
        ([[1], 1], None, r"output has \[0\] in microbatch 0, but int in microbatch 1"),
        ([torch.zeros(2)] * 2, (TensorChunkSpec(0),), "the spec for output is .* but output is a Tensor"),
    ],
)
def test_what_cannot_be_merged(chunks, spec, says):
    with pytest.raises(MergeError, match=says) as caught:
        merge_chunks(chunks, spec)
    assert isinstance(caught.value, AssertionError | ValueError)


def test_a_dimension_that_is_not_there():
    with pytest.raises(SplitError, match=r"shape \(2,\) has no dimension 3"):
        merge_chunks([torch.zeros(2), torch.zeros(2)], TensorChunkSpec(3))
    with pytest.raises(SplitError, match=r"the spec for output is \(None,\)"):
        merge_chunks([(1, 2), (1, 2)], (None,))


class Cache:
    """An object that nobody registered, as models return to go on from where they were."""

    def __init__(self, rows: int, start: float = 0.0) -> None:
        self.layers = [torch.full((rows, 2), start), {"value": torch.arange(rows) + start}]
        self.length = 3


def test_objects_that_keep_tensors_are_opened():
    one, other = Cache(2), Cache(3, 1.0)
    merged = merge_chunks([{"cache": one}, {"cache": other}])["cache"]
    assert type(merged) is Cache
    assert merged.layers[0].shape == (5, 2)
    assert merged.layers[1]["value"].tolist() == [0, 1, 1, 2, 3]
    assert merged.length == 3
    assert one.layers[0].shape == (2, 2)  # the microbatches' own are left alone
    last = CustomReducer(None, lambda _, cache: cache)
    assert merge_chunks([{"cache": one}, {"cache": other}], {"cache": last})["cache"] is other
    other.length = 4
    with pytest.raises(MergeError, match=r"cache'\]\.length is 3 in microbatch 0, but 4"):
        merge_chunks([{"cache": one}, {"cache": other}])
