"""Forward hooks of modules that are run twice: those that only look on see one forward, those that take part see both.

    hooks = RepeatedHooks([module])
    with hooks.noting() as noted:
        output = module(x)                  # all hooks are called
    with hooks.only(noted.acting):
        output = module(x)                  # only those that took part the first time

A hook takes part if it returns something, or if it leaves a trace in what is computed: it changes a tensor that it was given
in place, registers a hook on it or asks it to keep its gradient, draws random numbers, sets or changes a buffer or a
parameter of its module, or, before the forward, sets a tensor of its module (as weight normalisation and pruning do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from penstock.nest import Value, tensors_in
from penstock.stage.buffers import RandomState, Tables, accelerators

Hook = Callable[..., Value]
Table = dict[int, Hook]


class HooksSeen:
    """What the hooks of one forward did."""

    def __init__(self) -> None:
        self.acting: set[int] = set()  # those that took part, by the number of their handle
        self.same = True  # without the others a forward saves the same tensors for its backward


class RepeatedHooks:
    """The forward hooks of some modules and of their parts, and those of all modules.

    Those inside a compiled part belong to its graph, and stay out.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.tables: list[tuple[Table, bool]] = [  # and whether it is called before the forward
            (of_all_modules._global_forward_pre_hooks, True),
            (of_all_modules._global_forward_hooks, False),
        ]
        parts = [*modules]
        while parts:
            part = parts.pop()
            self.tables += [(part._forward_pre_hooks, True), (part._forward_hooks, False)]
            if "_orig_mod" not in part._modules and part._compiled_call_impl is None:
                parts += part.children()

    @contextmanager
    def noting(self, saved: Callable[[], int] = lambda: 0) -> Iterator[HooksSeen]:
        """Inside, hooks run as ever, and those that take part are noted. `saved` counts the tensors saved for a backward."""
        found = HooksSeen()

        def note(number: int, hook: Hook, *, before: bool) -> Hook:
            def noted(part: nn.Module, *args: object, **kwargs: object) -> Value:
                given = list(tensors_in((args, kwargs)))
                held = {**vars(part), **part._buffers, **part._parameters}  # so that no address is used again meanwhile
                was, count = _trace(part, given), saved()
                result = hook(part, *args, **kwargs)
                if result is not None or _trace(part, given) != was or (before and _sets_tensors(part, held, given)):
                    found.acting.add(number)
                elif saved() != count:
                    found.same = False
                return result

            return noted

        tables = [
            (table, dict(table), {key: note(key, hook, before=before) for key, hook in table.items()})
            for table, before in self.tables
            if table
        ]
        for table, _, notes in tables:
            table.update(notes)
        try:
            yield found
        finally:
            for table, hooks, notes in tables:
                for key, noted in notes.items():
                    if table.get(key) is noted:  # else it has removed itself
                        table[key] = hooks[key]

    @contextmanager
    def only(self, acting: frozenset[int]) -> Iterator[None]:
        """Inside, only these hooks are there."""
        tables = Tables(table for table, _ in self.tables if table)
        try:
            for table, hooks in tables.before:
                for key in hooks.keys() - acting:
                    table.pop(key, None)  # a module that has two parents is met twice
            yield
        finally:
            tables.put_back()


def _trace(part: nn.Module, given: list[Tensor]) -> list[object]:
    """What differs after a hook that takes part."""
    own = [*part._buffers.values(), *part._parameters.values()]
    found: list[object] = [
        (id(tensor), tensor._version) for tensor in own if tensor is not None and not tensor.is_inference()
    ]
    found += [
        (tensor._version, len(tensor._backward_hooks or ()), tensor.retains_grad)
        for tensor in given
        if not tensor.is_inference()
    ]
    random = RandomState(accelerators(torch.device("cpu"), given))
    return found + [state.cpu().numpy().tobytes() for state in (random.host, *(state for _, state in random.devices))]


def _sets_tensors(part: nn.Module, held: dict[str, object], given: list[Tensor]) -> bool:
    """Whether the module has got a tensor. One that it was given counts not: whoever keeps that looks on."""
    return any(
        isinstance(value, Tensor) and held.get(name) is not value and not any(value is tensor for tensor in given)
        for name, value in vars(part).items()
    )
