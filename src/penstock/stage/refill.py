"""Forwards that will be run again: what their graph would save is let go at once. Where that graph can stay, the second run puts
back what it lacks, and ends when all is there.

    refill = Refill(needed)
    with saved_tensors_hooks(refill.pack, refill.unpack):
        output = module(x)                  # its graph holds empty places
    refill.fill(lambda: module(x))          # as far as the last of them
    output.sum().backward()

A forward ends with work of which nothing is saved: the product of its last linear layer, its last sum. The second run needs
none of that, so it is left by an exception as soon as the last place is filled. What it would have given is known from the
first run, whose graph the backward goes through.

Which forwards may let go:

    drop = DropSaved()
    with drop.around(modes) as refill:
        output = module(x)

The forward cannot tell: it has a graph, its operators go the same way, hooks see what they always see. But it holds as little
as without one. Two kinds of forwards need what was saved: those that differentiate by themselves, as where forces are the
gradient of an energy, and those of which Python keeps a value with its graph for later. So the first forward in each mode keeps
what it saves. If some of that is asked for on the way, or is still held when the next forward begins, nothing is let go in these
modes. If a later forward needs what the first did not, that is an error which says so, and from then on everything is kept.

The first forward shows also whether its graph can stay and be filled later (`Refill`): whether it consists of
operators of torch alone, all of whose saved tensors come here. Functions written in Python, compiled code and checkpoints keep
things of their own in a graph; and whoever keeps a value of the second run wants it to be that of the backward. Even then, all
forwards of a first step are run again in full, which shows whether they give the same a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import StageError
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.engine import nodes_reached

PLAIN = (Tensor, nn.Parameter)
"""Tensors that hold their values themselves."""


class _Enough(BaseException):
    """Leaves a forward. No error: whoever catches errors lets it pass."""


class Place:
    """Where a saved tensor was, and will be."""

    __slots__ = ("__weakref__", "dtype", "shape", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.tensor: Tensor | None = None
        self.version = 0

    def keep(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version  # an output would hold its own graph


class Refill:
    """What the graph of one forward lacks."""

    def __init__(self, needed: Callable[[], NoReturn]) -> None:
        self.needed = needed  # called if somebody asks before it is there
        self.places: list[weakref.ref[Place]] = []  # in order; the graph has them

    def pack(self, tensor: Tensor) -> Place:
        place = Place(tensor)
        self.places.append(weakref.ref(place))
        return place

    def unpack(self, place: Place) -> Tensor:
        if place.tensor is None:
            self.needed()
        if place.tensor._version != place.version:  # autograd asks that only of tensors without hooks
            raise changed_in_place(place.shape)
        return place.tensor

    def fill(self, run: Callable[[], object]) -> None:
        """Run the forward again, until every place that is still there has its tensor."""
        places = [place() for place in self.places]
        self.places = []
        while places and places[-1] is None:
            places.pop()
        count, filled = len(places), 0

        def keep(tensor: Tensor) -> Place | None:
            nonlocal filled
            if filled == count:  # somebody caught what was to end the run
                raise _Enough
            place = places[filled]
            if place is not None:
                if tensor.shape != place.shape or tensor.dtype is not place.dtype:
                    raise StageError(
                        f"the forward saved {name(place)} as number {filled + 1} of the tensors for its backward, and when it "
                        f"was run again {name(tensor)}; {EXPECTED}"
                    )
                place.keep(tensor)
            filled += 1
            if filled == count:
                raise _Enough
            return place

        try:
            if count:
                with saved_tensors_hooks(keep, self.unpack):
                    run()
        except _Enough:
            pass
        except Exception:
            if filled < count:  # else it is an answer to being left
                raise
        finally:
            places.clear()  # from here on the graph alone has them, and lets go of one after the other
        if filled < count:
            raise StageError(
                f"the forward saved {count} tensors for its backward, and when it was run again {filled}; {EXPECTED}"
            )


EXPECTED = (
    "expected the same. What it depends on besides its input (a counter, the time, global state) must not change in "
    "between; or leave the stage out of recompute"
)


def changed_in_place(shape: torch.Size) -> StageError:
    """What is wrong with a saved tensor that is no longer what it was."""
    return StageError(
        f"a tensor of shape {list(shape)} that a forward saved for its backward was changed in place since; "
        "expected it to be left alone: change a copy of it"
    )


class _HollowOutput(torch.autograd.Function):
    """Stands for an output: has its graph, its shape, and no memory."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return _hollow(tensor)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def _hollow(tensor: Tensor) -> Tensor:
    return tensor.new_empty_strided(tensor.shape, (0,) * tensor.dim())


def roots(output: Value) -> Value:
    """From which a backward can start as from the output, whose memory they do not hold.

    >>> x = torch.ones(3, requires_grad=True)
    >>> root = roots(2 * x)
    >>> root.backward(torch.ones(3))
    >>> x.grad, root.untyped_storage().nbytes()
    (tensor([2., 2., 2.]), 4)
    """

    def root(tensor: Tensor) -> Tensor:
        return _HollowOutput.apply(tensor) if tensor.requires_grad else _hollow(tensor)  # type: ignore[no-untyped-call]

    return map_tensors(root, output)


def is_plain(output: object) -> bool:
    return all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in tensors_in(output))


def name(tensor: Tensor | Place) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class _Mark:
    """Lives as long as a node that has it."""


class Trial(Refill):
    """A first forward: it keeps what it saves, and shows whether somebody needs it."""

    asked = False
    plain = True
    mark: weakref.ref[_Mark] | None = None

    def pack(self, tensor: Tensor) -> Place:
        place = super().pack(tensor)
        place.keep(tensor)
        self.plain = self.plain and type(tensor) in PLAIN
        return place

    def unpack(self, place: Place) -> Tensor:
        self.asked = True
        return super().unpack(place)

    def look(self, results: object) -> None:
        """After the forward: is its graph one that can stay? Its nodes are marked, to see whether they go."""
        mark = _Mark()
        self.mark = weakref.ref(mark)
        self.plain = self.plain and is_plain(results)
        for node in nodes_reached(tensors_in(results)):
            if type(node).__name__ == "AccumulateGrad":
                continue
            names = [name for name in dir(node) if name.startswith("_raw_saved_")]
            self.plain = self.plain and type(node).__module__ == "builtins" and type(node).__name__ not in _OPAQUE
            self.plain = self.plain and all(_is_ours(getattr(node, name)) for name in names)
            leaves = [type(following).__name__ == "AccumulateGrad" for following, _ in node.next_functions]
            if type(node).__name__ != "ToCopyBackward0" or not all(leaves):  # autocast keeps its casts of parameters
                node.metadata[_Mark] = mark  # type: ignore[index]  # torch has it as a method


_OPAQUE = ("CppFunction", "CopySlices")
"""Nodes that do not show what they hold."""


def _is_ours(saved: Any) -> bool:
    """Whether a saved tensor has gone through the hooks of a trial, or is none, or a number that Python wrote."""
    if isinstance(saved, tuple):
        return all(map(_is_ours, saved))
    held = saved.data
    return held is None or isinstance(held, Place) or bool(saved.unpack_hook is None and held.dim() == 0)


class DropSaved:
    """What is known of the forwards of a stage that are run again: in which modes what they save may go."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Trial | bool] = {}  # whether it may go
        self.stays: dict[Hashable, bool] = {}  # whether the graph may stay
        self.refilled: set[Hashable] = set()  # where it does

    def begin(self) -> None:
        """Before a step."""
        self.refilled = {modes for modes, may in self.stays.items() if may and self.known[modes] is True}

    def may(self, modes: Hashable) -> bool | None:
        """Whether what the next forward in these modes saves may go; None: it is the first, and will show that."""
        found = self.known.get(modes)
        if isinstance(found, Trial):  # by now its graph should be gone
            self.stays.setdefault(modes, found.plain and found.mark is not None and found.mark() is None)
            found = self.known[modes] = not found.asked and all(place() is None for place in found.places)
        return found

    @contextmanager
    def around(self, modes: Hashable) -> Iterator[Refill]:
        """Inside, a forward runs, of which `may` has not said no."""

        def needed() -> NoReturn:
            self.known[modes] = False
            raise StageError(
                "what a forward saved is needed though it is to be run again for its backward: it differentiates by itself, "
                "or somebody kept a value of it. The first one did not, so it was let go. From the next step on it is kept: "
                "call step again, or leave the stage out of recompute"
            )

        saves = Refill(needed) if self.may(modes) else Trial(needed)
        with saved_tensors_hooks(saves.pack, saves.unpack):
            yield saves
        if isinstance(saves, Trial):
            self.known[modes] = saves

    def forbid_refill(self, modes: Hashable) -> None:
        """Forwards in these modes change what they might depend on."""
        self.stays[modes] = False
        self.refilled.discard(modes)

    def is_refused(self, modes: Hashable, error: RuntimeError) -> bool:
        """Whether a forward failed because torch.func, or whoever forbids it, wants to see everything saved."""
        if "saved tensor hooks" not in str(error):
            return False
        self.known[modes] = False
        return True
