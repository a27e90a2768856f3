"""Forwards whose graph nobody wants, run without one: that takes less time, and holds nothing. For captured stages alone.

    bare = WithoutGraph((module,), devices)
    key = bare.key(before, (args, kwargs))
    output, flags = bare.run(key, call, args, kwargs)      # flags: which outputs require a gradient; None: they have graphs

A user's own Python may keep values for later, which then have no graph, count, or branch so that one call says nothing of the
next: such modules are none of those for which this is made. Operators, too, may go other ways without a graph: `matmul` folds
what needs a gradient, layers have quick ways for evaluation. So the first call of each kind (shapes, modes, what is trained) is
made both ways. Only if all bits of the outputs and of the random state are the same, and nobody warned, do the next ones go
without a graph. It stays for modules with hooks (they see outputs), under autocast (it would keep casts of weights that have no
graph for the second run), for forwards that talk to other processes, and where there is a buffer of which there is no copy:
should a forward change that, its first run is all there is.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import StageError
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.buffers import Before, Buffers
from penstock.stage.random_state import RandomState
from penstock.stage.repeated_hooks import any_hooks

Call = Callable[..., Any]  # call(args, kwargs)
Flags = tuple[bool, ...]
_MOST = 8  # kinds of calls that are tried: where every batch has other shapes, trying would cost more than it saves
_MESSAGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class WithoutGraph:
    """What is known of the forwards of some modules: which kinds of calls need no graph."""

    def __init__(self, modules: tuple[nn.Module, ...], devices: Iterable[torch.device]) -> None:
        self.modules, self.devices = modules, tuple(devices)
        self.known: dict[Hashable, Flags | None] = {}  # by the kind of a call; None: it needs its graph

    def key(self, before: Before, given: tuple[tuple[object, ...], dict[str, object]]) -> Hashable | None:
        """The kind of a call; None: it needs its graph. `before` are the buffers as they are."""
        parameters = [p for module in self.modules for p in module.parameters()]
        tensors = list(tensors_in(given))
        if any(type(p) is not nn.Parameter for p in parameters) or not all(map(_is_plain, tensors)):
            return None  # spread over ranks, or of a kind that nobody here knows
        here = {one.device.type for one in (*tensors, *parameters)} | {"cpu"}
        if any(map(torch.is_autocast_enabled, here)) or any_hooks(self.modules):
            return None
        if any(one.value is None for one in before.seen):
            return None
        shapes = tuple((one.shape, one.dtype, one.requires_grad) for one in tensors)
        rest = tuple(one for one in (*given[0], *given[1].values()) if isinstance(one, bool | int | float | str | None))
        return before.modes, tuple(p.requires_grad for p in parameters), shapes, rest

    def run(
        self, key: Hashable | None, call: Call, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Value, Flags | None]:
        """The output; and, if it was made without a graph, which of its tensors would require a gradient."""
        if key is None or (key not in self.known and len(self.known) >= _MOST):
            return call(args, kwargs), None
        if key not in self.known:
            trial = self._trial(call, args, kwargs)
            output = call(args, kwargs)
            self.known[key] = None
            if trial is not None and trial == _outcome(output, self.devices):
                self.known[key] = tuple(one.requires_grad for one in tensors_in(output))
            return output, None
        flags = self.known[key]
        if flags is None:
            return call(args, kwargs), None
        leaves = [(one, one._version) for one in tensors_in((args, kwargs)) if one.requires_grad]
        with torch.no_grad():
            output = call(args, kwargs)
        if any(one._version != version for one, version in leaves):
            self.known[key] = None
            raise StageError(
                "the forward of a stage changed an input that requires a gradient in place, which forwards before it had left "
                "alone; let it work on a clone()"
            )
        return output, flags

    def _trial(self, call: Call, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object] | None:
        """What a run without a graph gives, which leaves nothing behind; None if it does not go like the other."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            with _Silence() as silence:
                self._alone(call, args, kwargs)
            if silence.broken:
                return None
        return self._alone(call, args, kwargs)

    def _alone(self, call: Call, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object] | None:
        random, before = RandomState(self.devices), Buffers(self.modules).look(())
        args, kwargs = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs))
        try:
            with warnings.catch_warnings(record=True, action="always") as told, torch.no_grad():
                outcome = _outcome(call(args, kwargs), self.devices)
        except Exception:  # noqa: BLE001  whatever it is: the run with a graph either has it too, or has none
            return None
        finally:
            random.set()
            before.put_back()
        changed = any(one._version for one in tensors_in((args, kwargs)))
        return None if told or changed else outcome


def _outcome(output: object, devices: Iterable[torch.device]) -> list[object]:
    """The outputs of a run and the random state after it, to be compared bit by bit; it holds none of their memory."""
    random = RandomState(devices)
    return [_digest(tensor) for tensor in (*tensors_in(output), random.host, *(state for _, state in random.devices))]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _digest(tensor: Tensor) -> tuple[object, ...]:
    """How a tensor lies in memory, and its bits.

    >>> _digest(torch.zeros(2)) == _digest(torch.zeros(2)), _digest(torch.zeros(2)) == _digest(-torch.zeros(2))
    (True, False)
    >>> _digest(torch.ones(4)[::2]) == _digest(torch.ones(4)[::2])
    True
    """
    if not _is_plain(tensor):
        return (object(),)  # like no other
    bits = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.shape, tensor.stride(), tensor.dtype, hashlib.sha256(bits.numpy().data).hexdigest()


class _Silence(TorchDispatchMode):
    """Inside, what would talk to other processes raises instead: those may not be making the same trial."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.broken = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func.namespace in _MESSAGES:
            self.broken = True
            raise StageError("a forward that talks to other processes is not tried without a graph")
        return func(*args, **(kwargs or {}))
