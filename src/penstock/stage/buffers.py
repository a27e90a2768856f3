"""What a run changes beside giving an output: buffers, in place or by putting others there, and random states. How to go back:

    watch = Buffers([module])
    before = watch.look(modes_of(module))
    module(x)
    watch.learn(before)             # which buffers a run in these modes changes
    now = before.again()            # the same buffers as they are now
    before.put_back()               # as if it had not run
    module(x)
    now.put_back()

A buffer that a run is known to change is copied at every look. Of the others, which a run may change now and then, there is one
copy for as long as they hold the same; those that are large are not copied, and if one changes after all it is `lost`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.nest import Value, map_tensors, tensors_in

_SMALL = 1 << 20
"""Bytes up to which a buffer is copied though it is not known to change."""

CONTAINERS = (
    dict,
    OrderedDict,
    defaultdict,
    list,
    set,
)  # and nothing that derives from them: it may refuse to be filled

Modes = tuple[bool, ...]
Table = dict[str, Tensor | None]


def modes_of(module: nn.Module) -> Modes:
    """Whether each part trains: what a forward does to its buffers goes by that, and a part may differ from the whole.

    >>> modes_of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1).eval()))
    (True, True, False)
    """
    return tuple(part.training for part in module.modules())


class Tables:
    """Tables (dicts, lists, queues, sets) in which modules keep what was set on them, as they were when this was made."""

    def __init__(self, tables: Iterable[Value]) -> None:
        self.before = [(table, table.copy()) for table in tables]

    def changed(self) -> list[tuple[Value, Value]]:
        """Each table that holds other things by now, and what was in it."""
        return [(table, old) for table, old in self.before if not _same(table, old)]

    def put_back(self) -> None:
        for table, old in self.changed():
            table.clear()
            (table.update if isinstance(table, dict | set) else table.extend)(old)  # a dict may have any attribute


def _same(table: Value, old: Value) -> bool:
    """Whether the same objects are in it, in the same order."""
    if isinstance(table, dict):
        return _same(list(table), list(old)) and _same(list(table.values()), list(old.values()))
    return len(table) == len(old) and all(map(is_, table, old))


class _Seen(NamedTuple):
    """A buffer at the time of a look."""

    name: str
    buffer: Tensor
    version: int
    value: Tensor | None  # a copy
    changes: bool  # it is known to change, perhaps past autograd's count, or nothing is known yet

    @property
    def moved(self) -> bool:
        return self.buffer._version != self.version


class Before:
    """The buffers as they were at the time of a look."""

    def __init__(self, modes: Modes, tables: Iterable[Table], seen: list[_Seen]) -> None:
        self.modes = modes
        self.tables = Tables(tables)
        self.seen = seen

    def lost(self) -> list[str]:
        """Buffers that were changed in place since and of which there is no copy."""
        return [one.name for one in self.seen if one.value is None and one.moved]

    @torch.no_grad()
    def put_back(self) -> None:
        """The buffers that were there hang in their places again, and hold what they held.

        Values are written past autograd's count of changes: graphs of other microbatches may refer to a buffer, and what
        those read is not what changes here (a batch norm's running statistics).
        """
        self.tables.put_back()
        for one in self.seen:
            if one.value is not None and (one.changes or one.moved):
                one.buffer.data.copy_(one.value)

    def again(self) -> Before:
        """A look at the same buffers, as far as they are not as they were."""
        away = [one for one in self.seen if one.value is not None and (one.changes or one.moved)]
        seen = [one._replace(value=_copy(one.buffer), changes=True) for one in away]
        return Before(self.modes, [table for table, _ in self.tables.before], seen)


class Buffers:
    """The buffers of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {part: name for module in modules for name, part in module.named_modules()}
        self.tables: list[tuple[str, Table]] = [(name, part._buffers) for part, name in parts.items()]
        # Changed past autograd's count, and perhaps not by the run that is learnt from: that one may leave a layer out.
        self.silent = {
            f"{name}.{leaf}".lstrip("."): part
            for part, name in parts.items()
            if isinstance(part, _NormBase)
            for leaf in ("running_mean", "running_var")
        }
        self.changing: dict[Modes, set[str]] = {}  # by the modes of a run that has been learnt from
        self.copies: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}  # of those that are not known to change
        self.attributes: Table = {}  # other tensors, by name, that count like buffers

    def look(self, modes: Modes) -> Before:
        """Before a run. All are copied, as long as no run in these modes has been learnt from."""
        known = self.changing.get(modes)
        seen: dict[int, _Seen] = {}
        for number, (part, table) in enumerate((*self.tables, ("", self.attributes))):
            for name, buffer in table.items():
                if buffer is not None and id(buffer) not in seen and not buffer.is_inference():
                    full = f"{part}.{name}" if part else name
                    changes = known is None or full in known or (full in self.silent and self.silent[full].training)
                    value = _copy(buffer) if changes else self._copied((number, full), buffer)
                    seen[id(buffer)] = _Seen(full, buffer, buffer._version, value, changes)
        return Before(modes, [table for _, table in self.tables if table], list(seen.values()))

    def _copied(self, place: tuple[int, str], buffer: Tensor) -> Tensor | None:
        """The copy of one that is not known to change, made anew if it has changed."""
        if not _is_small(buffer):
            return None
        found = self.copies.get(place)
        if found is None or found[0] is not buffer or found[1] != buffer._version:
            found = self.copies[place] = buffer, buffer._version, _copy(buffer)
        return found[2]

    def learn(self, before: Before) -> None:
        """After a run that went well. Values are compared once for each modes: on a device the host waits for the answer."""
        known = self.changing.get(before.modes)
        if known is not None:
            known.update(before.lost())
            return
        before.seen = [one._replace(changes=_changed(one)) for one in before.seen]
        before.seen = [one if one.changes or _is_small(one.buffer) else one._replace(value=None) for one in before.seen]
        self.changing[before.modes] = {one.name for one in before.seen if one.changes}


def buffer_tables(module: nn.Module) -> list[Table]:
    """Where the module and its parts keep their buffers, as far as they have some."""
    return [part._buffers for part in module.modules() if part._buffers]


def copied_out(output: Value, tables: list[Table]) -> Value:
    """The output, with copies of what lies in a buffer, which must not go out as part of a stage's output: the next forward may
    write to it before this one's output has been sent, read or put together with others.

    >>> module = nn.BatchNorm1d(2)
    >>> output = copied_out({"mean": module.running_mean}, buffer_tables(module))
    >>> output["mean"] is module.running_mean, torch.equal(output["mean"], module.running_mean)
    (False, True)
    """
    # What has a gradient is no buffer: seen without a call for each value, since captured stages return tuples.
    for value in output if type(output) is tuple else (output,):
        if type(value) is not Tensor or not value.requires_grad:
            break
    else:
        return output
    tensors = [tensor for tensor in tensors_in(output) if not tensor.requires_grad]
    if not tensors:
        return output
    places = {memory_of(buffer) for table in tables for buffer in table.values()} - {0}
    inside = {id(tensor) for tensor in tensors if memory_of(tensor) in places}
    if not inside:
        return output
    return map_tensors(lambda tensor: tensor.clone() if id(tensor) in inside else tensor, output)


def memory_of(value: object) -> int:
    """Where the memory of a tensor begins, of a DTensor that of its part; 0: it has none of its own, or is no tensor."""
    local = getattr(value, "_local_tensor", value)
    try:
        return local.untyped_storage().data_ptr() if isinstance(local, Tensor) else 0
    except (RuntimeError, NotImplementedError):  # a sparse tensor, for one
        return 0


def _is_small(buffer: Tensor) -> bool:
    return buffer.numel() * buffer.element_size() <= _SMALL  # a sparse one has no `nbytes`


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


def _changed(one: _Seen) -> bool:
    """Whether it was changed in place. A batch norm changes its statistics past autograd's count, so values are compared."""
    if one.moved or one.value is None:
        return one.moved
    local, value = (getattr(tensor, "_local_tensor", tensor) for tensor in (one.buffer, one.value))
    if local.layout is not torch.strided:  # those cannot be compared; nothing but torch's own operators changes them
        return False
    return not torch.equal(local, value.to(local.device))


def accelerators(device: torch.device, tensors: Iterable[Tensor]) -> set[torch.device]:
    """The devices whose random state a forward may draw from: the stage's, whether or not it has tensors, and its tensors'.

    >>> accelerators(torch.device("cpu"), [torch.ones(1), torch.ones(1, device="meta")])
    set()
    """
    return {one for one in (device, *(tensor.device for tensor in tensors)) if one.type not in ("cpu", "meta")}


class RandomState:
    """The random state of the host and of some devices, as it was when this was made."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.host = torch.get_rng_state()
        self.devices = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def set(self) -> None:
        torch.set_rng_state(self.host)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)


def remember(module: object, args: Sequence[object]) -> Callable[[], None]:
    """The random state and the buffers as they are now, as a function that brings them back."""
    modules = [module] if isinstance(module, nn.Module) else []
    before = Buffers(modules).look(())
    tensors = [*(b for one in modules for b in one.buffers()), *(arg for arg in args if isinstance(arg, Tensor))]
    random = RandomState(accelerators(torch.device("cpu"), tensors))

    def rewind() -> None:
        random.set()
        before.put_back()

    return rewind
