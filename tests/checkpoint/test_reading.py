"""Everything that is read from files: right or a PenstockError, whatever the bytes, and no more memory than the files have."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import tracemalloc
import warnings
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import penstock
from penstock.checkpoint.manifest import Damaged, Entry, Manifest, Part, check_entry
from penstock.checkpoint.plain import decode, encode
from penstock.checkpoint.torch_list import read_list
from penstock.checkpoint.weight_files import open_weights
from penstock.errors import PenstockError
from penstock.front.companions import read_states
from tests.checkpoint import attack
from tests.checkpoint.pipes import make, saved

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | st.just("~"), inner, max_size=4),
    max_leaves=12,
)
STATE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=6) | st.just("~") | st.integers() | st.tuples(st.integers()), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(STATE)
def test_states_come_back_as_they_were(state: Any) -> None:
    assert decode(json.loads(json.dumps(encode(state)))) == state


def test_states_of_every_kind_come_back() -> None:
    state = {
        "tensor": torch.randn(2, 3).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "array": np.arange(6.0).reshape(2, 3),
        "number": np.float32(2.5),
        "set": {1, 2},
        "counter": Counter({3: 1}),
        "ordered": OrderedDict(a=1),
        "queue": deque([1]),
    }
    back = decode(json.loads(json.dumps(encode(state))))
    for name, value in state.items():
        assert type(back[name]) is type(value)
        if isinstance(value, torch.Tensor):
            assert torch.equal(back[name], value)
        else:
            assert np.array_equal(back[name], value) if name in ("array", "number") else back[name] == value
    with pytest.raises(PenstockError, match="cannot be saved"):
        encode({"function": print})


@given(JSON)
def test_any_json_is_a_state_or_an_error(value: Any) -> None:
    try:
        read_states(json.dumps({"~": "dict", "is": value}).encode(), "the file")
        read_states(json.dumps(value).encode(), "the file")
    except PenstockError:
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
    saved(place)
    return place


def signed(body: Any) -> bytes:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"format": 2, "digest": digest, "checkpoint": body}).encode()


@settings(max_examples=300, deadline=None)
@given(data=st.data(), value=JSON)
def test_a_manifest_with_anything_anywhere_is_right_or_refused(
    checkpoint: Path, data: st.DataObject, value: Any
) -> None:
    """With a right digest: whoever forges one can compute it."""
    body = json.loads((checkpoint / "penstock.json").read_bytes())["checkpoint"]
    target: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
        inner = target[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            target[key] = value
            break
        target = inner
    try:
        made = Manifest.loads(signed(body))
    except Damaged:
        return
    for entry in made.tensors.values():
        assert all(part.offset >= 0 and part.length >= 0 for part in entry.parts)


@given(st.binary(max_size=200))
def test_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(Damaged):
        Manifest.loads(data)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "9" * 100_000, '"\\ud800"', "NaN", "{}", "[]"])
def test_json_bombs_are_no_manifest(text: str) -> None:
    with pytest.raises(Damaged):
        Manifest.loads(text.encode())


def test_parts_that_share_bytes_are_refused(checkpoint: Path) -> None:
    """A small file with many tensors over the same bytes would fill the memory."""
    body = json.loads((checkpoint / "penstock.json").read_bytes())["checkpoint"]
    first = next(iter(body["tensors"].values()))
    body["tensors"] |= {f"model.again.{number}": first for number in range(100)}
    with pytest.raises(Damaged, match="overlap"):
        Manifest.loads(signed(body))


# -- torch's list


SAVED = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(())}


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dcp") / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": dict(SAVED), "n": 3}
        dcp.save(state, checkpoint_id=place, no_dist=True)
    return place


def test_torchs_own_list_is_read_without_unpickling(of_torch: Path) -> None:
    entries = read_list(of_torch)
    assert {key: (entry.shape, entry.dtype) for key, entry in entries.items()} == {
        "model.a": ((3, 4), "float32"),
        "model.b": ((), "float32"),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_lists_of_every_protocol(of_torch: Path, tmp_path: Path, protocol: int) -> None:
    with (of_torch / ".metadata").open("rb") as file:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(pickle.load(file), protocol))
    assert read_list(tmp_path) == read_list(of_torch)


def test_a_list_that_would_run_something_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    for listed in (attack.simple_list(mark), attack.twisted_list({"model.a": (3, 4)}, "part", 100)):
        (tmp_path / ".metadata").write_bytes(listed)
        with pytest.raises(Damaged):
            read_list(tmp_path)
    assert not mark.exists()


def copy_of(folder: Path, place: Path, change: Callable[[Any], None] = lambda listed: None) -> Path:
    """A checkpoint of torch's with another list."""
    shutil.copytree(folder, place, dirs_exist_ok=True)
    with (folder / ".metadata").open("rb") as file:
        listed = pickle.load(file)
    change(listed)
    (place / ".metadata").write_bytes(pickle.dumps(listed))
    return place


def in_chunks(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    """A list that says that the tensor a has these chunks, each with a record of its own (start, shape)."""

    def change(listed: Any) -> None:
        entry = listed.state_dict_metadata["model.a"]
        (index,) = (one for one in listed.storage_data if one.fqn == "model.a")
        info = listed.storage_data.pop(index)
        entry.size = torch.Size(size)
        entry.chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(shape)) for start, shape in chunks]
        for number, (start, _) in enumerate(chunks):
            where = replace(info, offset=info.offset + number * info.length)
            listed.storage_data[MetadataIndex("model.a", torch.Size(start), number)] = where

    return change


def without_a_place(listed: Any) -> None:
    listed.storage_data = {index: info for index, info in listed.storage_data.items() if index.fqn != "model.a"}


def with_another_name(listed: Any) -> None:
    listed.storage_data = {replace(index, fqn=f"{index.fqn}x"): info for index, info in listed.storage_data.items()}


def with_bytes_that_are_not_there(listed: Any) -> None:
    in_chunks((1 << 40,), ((0,), (1 << 40,)))(listed)
    for index, info in listed.storage_data.items():
        if index.fqn == "model.a":
            listed.storage_data[index] = replace(info, offset=1 << 20, length=1 << 43)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_place, "do not make up"),
        (with_another_name, "none of its contents"),
        (in_chunks((6, 4), ((0, 0), (3, 4))), "do not make up"),
        (in_chunks((3, 4), ((1, 0), (3, 4))), "begins at"),
        (in_chunks((4,), ((0,), (2,)), ((1,), (2,))), "overlap"),
        (in_chunks((1 << 40,), ((0,), (3,))), "do not make up"),
        (in_chunks((1 << 40,), ((0,), (1 << 40,))), "bytes"),
        (with_bytes_that_are_not_there, "bytes"),
        (in_chunks((4, 3), ((0, 0), (4, 3))), "not torch.float32"),
    ],
)
def test_weights_that_a_list_does_not_account_for_are_refused(
    of_torch: Path, tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    """They came back as zeros, or as an error of torch's, or took the memory that the list asked for."""
    with pytest.raises(PenstockError, match=said):
        open_weights(copy_of(of_torch, tmp_path / "checkpoint", change))["a"]


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # in what has become a text
def test_lists_with_flipped_bytes_are_read_or_refused(of_torch: Path, tmp_path: Path) -> None:
    """Whatever is read is a tensor that was saved."""
    whole = (of_torch / ".metadata").read_bytes()
    place = copy_of(of_torch, tmp_path / "checkpoint")
    chance, right, refused = random.Random(0), 0, 0
    tracemalloc.start()
    try:
        for _ in range(1500):
            data = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            (place / ".metadata").write_bytes(
                data[: chance.choice([len(data), len(data), chance.randint(1, len(data))])]
            )
            try:
                for value in dict(open_weights(place)).values():
                    assert any(torch.equal(value, one) for one in SAVED.values())
                    right += 1
            except PenstockError:
                refused += 1
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert right > 20
    assert refused > 100


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def record(name: str, *fields: bytes) -> bytes:
    """An object of torch's lists with these fields: a name, a value, a name, a value."""
    return b"ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n)R}(" + b"".join(fields) + b"ub"


def sizes(number: int) -> bytes:
    return b"ctorch\nSize\nJ" + number.to_bytes(4, "little") + b"\x85\x85R"


def doubled(times: int) -> bytes:
    """A list that holds a list twice, which holds a list twice, and so on."""
    return b"](" * times + b"]q\x00" + b"".join(b"h%ceq%c" % (n, n + 1) for n in range(times))


def whole_list(contents: bytes, places: bytes) -> bytes:
    return b"\x80\x02" + record("Metadata", text("state_dict_metadata"), contents, text("storage_data"), places) + b"."


def one_tensor(size: bytes, properties: bytes) -> bytes:
    tensor = record("TensorStorageMetadata", text("chunks"), b"]", text("size"), size, text("properties"), properties)
    return whole_list(b"}(" + text("a") + tensor + b"u", b"}")


def chunks_that_all_tensors_share(count: int = 300) -> bytes:
    chunk = [record("ChunkStorageMetadata", text("offsets"), sizes(n), text("sizes"), sizes(1)) for n in range(count)]
    shared = [b"](" + b"".join(chunk) + b"er\xff\x00\x00\x00", *[b"j\xff\x00\x00\x00"] * 3000]
    tensors = (text(f"k{n}") + record("TensorStorageMetadata", text("chunks"), one) for n, one in enumerate(shared))
    return whole_list(b"}(" + b"".join(tensors) + b"u", b"}")


_INDEX = record("MetadataIndex", text("fqn"), doubled(60), text("offset"), b"N")
_TYPE = b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n)R" + doubled(60) + b"\x85b"


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (b"\x80\x02" + doubled(60) + b")R.", "is called that is no class"),
        (whole_list(b"}", b"}(" + _INDEX + b"Nu"), "none of its contents"),
        (one_tensor(b"ctorch\nSize\n" + doubled(60) + b"\x85R", b"N"), "has the sizes"),
        (one_tensor(sizes(0), _TYPE), "no type of numbers"),
        (
            b"\x80\x04\x8c\x01a\x94" + b"".join(b"h%ch%c\x93\x94" % (n, n) for n in range(60)) + b".",
            "requires str",
        ),
        (chunks_that_all_tensors_share(), "more blocks than it has room for"),
    ],
)
def test_lists_that_would_fill_the_memory_are_refused(tmp_path: Path, listed: bytes, said: str) -> None:
    """A list may name the same list twice, and a name may be made of two names: 200 bytes became more than any memory holds,
    as soon as somebody wrote them out, if only in an error."""
    (tmp_path / ".metadata").write_bytes(listed)
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match=said):
            read_list(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_parts_that_would_take_forever_to_compare_are_refused() -> None:
    """A staircase: whichever way one looks, all parts that began earlier are still there. 4,000 of them, in a manifest of 1 MB,
    took 10 seconds, and 40,000 would have taken 1,000."""
    count, parts = 1000, []
    for n in range(count):
        for start, rows in ((0, n), (n, count - n)):
            parts.append(Part("f", n * count + start, rows, 0, "", (start, n), (rows, 1)))
    with pytest.raises(ValueError, match="lie side by side"):
        check_entry("a", Entry((count, count), "uint8", tuple(parts)))


# -- files of torch's


def archive(file: Path, pickled: bytes, data: bytes) -> Path:
    """What torch.save writes, with any pickle."""
    with zipfile.ZipFile(file, "w") as made:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "data/0": data, "version": b"3\n"}.items():
            made.writestr(f"archive/{name}", content)
    return file


@pytest.mark.parametrize(
    "pickled", [b"\x80\x02R.", b"\x80\x02.", b"", b"\x80\x02}.", b"\x80\x02K\x01b.", b"\x80\x02h\x00."]
)
def test_pickles_that_make_no_sense_are_refused(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(PenstockError, match=r"weights\.pt"):
        open_weights(archive(tmp_path / "weights.pt", pickled, b""))


def test_torch_files_with_flipped_bytes_are_read_or_refused(tmp_path: Path) -> None:
    values = torch.arange(6.0)
    torch.save({"a": values.reshape(2, 3)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as made:
        pickled = made.read("whole/data.pkl")
    chance, right, refused = random.Random(0), 0, 0
    for _ in range(400):
        data = bytearray(pickled)
        for _ in range(chance.randint(0, 2)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                right += len(
                    dict(open_weights(archive(tmp_path / "flipped.pt", bytes(data), values.numpy().tobytes())))
                )
        except PenstockError:
            refused += 1
    assert right > 50
    assert refused > 50


@pytest.mark.filterwarnings("ignore:.*prototype stage.*", "ignore:.*quantiz.*")
@pytest.mark.parametrize("kind", ["number", "sparse", "meta", "nested", "quantized"])
def test_weights_without_plain_values_change_nothing(kind: str) -> None:
    """Torch raised in the middle of copying, when the parameters before were those of the file."""
    values: dict[str, Any] = {
        "number": 5,
        "sparse": torch.ones(4).to_sparse(),
        "meta": torch.empty(4, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    }
    pipe, _ = make()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    first, *others = reversed(before)
    with pytest.raises(PenstockError, match=first.replace(".", r"\.")):
        pipe.load_state_dict({**{name: before[name] + 1.0 for name in others}, first: values[kind]})
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_files_that_claim_a_size_and_hold_nothing_take_no_memory(checkpoint: Path, tmp_path: Path) -> None:
    """A file of a terabyte costs its maker nothing on disk; memory for its length was taken before its bytes were looked at."""
    place = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, place)
    body = json.loads((place / "penstock.json").read_bytes())["checkpoint"]
    part = next(iter(body["tensors"].values()))["parts"][0]
    for length in (1 << 40, part["length"] + (1 << 21)):
        part["length"] = length
        with (place / part["file"]).open("r+b") as file:
            file.truncate(part["offset"] + length)
        (place / "penstock.json").write_bytes(signed(body))
        tracemalloc.start()
        with pytest.raises(PenstockError):
            penstock.load(place)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
        tracemalloc.stop()
    shutil.rmtree(place)
    shutil.copytree(checkpoint, place)
    body = json.loads((place / "penstock.json").read_bytes())["checkpoint"]
    body["files"]["rank-0.json"]["size"] = 1 << 40
    with (place / "rank-0.json").open("r+b") as file:
        file.truncate(1 << 40)
    (place / "penstock.json").write_bytes(signed(body))
    with pytest.raises(PenstockError, match="are read"):
        make()[0].load(place)


@pytest.mark.skipif(
    Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1",
    reason="this kernel promises memory that it does not have",
)
def test_a_tensor_without_end_is_no_error_of_torchs(checkpoint: Path, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, place)
    body = json.loads((place / "penstock.json").read_bytes())["checkpoint"]
    entry = next(iter(body["tensors"].values()))
    (part,) = entry["parts"]
    size = 1 << 43  # more than any memory, less than the largest file
    entry["shape"], entry["dtype"] = [size], "int8"
    part |= {"start": [0], "shape": [size], "length": size + 100, "offset": 1 << 30, "data": 0}
    with (place / part["file"]).open("r+b") as file:
        file.truncate((1 << 30) + size + 100)
    (place / "penstock.json").write_bytes(signed(body))
    with pytest.raises(PenstockError, match="no memory"):
        penstock.load(place)


def test_pipes_in_the_place_of_files_keep_nobody_waiting(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.pt", "model.safetensors.index.json", "any"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(PenstockError, match="plain file"):
            open_weights(tmp_path / name)
    with pytest.raises(PenstockError, match="plain file"):
        open_weights(tmp_path)
    place = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, place)
    (place / ".metadata").unlink()
    os.mkfifo(place / ".metadata")
    with pytest.raises(PenstockError, match="missing"):
        penstock.load(place)


@pytest.mark.parametrize("inner", ["data.pkl", "data/0"])
def test_torch_files_that_grow_when_they_are_read_are_refused(tmp_path: Path, inner: str) -> None:
    """torch.save compresses nothing, but torch.load takes what is: some kilobytes filled any memory."""
    torch.save({"weight": torch.zeros(4)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for one in plain.infolist():
            packed = one.filename.endswith(inner)
            data = plain.read(one) + (b"\0" * (1 << 24) if packed else b"")
            bomb.writestr(one.filename, data, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 17
    with pytest.raises(PenstockError, match="is compressed"):
        open_weights(tmp_path / "bomb.pt")
    assert torch.equal(open_weights(tmp_path / "plain.pt")["weight"], torch.zeros(4))
