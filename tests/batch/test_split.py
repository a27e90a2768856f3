"""A batch into microbatches: what is cut, what is handed on whole, what is refused, and what the refusal says."""

from __future__ import annotations

import collections
import dataclasses
import gc
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from penstock.batch import (
    Microbatches,
    Replicate,
    TensorChunkSpec,
    batch_size_of,
    split_args_kwargs_into_chunks,
    split_batch,
    split_target,
    split_tensor,
    sum_reducer,
)
from penstock.errors import PenstockError, SplitError


class Pair(NamedTuple):
    rows: Any
    offsets: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    rows: torch.Tensor
    name: str = "x"


@dataclasses.dataclass
class Counted:
    rows: torch.Tensor
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.made += 1


class Opaque:
    def __init__(self, rows):
        self.rows = rows


class Registered:
    def __init__(self, rows, label):
        self.rows = rows
        self.label = label


pytree.register_pytree_node(
    Registered,
    lambda value: ([value.rows], value.label),
    lambda children, label: Registered(children[0], label),
)


def rows_of(pieces):
    return [piece.tolist() for piece in pieces]


def test_the_common_case():
    x = torch.arange(7)
    args, kwargs = split_batch((x,), {}, 3)
    assert rows_of(arg for (arg,) in args) == [[0, 1, 2], [3, 4], [5, 6]]
    assert kwargs == [{}, {}, {}]
    kwargs[0]["mine"] = 1
    assert kwargs[1] == {}, "each microbatch has a dict of its own"
    assert all(arg.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for (arg,) in args), "no copies"


def test_the_common_case_walks_no_tree():
    called = []

    def profile(frame, event, _):
        if event == "call":
            called.append(frame.f_code.co_name)

    x = torch.arange(64)
    split_batch((x,), {}, 32)
    gc.disable()  # hypothesis has it call a function
    sys.setprofile(profile)
    try:
        split_batch((x,), {}, 32)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert set(called) <= {"split_batch", "<listcomp>", "profile", "microbatch_sizes"}


def test_the_short_way_and_the_long_way_agree():
    for x in (torch.randn(7, 2), torch.randn(7, 2, requires_grad=True)):
        short, _ = split_batch((x,), {}, 3)
        long, _ = split_batch((x,), {}, 3, batch_size=7)
        for (one,), (other,) in zip(short, long, strict=True):
            assert torch.equal(one, other)
            assert one.requires_grad == other.requires_grad == x.requires_grad
            assert one.data_ptr() == other.data_ptr()


def test_constants_go_to_every_microbatch():
    marker = object()
    args, kwargs = split_batch((torch.arange(4), 3, None), {"flag": True, "name": "a", "other": marker}, 2)
    assert args[1][1:] == (3, None)
    assert kwargs[1] == {"flag": True, "name": "a", "other": marker}


def test_no_tensor_at_all():
    assert split_batch((1,), {"a": "b"}, 2) == ([(1,), (1,)], [{"a": "b"}, {"a": "b"}])
    assert split_batch((), None, 2) == ([(), ()], [{}, {}])


def test_every_kind_of_container():
    user_dict = collections.UserDict(ids=torch.arange(4), name="u")
    values = {
        "list": [torch.arange(4), [torch.arange(4)]],
        "ordered": collections.OrderedDict(a=torch.arange(4)),
        "default": collections.defaultdict(list, a=torch.arange(4)),
        "user": user_dict,
        "proxy": types.MappingProxyType({"a": torch.arange(4)}),
        "pair": Pair(torch.arange(4), None),
        "frozen": Frozen(torch.arange(4)),
        "registered": Registered(torch.arange(4), "label"),
        "returned": torch.stack([torch.arange(4), torch.arange(4)]).max(0),
    }
    _, (first, second) = split_batch((torch.zeros(4),), values, 2)
    assert first["list"][1][0].tolist() == [0, 1]
    assert isinstance(second["ordered"], collections.OrderedDict)
    assert second["ordered"]["a"].tolist() == [2, 3]
    assert second["default"].default_factory is list
    assert isinstance(second["user"], collections.UserDict)
    assert (second["user"]["ids"].tolist(), second["user"]["name"]) == ([2, 3], "u")
    assert second["proxy"]["a"].tolist() == [2, 3]
    assert isinstance(second["pair"], Pair)
    assert (second["pair"].rows.tolist(), second["pair"].offsets) == ([2, 3], None)
    assert isinstance(second["frozen"], Frozen)
    assert second["frozen"].rows.tolist() == [2, 3]
    assert (second["registered"].rows.tolist(), second["registered"].label) == ([2, 3], "label")
    assert second["returned"].values.tolist() == [2, 3]
    assert user_dict["ids"].tolist() == [0, 1, 2, 3], "the user's own objects stay as they are"
    assert values["frozen"].rows.tolist() == [0, 1, 2, 3]
    assert values["default"]["a"].tolist() == [0, 1, 2, 3]


def test_list_tuple_and_dict_kin():
    class Rows(list):
        pass

    class Both(tuple):
        __slots__ = ()

    class Named(dict):
        pass

    rows = Rows([torch.arange(4)])
    rows.note = "kept"
    named = Named(a=torch.arange(4))
    (_, (one, both, by_name)), _ = split_batch((rows, Both([torch.arange(4), 1]), named), {}, 2)
    assert (type(one), one.note, one[0].tolist()) == (Rows, "kept", [2, 3])
    assert (type(both), both[0].tolist(), both[1]) == (Both, [2, 3], 1)
    assert (type(by_name), by_name["a"].tolist()) == (Named, [2, 3])
    assert rows[0].tolist() == named["a"].tolist() == [0, 1, 2, 3]


def test_a_dataclass_is_not_made_again():
    value = Counted(torch.arange(4))
    parts = split_target(value, 2)
    assert [(part.rows.tolist(), part.made) for part in parts] == [([0, 1], 1), ([2, 3], 1)]
    assert value.rows.tolist() == [0, 1, 2, 3]


def test_an_object_without_tensors_is_handed_on_as_it_is():
    @dataclasses.dataclass
    class Config:
        layers: list

    config = Config([1, 2])
    args, _ = split_batch((torch.zeros(4), config), {}, 2)
    assert args[0][1] is args[1][1] is config


def test_specs_stand_where_their_values_stand():
    x, table, mask = torch.arange(4), torch.arange(6), torch.arange(8).view(2, 4)
    args, kwargs = split_batch(
        (x, {"table": table, "rows": x}),
        {"mask": mask, "other": x},
        2,
        args_spec=(None, {"table": Replicate}),
        kwargs_spec={"mask": TensorChunkSpec(-1)},
    )
    assert args[1][1]["table"] is table
    assert args[1][1]["rows"].tolist() == [2, 3]
    assert kwargs[1]["mask"].tolist() == [[2, 3], [6, 7]]
    assert kwargs[1]["other"].tolist() == [2, 3]


def test_a_spec_holds_for_everything_below_it():
    tables = {"a": torch.zeros(3), "b": [torch.zeros(()), 1]}
    args, _ = split_batch((torch.zeros(4, 2), tables), {}, 2, args_spec=(TensorChunkSpec(0), Replicate()))
    assert args[1][1]["b"][0] is tables["b"][0]
    columns = (torch.zeros(2, 4), [torch.zeros(3, 4), 5, None])
    args, _ = split_batch(columns, {}, 2, args_spec=TensorChunkSpec(1))
    assert args[1][0].shape == (2, 2)
    assert args[1][1][0].shape == (3, 2)
    assert args[1][1][1:] == [5, None]


def test_specs_for_fields():
    value = Pair(torch.arange(4), torch.arange(5))
    for spec in ({"offsets": Replicate()}, Pair(None, Replicate()), (None, Replicate())):
        parts = split_target(value, 2, target_spec=spec)
        assert parts[1].rows.tolist() == [2, 3]
        assert parts[1].offsets is value.offsets
    whole = Frozen(torch.arange(4))
    assert split_target(whole, 2, target_spec=Frozen(Replicate(), None))[0].rows is whole.rows


def test_an_explicit_spec_needs_no_batch_size_and_keeps_rows_together():
    tokens = torch.arange(10)
    args, _ = split_batch((torch.arange(5), tokens), {}, 2, args_spec=TensorChunkSpec.from_tuple((0, 0)))
    assert [len(rows) for rows, _ in args] == [3, 2]
    assert [len(tokens) for _, tokens in args] == [6, 4], "two tokens for each row, in every microbatch"
    args, _ = split_batch((torch.arange(4), torch.arange(6)), {}, 2, args_spec=TensorChunkSpec.from_tuple((0, 0)))
    assert [len(other) for _, other in args] == [3, 3]


def test_the_batch_size_can_be_given():
    table = torch.zeros(6, 2)
    with pytest.raises(SplitError, match=r"args\[0\] has shape \(6, 2\).*not the batch size 4\."):
        split_batch((table, torch.zeros(4)), {}, 2, batch_size=4)
    args, _ = split_batch((table, torch.zeros(4)), {}, 2, batch_size=4, args_spec=(Replicate(), None))
    assert args[0][0] is table


def test_who_shows_the_batch_size():
    assert batch_size_of((torch.tensor(1.0), torch.zeros(3, 4)), {"x": torch.zeros(5)}) == 3
    assert batch_size_of((torch.zeros(3, 4), torch.zeros(5)), args_spec=(Replicate(), None)) == 5
    assert batch_size_of((torch.zeros(3, 4),), args_spec=(TensorChunkSpec(-1),)) == 4
    assert batch_size_of((1, None), {"x": torch.zeros(5)}) == 5
    assert batch_size_of((1,)) is None


REFUSED = [
    (
        (torch.zeros(8, 3), torch.zeros(16, 3)),
        {},
        (
            "args[1] has shape (16, 3), and its dimension 0 is not the batch size 8 (dimension 0 of args[0], shape "
            "(8, 3)). "
            "To hand it to every microbatch whole, write args_chunk_spec=(None, Replicate()); "
            "to cut it along dimension 0, write args_chunk_spec=(None, TensorChunkSpec(0))"
        ),
    ),
    (
        (torch.zeros(8, 3),),
        {"mask": torch.zeros(1, 8)},
        (
            "kwargs['mask'] has shape (1, 8), and its dimension 0 is not the batch size 8 (dimension 0 of args[0], "
            "shape (8, 3)). To hand it to every microbatch whole, write kwargs_chunk_spec={'mask': Replicate()}; "
            "to cut it along dimension 1, write kwargs_chunk_spec={'mask': TensorChunkSpec(1)}"
        ),
    ),
    (
        (Pair(torch.zeros(8, 3), torch.zeros(9)),),
        {},
        (
            "args[0].offsets has shape (9,), and its dimension 0 is not the batch size 8 (dimension 0 of args[0].rows, "
            "shape (8, 3)). To hand it to every microbatch whole, write args_chunk_spec=({'offsets': Replicate()},); "
            "to cut it along dimension 0, write args_chunk_spec=({'offsets': TensorChunkSpec(0)},)"
        ),
    ),
    (
        (torch.zeros(8, 3),),
        {"a": {"b": [1, torch.tensor(2.0)]}},
        (
            "kwargs['a']['b'][1] has shape (), and it has no dimension that could be the batch size 8 (dimension 0 of "
            "args[0], shape (8, 3)). To hand it to every microbatch whole, write "
            "kwargs_chunk_spec={'a': {'b': (None, Replicate())}}"
        ),
    ),
    (
        (torch.tensor(2.0),),
        {},
        (
            "args[0] has shape (), and no tensor shows a batch size. To hand it to every microbatch whole, write "
            "args_chunk_spec=(Replicate(),)"
        ),
    ),
    (
        (torch.zeros(3, 5), 1),
        {},
        (
            "the batch size 3 (dimension 0 of args[0], shape (3, 5)) is smaller than the number of microbatches, 4: "
            "use at most 3 microbatches, or a larger batch. If args[0] is no batch, write "
            "args_chunk_spec=(Replicate(), None)"
        ),
    ),
]


@pytest.mark.parametrize(("args", "kwargs", "text"), REFUSED)
def test_what_is_refused_and_what_to_write(args, kwargs, text):
    for split in (split_batch, split_args_kwargs_into_chunks):
        with pytest.raises(SplitError) as caught:
            split(args, kwargs, 4)
        assert str(caught.value) == text
        assert isinstance(caught.value, PenstockError)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("args", "kwargs", "text"), REFUSED[:5])
def test_what_the_error_says_to_write_works(args, kwargs, text):
    for written in text.split("write ")[1:]:
        name, spec = written.split("; ")[0].split("=", 1)
        specs = {name: eval(spec, {"Replicate": Replicate, "TensorChunkSpec": TensorChunkSpec})}
        split_args_kwargs_into_chunks(args, kwargs, 4, **specs)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"args_chunk_spec": (None,)}, r"the spec for args is \(None,\).*\[0, 1\]"),
        (
            {"args_chunk_spec": (TensorChunkSpec(2), None)},
            r"args\[0\]: .*\(4, 2\) has no dimension 2.*Spec\(2\)",
        ),
        ({"args_chunk_spec": (None, TensorChunkSpec(0))}, r"args\[1\] is a int.*write args_chunk_spec=\(None, None\)"),
        ({"args_chunk_spec": (None, "rows")}, r"the spec for args\[1\] is 'rows'"),
        ({"args_chunk_spec": (sum_reducer, None)}, r"the spec for args\[0\] is CustomReducer"),
        (
            {"kwargs_chunk_spec": {"mask": None, "masc": None}},
            r"kwargs_chunk_spec has .*\['masc'\].*\['mask'\]",
        ),
        ({"args_chunk_spec": ((None, None), None)}, r"the spec for args\[0\] is \(None, None\)"),
    ],
)
def test_specs_that_do_not_fit(spec, says):
    with pytest.raises(SplitError, match=says):
        split_args_kwargs_into_chunks((torch.zeros(4, 2), 1), {"mask": torch.zeros(4)}, 2, **spec)


def test_a_spec_for_something_left_out():
    _, kwargs = split_batch((torch.zeros(4),), {"mask": None}, 2, kwargs_spec={"mask": TensorChunkSpec(0)})
    assert kwargs[1] == {"mask": None}


def test_too_small_for_its_own_spec():
    with pytest.raises(SplitError, match=r"kwargs\['t'\] has shape \(2, 3\): dimension 0 is too small for 4"):
        split_batch((torch.zeros(8),), {"t": torch.zeros(2, 3)}, 4, kwargs_spec={"t": TensorChunkSpec(0)})


def test_what_hides_its_rows_is_refused():
    x = torch.zeros(4, 2)
    with pytest.raises(SplitError, match=r"kwargs\['mask'\] is a numpy array of shape \(4,\)"):
        split_batch((x,), {"mask": np.zeros(4)}, 2)
    with pytest.raises(SplitError, match=r"kwargs\['box'\] is a Opaque with tensors in \['rows'\]"):
        split_batch((x,), {"box": Opaque(x)}, 2)
    with pytest.raises(SplitError, match=r"kwargs\['cache'\] is a Opaque with tensors in \['rows'\]"):
        split_batch((x,), {"cache": Opaque([Opaque(x)])}, 2)
    box, array = Opaque(x), np.zeros(4)
    specs = {"box": Replicate(), "array": Replicate()}
    _, kwargs = split_batch((x,), {"box": box, "array": array, "n": np.float64(2)}, 2, kwargs_spec=specs)
    assert kwargs[1]["box"] is box
    assert kwargs[1]["array"] is array


def test_one_microbatch_has_everything_whole():
    values = {"table": torch.zeros(3, 2), "scalar": torch.tensor(1.0), "empty": torch.zeros(0), "box": Opaque(None)}
    args, kwargs = split_batch((torch.zeros(4),), values, 1)
    assert args[0][0].shape == (4,)
    assert all(kwargs[0][name] is values[name] for name in ("table", "scalar", "empty", "box"))
    assert split_batch((torch.zeros(0, 3),), {}, 1)[0][0][0].shape == (0, 3)
    assert split_target(torch.tensor(1.0), 1) == [torch.tensor(1.0)]


@pytest.mark.parametrize("count", [0, -1])
def test_no_microbatches(count):
    with pytest.raises(SplitError, match=f"num_microbatches is {count}"):
        split_batch((torch.zeros(4),), {}, count)
    with pytest.raises(SplitError, match=f"num_microbatches is {count}"):
        split_target(None, count)


def test_every_tensor_by_itself_when_not_strict():
    args, kwargs = split_args_kwargs_into_chunks(
        (torch.zeros(8), torch.zeros(16)), {"x": torch.zeros(6)}, 2, strict=False
    )
    assert [tuple(map(len, one)) for one in args] == [(4, 8), (4, 8)]
    assert [len(one["x"]) for one in kwargs] == [3, 3]


def test_targets_of_any_kind():
    assert split_target(None, 2) == [None, None]
    assert split_target(0.5, 2) == [0.5, 0.5]
    assert rows_of(split_target(torch.arange(5), 2)) == [[0, 1, 2], [3, 4]]
    first, second = split_target({"labels": torch.arange(4), "pair": Pair(torch.arange(4), 7)}, 2)
    assert second["labels"].tolist() == second["pair"].rows.tolist() == [2, 3]
    assert first["pair"].offsets == 7
    with pytest.raises(SplitError, match=r"target\['weights'\].*target_chunk_spec=\{'weights': Replicate\(\)\}"):
        split_target({"labels": torch.arange(4), "weights": torch.zeros(10)}, 2)


def test_ready_microbatches():
    x, y = torch.zeros(3), torch.zeros(1)
    assert split_batch((Microbatches([x, y]),), {}, 2) == ([(x,), (y,)], [{}, {}])
    ready = Microbatches([((x,), {"a": 1}), ((y, 2), {})])
    assert split_batch((ready,), {}, 2) == ([(x,), (y, 2)], [{"a": 1}, {}])
    assert split_target(Microbatches([x, None]), 2) == [x, None]
    args, kwargs = split_batch((torch.arange(4),), {"m": [Microbatches([x, y])]}, 2)
    assert kwargs == [{"m": [x]}, {"m": [y]}]
    assert args[1][0].tolist() == [2, 3]


def test_ready_microbatches_are_counted():
    with pytest.raises(SplitError, match="args has 1 ready microbatches; expected 2"):
        split_batch((Microbatches([((1,), {})]),), {}, 2)
    with pytest.raises(SplitError, match=r"args\[0\] has 3 ready microbatches; expected 2"):
        split_batch((Microbatches([1, 2, 3]),), {}, 2)
    with pytest.raises(SplitError, match="target has 3 ready microbatches; expected 2"):
        split_target(Microbatches([1, 2, 3]), 2)
    with pytest.raises(SplitError, match=r"further keyword arguments \['mask'\]"):
        split_batch((Microbatches([((1,), {})] * 2),), {"mask": 1}, 2)


def test_microbatches_is_a_sequence():
    ready = Microbatches(range(4))
    assert (len(ready), ready[1], list(ready[2:]), 3 in ready) == (4, 1, [2, 3], True)
    assert repr(ready[:2]) == "Microbatches([0, 1])"


def test_chunk_specs_are_values():
    assert TensorChunkSpec(1) == TensorChunkSpec(split_dim=1)
    assert repr(TensorChunkSpec.from_tuple((0, (1, None)))) == "(TensorChunkSpec(0), (TensorChunkSpec(1), None))"
    nested = TensorChunkSpec.from_dict({"a": 0, "b": {"c": -1}, "d": [1]})
    assert nested == {"a": TensorChunkSpec(0), "b": {"c": TensorChunkSpec(-1)}, "d": [TensorChunkSpec(1)]}
    assert str(TensorChunkSpec(0)) == "TensorChunkSpec(0)"


def test_gradients_flow_through_the_pieces():
    x = torch.ones(5, 2, requires_grad=True)
    for scale, piece in enumerate(split_tensor(x, TensorChunkSpec(0), 2)):
        (piece * scale).sum().backward()
    assert x.grad[:, 0].tolist() == [0, 0, 0, 1, 1]


def test_a_parameter_and_a_subclass_are_cut_too():
    class Sub(torch.Tensor):
        pass

    pieces = split_tensor(torch.zeros(4).as_subclass(Sub), TensorChunkSpec(0), 2)
    assert [type(piece) for piece in pieces] == [Sub, Sub]
    assert split_tensor(torch.nn.Parameter(torch.zeros(4)), TensorChunkSpec(0), 2)[1].requires_grad
