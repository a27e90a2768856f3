"""Checksums of what ranks were given, for the comparison that finds ranks of one pipeline on different batches.

Input and target of a step come from different ranks: where these are at different rows, the loss is that of pairs which nobody
made, and looks like any other. So in the first steps, and now and then, each rank adds checksums of what it was given to the
preamble, one for each tensor and number, and compares them with those of the ranks before it. What a rank was not given is not
compared.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.batch import Microbatches
from penstock.nest import Value, open_node

Checksums: TypeAlias = dict[str, int]  # by name, as the caller of a step would write it: "args[0]", "target['labels']"
Known: TypeAlias = dict[int, tuple[int, int]]  # by the number of a name: a checksum, and the rank that was given it

MOST = 256
"""How many checksums go with a preamble."""
_FIRST, _PERIOD = 3, 32  # the steps that are compared: so many at the beginning, then each whose number this divides
_LONGEST = 1 << 20  # bytes of a tensor that are read; of a longer one only every second, fourth, ... row or column
_ABOUT, _NEAR = "~", 0.02  # before the name of what need not be the same to the last bit; how far it may differ
_FACTOR = -7046029254386353131  # odd, and its multiples look random: 2^64 divided by the golden ratio


class Comparison:
    """Says in which steps a rank computes checksums. All ranks count the same steps."""

    def __init__(self) -> None:
        self._done = {True: 0, False: 0}  # training steps, and others

    def checksums(self, given: Mapping[str, Value], *, step: int, train: bool) -> Checksums:
        """The checksums for the step of this number; none if it is not to be compared.

        Tensors on a device are read in the first step only: in later ones the host would have to wait for it.
        """
        done = self._done[train]
        self._done[train] += 1
        if done >= _FIRST and step % _PERIOD:
            return {}
        return checksums_of(given, on_host=done > 0)


def checksums_of(given: Mapping[str, Value], *, on_host: bool = False) -> Checksums:
    """A checksum for each tensor, number and text. `on_host`: tensors on a device are left out.

    >>> found = checksums_of({"x": torch.tensor([1.0, 2.0]), "rest": {"scale": 3, "mask": None}})
    >>> list(found)
    ['x', "rest['scale']"]
    >>> found["x"] == checksums_of({"x": torch.tensor([2.0, 1.0])})["x"]
    False
    """
    leaves = (leaf for name, value in given.items() for leaf in _leaves(name, value))
    known = ((_ABOUT * _is_about(value) + name, _checksum(value, on_host=on_host)) for name, value in leaves)
    return dict(islice(((name, number) for name, number in known if number is not None), MOST))


def _leaves(name: str, value: Value) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Microbatches):
        for place, item in enumerate(value):
            yield from _leaves(f"{name}[{place}]", item)
        return
    node = open_node(value)
    if node is None:
        yield name, value
        return
    for place, child in enumerate(node.children):
        yield from _leaves(name + node.written(place), child)


def _checksum(value: object, *, on_host: bool) -> int | None:
    """None for what cannot be compared, or is not there."""
    if isinstance(value, bool | int | float | complex | str | bytes):
        return _number(f"{type(value).__name__} {value!r}")
    if not isinstance(value, Tensor) or hasattr(value, "__tensor_flatten__") or value.is_meta:
        return None
    if on_host and value.device.type != "cpu":
        return None
    try:
        plain = value.detach().as_subclass(Tensor)
        return _about(plain) if _is_about(value) else _of_tensor(plain)
    except (RuntimeError, TypeError):  # sparse, quantized, nested: their bytes are not at hand
        return None


def _part(tensor: Tensor) -> Tensor:
    """What is read of a tensor."""
    while tensor.numel() * tensor.element_size() > _LONGEST:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        tensor = tensor[(slice(None),) * longest + (slice(None, None, 2),)]
    return tensor


@torch.no_grad()
def _of_tensor(tensor: Tensor) -> int:
    """Of the bits, so that NaN equals itself; each counts by its place, so that the same rows in another order differ."""
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    flat = _part(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return _number(kind)
    data = flat.view(torch.uint8)
    whole = data.numel() // 8 * 8
    total = _total(data[:whole].view(torch.int64)) if whole else 0
    rest = _total(data[whole:].to(torch.int64)) if whole < data.numel() else 0
    return _wrapped(total + 31 * rest + _number(kind))


def _is_about(value: object) -> bool:
    """Numbers on a device may have been computed there, by kernels whose last bits differ from device to device."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.device.type != "cpu"


@torch.no_grad()
def _about(tensor: Tensor) -> int:
    """The mean with signs that look random, and the root of the mean square, as two numbers of 32 bits."""
    values = _part(tensor).to(torch.float32).reshape(-1)
    places = torch.arange(values.numel(), dtype=torch.int64, device=values.device)
    signs = ((places * _FACTOR) >> 40 & 1) * 2 - 1
    count = max(values.numel(), 1)
    both = torch.stack([(values * signs).sum() / count**0.5, values.square().sum().div(count).sqrt()])
    return int.from_bytes(struct.pack("<ff", *both.tolist()), "little", signed=True)


def _alike(name: str, mine: int, theirs: int) -> bool:
    if mine == theirs or not name.startswith(_ABOUT):
        return mine == theirs
    (one, size), (other, other_size) = (
        struct.unpack("<ff", n.to_bytes(8, "little", signed=True)) for n in (mine, theirs)
    )
    finite = all(map(math.isfinite, (one, other, size, other_size)))
    return not finite or max(abs(one - other), abs(size - other_size)) <= _NEAR * max(size, other_size)


def _total(words: Tensor) -> int:
    places = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    return int((words * (places * _FACTOR | 1)).sum())


def _wrapped(number: int) -> int:
    """In 64 bits, as messages hold it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


# -- between ranks


def joined(known: Known, own: Checksums, rank: int) -> Known:
    """What the ranks after this one compare theirs with: the first checksum under each name."""
    found = {_number(name): (number, rank) for name, number in own.items()} | known
    return dict(islice(found.items(), MOST))


def to_numbers(known: Known) -> list[int]:
    return [number for name, (checksum, rank) in known.items() for number in (name, checksum, rank)]


def from_numbers(numbers: Iterable[int]) -> Known:
    flat = list(numbers)
    return {name: (number, rank) for name, number, rank in zip(flat[::3], flat[1::3], flat[2::3], strict=True)}


def difference(known: Known, own: Checksums, rank: int) -> str:
    """What this rank was given that differs from what ranks before it were given, and what to write; "" if nothing does."""
    unlike: dict[int, list[str]] = {}
    for name, number in own.items():
        theirs, other = known.get(_number(name), (number, rank))
        if not _alike(name, number, theirs):
            unlike.setdefault(other, []).append(name.removeprefix(_ABOUT))
    if not unlike:
        return ""
    said = "; ".join(
        f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''} of ranks {other} and {rank}"
        for other, names in unlike.items()
    )
    return (
        f"the values differ in {said}. All ranks of a pipeline take the same batch: shuffle with one seed, "
        "DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0)), seed what draws in a dataset or collate_fn "
        "alike, and leave DistributedSampler to replicas, with num_replicas=dp.size() and rank=dp.get_local_rank(). What ranks "
        "cannot have alike is given where it is read and nowhere else: input on the first stage's rank, target on the last's"
    )
