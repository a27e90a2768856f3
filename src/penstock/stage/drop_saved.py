"""Forwards that will be run again: what their graph would save is let go at once.

    drop = DropSaved()
    with drop.around(modes) as refill:
        output = module(x)

The forward cannot tell: it has a graph, its operators go the same way, hooks see what they always see. But it holds as little
as without one. Two kinds of forwards need what was saved: those that differentiate by themselves, as where forces are the
gradient of an energy, and those of which Python keeps a value with its graph for later. So the first forward in each mode keeps
what it saves. If some of that is asked for on the way, or is still held when the next forward begins, nothing is let go in these
modes. If a later forward needs what the first did not, that is an error which says so, and from then on everything is kept.

The first forward shows also whether its graph can stay and be filled later (`stage/refill.py`): whether it consists of
operators of torch alone, all of whose saved tensors come here. Functions written in Python, compiled code and checkpoints keep
things of their own in a graph; and whoever keeps a value of the second run wants it to be that of the backward. Even then, all
forwards of a first step are run again in full, which shows whether they give the same a second time.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import StageError
from penstock.nest import Value, tensors_in
from penstock.stage.engine import nodes_reached
from penstock.stage.refill import PLAIN, Place, Refill, is_plain


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

    def is_needed(self) -> bool:
        """Asked when its graph should be gone."""
        return self.asked or any(place() is not None for place in self.places)

    def can_stay(self) -> bool:
        return self.plain and self.mark is not None and self.mark() is None


_OPAQUE = ("CppFunction", "CopySlices")
"""Nodes that do not show what they hold."""


def _is_ours(saved: Value) -> bool:
    """Whether a saved tensor has gone through the hooks of a trial, or is none, or a number that Python wrote."""
    if isinstance(saved, tuple):
        return all(map(_is_ours, saved))
    held = saved.data
    return held is None or isinstance(held, Place) or bool(saved.unpack_hook is None and held.dim() == 0)


class DropSaved:
    """What is known of the forwards of a stage that are run again: in which modes what they save may go."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Trial | bool] = {}  # whether it may go
        self.stays: set[Hashable] = set()  # where the graph may stay
        self.refilled: set[Hashable] = set()  # where it does
        self.unsteady: set[Hashable] = set()  # where forwards change what they might depend on

    def begin(self) -> None:
        """Before a step."""
        self.refilled = {modes for modes in self.stays - self.unsteady if self.known[modes] is True}

    def may(self, modes: Hashable) -> bool | None:
        """Whether what the next forward in these modes saves may go; None: it is the first, and will show that."""
        found = self.known.get(modes)
        if isinstance(found, Trial):
            if found.can_stay():
                self.stays.add(modes)
            found = self.known[modes] = not found.is_needed()
        return found

    @contextmanager
    def around(self, modes: Hashable) -> Iterator[Refill | None]:
        """Inside, a forward runs."""

        def needed() -> NoReturn:
            self.known[modes] = False
            raise StageError(
                "what a forward saved is needed though it is to be run again for its backward: it differentiates by itself, "
                "or somebody kept a value of it. The first one did not, so it was let go. From the next step on it is kept: "
                "call step again, or leave the stage out of recompute"
            )

        drops = self.may(modes)
        if drops is False:
            yield None
            return
        saves = Refill(needed) if drops else Trial(needed)
        with saved_tensors_hooks(saves.pack, saves.unpack):
            yield saves
        if isinstance(saves, Trial):
            self.known[modes] = saves

    def forbid_refill(self, modes: Hashable) -> None:
        self.unsteady.add(modes)
        self.refilled.discard(modes)

    def is_refused(self, modes: Hashable, error: RuntimeError) -> bool:
        """Whether a forward failed because torch.func, or whoever forbids it, wants to see everything saved."""
        if "saved tensor hooks" not in str(error):
            return False
        self.known[modes] = False
        return True
