"""Forwards whose backward nobody will ask for: what their graph would save is let go at once.

    drop = DropSaved()
    with drop.around(modes):
        output = module(x)

The forward cannot tell: it has a graph, its operators go the same way, hooks see what they always see. But it holds as little
as without one. Two kinds of forwards need what was saved: those that differentiate by themselves, as where forces are the
gradient of an energy, and those of which Python keeps a value with its graph for later. So the first forward in each mode keeps
what it saves. If some of that is asked for on the way, or is still held when the next forward begins, nothing is let go in these
modes. If a later forward needs what the first did not, that is an error which says so, and from then on everything is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import StageError


class _Kept:
    """A saved tensor of a first forward."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output would hold its own graph


class _Trial:
    """A first forward: it keeps what it saves, and shows whether somebody needs it."""

    def __init__(self) -> None:
        self.kept: list[weakref.ref[_Kept]] = []
        self.asked = False

    def pack(self, tensor: Tensor) -> _Kept:
        one = _Kept(tensor)
        self.kept.append(weakref.ref(one))
        return one

    def unpack(self, one: _Kept) -> Tensor:
        self.asked = True
        return one.tensor

    def is_needed(self) -> bool:
        """Asked when its graph should be gone."""
        return self.asked or any(one() is not None for one in self.kept)


class DropSaved:
    """What is known of the forwards of a stage that are run again: in which modes what they save may go."""

    def __init__(self) -> None:
        self.known: dict[Hashable, _Trial | bool] = {}  # whether it may go

    def may(self, modes: Hashable) -> bool | None:
        """Whether what the next forward in these modes saves may go; None: it is the first, and will show that."""
        found = self.known.get(modes)
        if isinstance(found, _Trial):
            found = self.known[modes] = not found.is_needed()
        return found

    @contextmanager
    def around(self, modes: Hashable) -> Iterator[None]:
        """Inside, a forward runs."""
        drops = self.may(modes)
        if drops is None:
            trial = _Trial()
            with saved_tensors_hooks(trial.pack, trial.unpack):
                yield
            self.known[modes] = trial
        elif drops:

            def needed(_: None) -> Tensor:
                self.known[modes] = False
                raise StageError(
                    "what a forward saved is needed though it is to be run again for its backward: it differentiates by itself, "
                    "or somebody kept a value of it. The first one did not, so it was let go. From the next step on it is kept: "
                    "call step again, or leave the stage out of recompute"
                )

            with saved_tensors_hooks(_drop, needed):
                yield
        else:
            yield

    def is_refused(self, modes: Hashable, error: RuntimeError) -> bool:
        """Whether a forward failed because torch.func, or whoever forbids it, wants to see everything saved."""
        if "saved tensor hooks" not in str(error):
            return False
        self.known[modes] = False
        return True


def _drop(_: Tensor) -> None:
    """Autograd saves nothing."""
