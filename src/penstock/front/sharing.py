"""Pipelines that are made of the same parameters: none goes on from values that another one has trained elsewhere.

A pipeline trains the user's own tensors. Two of one model, or of models that share a module, may train in turn while each rank
has the same tensors in both. Where one has a parameter on another rank, or shards it for itself, an update in one does not
reach the other.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from penstock.comm.local import LocalTransport
from penstock.comm.transport import Transport
from penstock.errors import RunError

_LIVING: weakref.WeakSet[Sharing] = weakref.WeakSet()
_LOCK = threading.Lock()  # ranks may be threads
_SHOWN = 4  # names in an error


def parameters_of(model: object) -> dict[str, nn.Parameter]:
    """Parameters that a pipeline is made of, by all names; none of a model without data: each pipeline gets its own values."""
    if not isinstance(model, nn.Module):
        return {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in every if not parameter.is_meta}


class Sharing:
    """The parameters that this rank of a pipeline holds, by what they were made of. It lives as long as the pipeline."""

    def __init__(
        self, given: Mapping[str, nn.Parameter], own: Iterable[tuple[str, nn.Parameter]], transport: Transport
    ) -> None:
        """`given`: what the model had; `own`: what this rank's stages hold, by the same names where they are of the model."""
        self._transport = transport
        self._held: dict[int, Tensor] = {}  # by what it was made of
        self._names: dict[int, str] = {}
        made_of = dict(given)
        for name, tensor in own:
            source = made_of.setdefault(name, tensor)  # of stages made by hand: itself
            if not tensor.is_inference():
                self._held.setdefault(id(source), tensor)
                self._names.setdefault(id(source), name)
        self._given = {id(parameter): weakref.ref(parameter) for parameter in made_of.values()}
        self._versions = self._now()
        self._seen: weakref.WeakKeyDictionary[Sharing, dict[int, int]] = weakref.WeakKeyDictionary()
        with _LOCK:
            _LIVING.add(self)

    def renew(self) -> None:
        """Take note that all values of this pipeline have been set: what others did before does not count."""
        self._versions = self._now()
        for other in self._others():
            self._seen[other] = other._now()

    def refusal(self, call: str) -> RunError | None:
        """Look for parameters that another living pipeline has changed and that are not the same tensors here."""
        names = self._stale()
        if names:
            gc.collect()  # one that was dropped may wait for that
            names = self._stale()
        if not names:
            return None
        listed = ", ".join(names[:_SHOWN])
        if len(names) > _SHOWN:
            listed += f" and {len(names) - _SHOWN} more"
        return RunError(
            f"{call} of a pipeline that shares parameters with another one: the other has changed {listed} since, and here they "
            "are on another rank, or sharded anew, with the values from before; the two would drift apart. Give each pipeline a "
            "copy.deepcopy(model) of its own; or cut both at the same places, unsharded, so that each rank has the same in both; "
            "or go on with one alone: other.save(folder), del other, and pipe.load(folder) here"
        )

    def _stale(self) -> list[str]:
        names: dict[str, None] = {}
        others = self._others()
        if not others:
            return []
        between = {id(tensor) for one in others if self._is_thread_beside(one) for tensor in one._held.values()}
        for other in others:
            if self._is_thread_beside(other):
                continue
            before = self._seen.get(other, other._versions)
            for key, tensor in other._held.items():
                given = self._given.get(key)
                if given is None or given() is None or given() is not other._given[key]():
                    continue  # not of this pipeline: the number may be that of a tensor that is no more
                changed = tensor._version != before.get(key) and tensor.requires_grad
                if changed and self._held.get(key) is not tensor and id(tensor) not in between:
                    names[other._names[key]] = None
        return [*names]

    def _others(self) -> list[Sharing]:
        with _LOCK:
            return [one for one in _LIVING if one is not self]

    def _is_thread_beside(self, other: Sharing) -> bool:
        """Whether the other is of another rank in this process: what both have is one tensor, and they meet before each step."""
        return self._transport is not other._transport and any(map(_is_thread, (self._transport, other._transport)))

    def _now(self) -> dict[int, int]:
        """How often each tensor has been written to."""
        return {key: tensor._version for key, tensor in self._held.items()}


def _is_thread(transport: Transport) -> bool:
    return isinstance(transport, LocalTransport) and transport.num_ranks > 1
