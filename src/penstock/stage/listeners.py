"""Whether anybody waits to hear of gradients: hooks of parameters, and hooks of autograd's nodes that accumulate them.

    listeners = Listeners()                        # one for each step of a stage
    listeners.add(parameters, grads)               # True: `.grad` has grown, and autograd's engine was not asked

The engine takes longer for a small parameter than the addition itself. DDP and others hang hooks on the node that accumulates
a parameter, which cannot be seen. But the node of a parameter is made anew whenever it is asked for, unless somebody keeps
it, as everybody must who hangs something on it: a mark that is still there a moment later tells that somebody does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from penstock.stage.engine import run_engine
from penstock.stage.equal_products import Packing

_MARK = "penstock.stage.listeners"
_HOOKS, _LATE_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_GRAD, _IS_TRAINED, _IS_NONE = attrgetter("grad"), attrgetter("requires_grad"), partial(is_, None)


class Listeners:
    """Who listens to the parameters of a stage in one step. Hooks of nodes are looked for once, those of parameters always."""

    def __init__(self) -> None:
        self.known: Sequence[Tensor] = ()  # the parameters whose nodes were looked at
        self.heard = False  # whether more is to be done for them than adding
        self.grads: Sequence[Tensor] = ()  # theirs, to which one can just add
        self.packing: Packing | None = None
        self.places: list[Tensor] = []  # where they lie, as `packing` has them
        self.loose: Sequence[Tensor] = ()  # gradients that were found not to lie so

    def add(self, parameters: Sequence[Tensor], values: Sequence[Tensor], packing: Packing | None = None) -> bool:
        """Add gradients to those that are there, as the engine would. False, and nothing done, if somebody listens, or if that
        is more than adding.

        With a `packing` they come in batches, which are added as such if the old ones lie like that in memory. Those that are
        the first of their parameters do, from here on.
        """
        if self.any_to(parameters) or not all(map(_IS_TRAINED, parameters)) or any(map(_IS_NONE, values)):
            return False
        found = list(map(_GRAD, parameters))
        if self.packing is not packing or not _same(found, self.grads):
            if packing is not None:
                if all(map(_IS_NONE, found)) and all(map(_is_plain, parameters)):
                    _set_first(parameters, values, packing)
                    return True
                if _same(found, self.loose):
                    return False
            places = _places(found, values, packing)
            if places is None:
                self.loose = found
                return False
            self.grads, self.packing, self.places = found, packing, places
        torch._foreach_add_(self.places, list(values))
        return True

    def any_to(self, parameters: Sequence[Tensor]) -> bool:
        """Whether somebody listens to these, or one is there twice, so that the engine has to add up what is of it first."""
        if not _same(parameters, self.known):
            twice = len(set(map(id, parameters))) < len(parameters)
            self.known, self.heard = parameters, twice or any_node_kept(parameters)
        return self.heard or any(map(_HOOKS, parameters)) or any(map(_LATE_HOOKS, parameters))


def _set_first(parameters: Sequence[Tensor], values: Sequence[Tensor], packing: Packing) -> None:
    """Copies as gradients of parameters that have none; those of a batch stay together."""
    alone = []
    for batch, value in zip(packing, values, strict=True):
        if len(batch.places) == 1:
            alone.append((parameters[batch.places[0]], value))
            continue
        for place, grad in zip(batch.places, batch.unpack(value.clone()), strict=True):
            parameters[place].grad = grad.data  # no view, in the eyes of autograd
    if alone:
        run_engine(*zip(*alone, strict=True))


def _places(grads: Sequence[Tensor], values: Sequence[Tensor], packing: Packing | None) -> list[Tensor] | None:
    """Where gradients lie that are to be added to; None if they do not lie as `packing` says."""
    if packing is None:
        return list(grads) if all(map(_can_be_added, grads, values)) else None
    found: list[Tensor] = []
    for batch, value in zip(packing, values, strict=True):
        parts = [grads[place] for place in batch.places]
        if not all(_can_be_added(part, value) for part in parts):
            return None
        first = parts[0]
        if len(parts) > 1:
            step, storage = first.nbytes, first.untyped_storage().data_ptr()
            if not value.is_contiguous() or not all(
                part.shape == batch.shape
                and part.is_contiguous()
                and part.data_ptr() == first.data_ptr() + number * step
                and part.untyped_storage().data_ptr() == storage
                for number, part in enumerate(parts)
            ):
                return None
            first = first.as_strided(value.shape, value.stride()).data
        found.append(first)
    return found


def _same(these: Sequence[Tensor | None], those: Sequence[Tensor]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) is Parameter and parameter.is_contiguous()


def _can_be_added(old: Tensor | None, grad: Tensor) -> bool:
    return type(old) is Tensor and old.dtype is grad.dtype and old.layout is torch.strided


def any_node_kept(parameters: Sequence[Tensor]) -> bool:
    """Whether someone keeps the node of autograd that accumulates one of these."""
    wanted = tuple([parameter for parameter in parameters if parameter.requires_grad])
    if not wanted:
        return False
    for node, _ in _nodes(wanted):
        node.metadata[_MARK] = True
    del node  # it would be kept here
    return any(_MARK in node.metadata for node, _ in _nodes(wanted))


class _Probe(torch.autograd.Function):
    """One node that has all the parameters before it."""

    @staticmethod
    def forward(ctx: object, *parameters: Tensor) -> Tensor:
        return torch.empty(())

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> None:
        raise AssertionError("nobody differentiates a probe")


def _nodes(parameters: tuple[Tensor, ...]) -> Any:  # torch's types have a node's metadata as a method
    with torch.enable_grad():
        return _Probe.apply(*parameters).grad_fn.next_functions  # type: ignore[no-untyped-call]
