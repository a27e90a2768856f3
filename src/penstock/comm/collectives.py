"""Collectives: what ranks do together outside of a step, over a tree of small messages.

    ranks = transport.collectives                           # or, over all replicas, `pipe.ranks`
    ranks.barrier("the disk")
    folder = ranks.broadcast("a folder", make_folder)       # the first rank makes it
    ranks.together("reading", read)                         # if it raises on one rank, it raises on all

Every collective has one form: a frame goes up the tree from each rank, and one comes down to each. So ranks that call different
ones, or of which one raises, find out in that exchange, and every rank raises; the next collective works. A frame is a header
(a checksum of the collective's name, a kind, the length of its payload) and a payload, of which the first bytes are in the same
message. Payloads may be of any length.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock import errors
from penstock.comm.framing import LONGEST
from penstock.comm.messages import Messages, Work
from penstock.errors import PenstockError, RanksDisagree, RunError, TransportError
from penstock.health.decoding import reading
from penstock.health.position import aligned

Made = TypeVar("Made")
Value: TypeAlias = Any
"""What JSON can hold."""
_HEADER = struct.Struct("<IBQ")
_FIRST = 256  # bytes of the first message of a frame
_ENTRY = struct.Struct("<IQ")  # of a gathered payload: whose it is, and its length


class Edge(NamedTuple):
    """Messages to and from a neighbour in the tree."""

    messages: Messages
    peer: int


class Tree(NamedTuple):
    """The neighbours of this rank. Edges may go over different groups."""

    parent: Edge | None
    children: Sequence[Edge]


class ContributionKind(IntEnum):
    """What a frame carries."""

    VALUE = 0
    ERROR = 1  # of one rank, which all raise
    UNLIKE = 2  # the ranks are at different collectives


class Contribution(NamedTuple):
    kind: ContributionKind
    payload: bytes


class CollectiveGuard(Protocol):
    """Around what ranks do together."""

    def called(self, what: str) -> AbstractContextManager[object]:
        """Around a call: other threads are refused."""
        ...

    def collective(self, what: str) -> AbstractContextManager[object]:
        """Around the messages of one collective: nothing else may be in the middle of an exchange, and failures end its waits."""
        ...


Join = Callable[[list[bytes]], bytes]


class Collectives:
    """What some ranks do together: all of them call the same, in the same order.

    ``number``  of this rank among the ``count`` that take part; the first one, 0, is the root of the tree.
    ``guard``   lets one call at a time into a process, and watches over each exchange, so that no wait is without a bound.
    """

    def __init__(self, tree: Tree, guard: CollectiveGuard, *, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.tree, self._guard = tree, guard

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def barrier(self, what: str) -> None:
        """Return when all ranks have come here."""
        self._exchange(what, None, b"", _nothing)

    def broadcast(self, what: str, make: Callable[[], Value]) -> Value:
        """The value that the first rank makes, on every rank. If it raises, every rank raises."""
        with self.call(what):
            raised, post = _attempt(make) if self.is_first else (None, b"")
            return _decoded(what, self._exchange(what, raised, post, _first))

    def gather(self, what: str, make: Callable[[], Value]) -> list[Value] | None:
        """What each rank makes, by number, on the first one; None on the others. If it raises on one, all raise."""
        found: list[bytes] = []
        with self.call(what):
            raised, post = _attempt(make)
            self._exchange(what, raised, _entry(self.number, post), b"".join, found.append)
        return [_decoded(what, post) for post in _entries(what, found[0], self.count)] if found else None

    def all_gather(self, what: str, value: Value) -> list[Value]:
        """A small value of each rank, by number, on every rank."""
        return self.try_all(what, lambda: value)

    def try_all(self, what: str, make: Callable[[], Value]) -> list[Value]:
        """What each rank makes, by number, on every rank. If it raises on one, all raise."""
        with self.call(what):
            raised, post = _attempt(make)
            return [_decoded(what, one) for one in self._all(what, raised, post)]

    def all_bytes(self, what: str, payload: bytes) -> list[bytes]:
        """Each rank's payload, by number, on every rank."""
        return self._all(what, None, payload)

    def _all(self, what: str, raised: Exception | None, payload: bytes) -> list[bytes]:
        joined = self._exchange(what, raised, _entry(self.number, payload), b"".join)
        return _entries(what, joined, self.count)

    def together(
        self, what: str, do: Callable[[], Made], facts: Callable[[], Mapping[str, object]] | None = None
    ) -> Made:
        """What this rank makes, once every rank has made its own and has the same facts. If one raises, all raise.

        The facts are compared by a digest; they are told only where it differs.
        """
        made: list[Made] = []
        given: dict[str, object] = {}
        raised: Exception | None = None
        with self.call(what):
            try:
                made.append(do())
                given.update({} if facts is None else facts())
            except Exception as error:  # noqa: BLE001  the others must hear of it, whatever it is
                raised = error
            if self.count > 1 or raised is not None:
                everyone = self._compare(what, raised, given)
                same_everywhere(f"the arguments of {what}", dict(enumerate(everyone)), "Give every rank the same")
        return made[0]

    def same(self, what: str, facts: Mapping[str, object]) -> None:
        """Compare the facts with those of all ranks. Every rank raises RanksDisagree if one differs."""
        if everyone := self._compare(what, None, facts):
            raise RanksDisagree(differences(everyone, _UNLIKE))

    def _compare(self, what: str, raised: Exception | None, facts: Mapping[str, object]) -> list[dict[str, str]]:
        """The facts of all ranks, by number, if those of one differ; else nothing."""
        told = json.dumps({name: str(fact) for name, fact in facts.items()}).encode()
        if self._exchange(what, raised, hashlib.sha256(told).digest()[:16], _equal):
            return []
        return [_decoded(what, one) for one in self._all(f"the facts of {what}", None, told)]

    def reduce(self, what: str, numbers: Tensor, op: Literal["sum", "max", "min"] = "sum") -> None:
        """Make the small tensor, in host memory, the sum, maximum or minimum over all ranks, element by element."""
        combine: Callable[[Tensor, Tensor], Tensor] = getattr(
            torch, {"sum": "add", "max": "maximum", "min": "minimum"}[op]
        )

        def join(parts: list[bytes]) -> bytes:
            total, *others = [torch.frombuffer(bytearray(part), dtype=numbers.dtype) for part in parts]
            for other in others:
                total = combine(total, other)
            return total.numpy().tobytes()

        if self.count > 1 and numbers.numel():
            found = self._exchange(what, None, numbers.numpy().tobytes(), join)
            numbers.copy_(torch.frombuffer(bytearray(found), dtype=numbers.dtype).view_as(numbers))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        raised, post = _attempt(lambda: bool(flag))
        return b"true" in self._exchange("any()", raised, post, lambda posts: b" ".join({*posts}))

    def call(self, what: str) -> AbstractContextManager[object]:
        """Around something that all ranks do one after another: other threads and hooks are refused meanwhile."""
        return self._guard.called(what)

    # -- the exchange that every collective is

    def _exchange(
        self,
        what: str,
        raised: Exception | None,
        payload: bytes,
        join: Join,
        keep: Callable[[bytes], object] | None = None,
    ) -> bytes:
        """Up the tree `join` makes one payload of a rank's and its children's, which come down from the first rank to all.

        With `keep` only the first rank gets it. If a rank has raised, all raise.
        """
        wire = _Wire(zlib.crc32(str(what).encode()))
        mine = (
            Contribution(ContributionKind.VALUE, payload)
            if raised is None
            else Contribution(ContributionKind.ERROR, _told(self.number, raised))
        )
        with self._guard.collective(what):
            frame = _joined([mine, *map(wire.receive, self.tree.children)], join, self.number)
            if self.tree.parent is not None:
                wire.send(self.tree.parent, frame)
                frame = wire.receive(self.tree.parent)
            elif keep is not None and frame.kind is ContributionKind.VALUE:
                keep(frame.payload)
                frame = Contribution(ContributionKind.VALUE, b"")
            for child in self.tree.children:
                wire.send(child, frame)
        if wire.interrupt is not None:
            raise wire.interrupt
        if frame.kind is ContributionKind.UNLIKE:
            names = self._all(_NAMES, None, json.dumps({"about to": what}).encode())
            raise RanksDisagree(differences([_decoded(_NAMES, name) for name in names], _UNLIKE)) from raised
        if frame.kind is ContributionKind.ERROR:
            raise_as(what, raised, _decoded(what, frame.payload))
        return frame.payload


_NAMES, _UNLIKE = "what each rank is about to do", "the ranks are about to run different things"


class _Wire:
    """Sends and receives the frames of one collective. Ctrl-C is raised when they are all through: a wait of the backend cannot
    be broken off, and a frame that stays behind would be taken for one of the next collective."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.interrupt: KeyboardInterrupt | None = None

    def send(self, edge: Edge, frame: Contribution) -> None:
        data = bytearray(_HEADER.pack(self.name, frame.kind, len(frame.payload)) + frame.payload)
        first = data[:_FIRST].ljust(_FIRST)
        for part in (first, data[_FIRST:]):
            if part:
                self._wait(edge.messages.isend, torch.frombuffer(part, dtype=torch.uint8), edge.peer)

    def receive(self, edge: Edge) -> Contribution:
        first = torch.zeros(_FIRST, dtype=torch.uint8)
        data = self._wait(edge.messages.irecv, first, edge.peer)
        name, kind, length = _HEADER.unpack(data[: _HEADER.size])
        payload, rest = data[_HEADER.size : _HEADER.size + length], length - (_FIRST - _HEADER.size)
        if length > LONGEST or kind not in tuple(ContributionKind):
            raise TransportError(f"rank {edge.peer} announced a frame of {length} bytes; expected up to {LONGEST}")
        if rest > 0:
            payload += self._wait(edge.messages.irecv, torch.zeros(rest, dtype=torch.uint8), edge.peer)
        return (
            Contribution(ContributionKind(kind), payload)
            if name == self.name
            else Contribution(ContributionKind.UNLIKE, b"")
        )

    def _wait(self, post: Callable[[Tensor, int], Work], tensor: Tensor, peer: int) -> bytes:
        try:
            post(tensor, peer).wait()
        except KeyboardInterrupt as error:
            self.interrupt = error
        return tensor.numpy().tobytes()


def same_everywhere(what: str, everyone: Mapping[int, Mapping[str, object]], advice: str) -> None:
    """Raise on every rank if the facts of one differ; the text shows which, and on which ranks."""
    names = dict.fromkeys(name for facts in everyone.values() for name in facts)
    unlike = [name for name in names if len({facts[name] for facts in everyone.values()}) > 1]
    if unlike:
        listed = {number: ", ".join(f"{name} {facts[name]}" for name in unlike) for number, facts in everyone.items()}
        rows = "".join(f"\n  rank {number}: {text}" for number, text in listed.items())
        raise RanksDisagree(f"{what} differ between the ranks:{rows}\n{advice}")


def differences(everyone: Sequence[Mapping[str, str]], heading: str) -> str:
    """A table: a row for each set of ranks that agree, a column for each fact that differs."""
    known = dict.fromkeys(name for facts in everyone for name in facts)
    names = [name for name in known if len({facts.get(name) for facts in everyone}) > 1]
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, facts in enumerate(everyone):
        rows.setdefault(tuple(facts.get(name, "-") for name in names), []).append(rank)
    lines = aligned([("rank", *names), *((", ".join(map(str, ranks)), *values) for values, ranks in rows.items())])
    return f"{heading}:\n  " + "\n  ".join(lines) + "\nGive every rank the same."


def _joined(frames: list[Contribution], join: Join, number: int) -> Contribution:
    """One frame of several: that ranks are at different collectives comes first, then what the lowest rank has raised."""
    kind = max(frame.kind for frame in frames)
    if kind is ContributionKind.ERROR:
        failed = [frame for frame in frames if frame.kind is ContributionKind.ERROR]
        return min(failed, key=lambda frame: int(_decoded("an error", frame.payload)["number"]))
    try:
        return Contribution(kind, join([frame.payload for frame in frames]) if kind is ContributionKind.VALUE else b"")
    except Exception as error:  # noqa: BLE001  the others must hear of it, whatever it is
        return Contribution(ContributionKind.ERROR, _told(number, error))


def _attempt(make: Callable[[], Value]) -> tuple[Exception | None, bytes]:
    """What is made, as it is told; or what was raised. A value that cannot be told is an error like any other."""
    try:
        return None, json.dumps(make()).encode()
    except Exception as error:  # noqa: BLE001  the others must hear of it, whatever it is
        return error, b""


def _told(number: int, error: Exception) -> bytes:
    return json.dumps({"number": number, "kind": type(error).__name__, "error": str(error)}).encode()


def raise_as(what: str, raised: Exception | None, failed: Mapping[str, Value]) -> NoReturn:
    """Raise an error of the kind that the first rank which failed raised, since what every rank does next depends on it.

    A rank whose own error is of that kind raises its own.
    """
    kind = str(failed["kind"])
    if type(raised).__name__ != kind:
        raise _kind(kind)(f"rank {failed['number']} failed at {what}: {kind}: {failed['error']}") from raised
    if isinstance(raised, PenstockError):
        raise raised
    raise RunError(f"{what}: {kind}: {raised}") from raised


def _kind(name: str) -> type[PenstockError]:
    """An error of penstock's that another rank raised, so that every rank's program can catch the same.

    What goes wrong in the run itself is told as a RunError, but for kinds that a package has of its own, such as a damaged
    checkpoint.
    """
    kinds = [PenstockError]
    for known in kinds:
        kinds += known.__subclasses__()
    found = next((known for known in kinds if known.__name__ == name), RunError)
    return RunError if issubclass(found, RunError) and found.__module__ == errors.__name__ else found


def _decoded(what: str, post: bytes) -> Value:
    with reading(f"what a rank told for {what!r}"):
        return json.loads(post)


def _entry(number: int, payload: bytes) -> bytes:
    return _ENTRY.pack(number, len(payload)) + payload


def _entries(what: str, joined: bytes, count: int) -> list[bytes]:
    """The payloads by number."""
    found: dict[int, bytes] = {}
    at = 0
    with reading(f"what the ranks told for {what!r}"):
        while at < len(joined):
            number, length = _ENTRY.unpack(joined[at : at + _ENTRY.size].ljust(_ENTRY.size))
            at += _ENTRY.size
            found[number] = joined[at : at + length]
            at += length
        return [found[number] for number in range(count)]


def _nothing(_: list[bytes]) -> bytes:
    return b""


def _first(payloads: list[bytes]) -> bytes:
    """The first rank's: it alone has one."""
    return payloads[0]


def _equal(digests: list[bytes]) -> bytes:
    """The digest that all have, or none."""
    return digests[0] if len({*digests}) == 1 else b""
