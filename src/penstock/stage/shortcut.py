"""Calls of a compiled stage that go past torch.compile's frames, and where they can past autograd.

    shortcuts = Shortcuts(eager, twin)      # what torch.compile was given, and what it made of that
    output = shortcuts(x)                   # as the twin; from its second call on in a shorter way
    found = shortcuts.held(args, kwargs)    # without autograd: the output, and what the backward needs; or None

For a call of a compiled function torch.compile enters a frame, checks its guards, and runs the code that it wrote in the place
of the function's: that reads parameters, calls the graph and puts the result together. On a stage of small layers this is a
quarter of a forward, and little of it are the guards. So guards and code are called here directly. It is the same code under
the same guards: where none holds, the twin is called, which compiles anew if need be. That code is found where torch 2.13
keeps it, and read as Python 3.11 writes it; where either is otherwise, the twin is called, always.

Code that calls one graph and returns its outputs, and does nothing else, needs no autograd either: `held` keeps what the graph
saved, and gives leaves as outputs. The backward then is a call of the backward graph.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from penstock.errors import StageError
from penstock.nest import Value, tensors_in
from penstock.stage.cut_graph import GraphWork, accumulate_graphs
from penstock.stage.joint import Joint, is_output_of_joint
from penstock.stage.listeners import Listeners

_C: Any = torch._C
# Without it, in a torch that has another name for it, every call takes the long way.
_entries: Callable[[CodeType], Sequence[Any]] = getattr(
    _C._dynamo.eval_frame, "_debug_get_cache_entry_list", lambda code: ()
)
_Frame = dict[str, Value]  # the variables of a call, of which guards are asked


@final
class HeldGraph:
    """What a forward without autograd leaves for its backward. One owner, consumed once."""

    __slots__ = ("grads", "joint", "leaves", "outputs", "parameters", "saved", "versions", "work")

    def __init__(self, joint: Joint, args: Sequence[Value], outputs: Sequence[Value], saved: list[Value]) -> None:
        self.joint = joint
        self.saved = saved
        self.leaves = [args[place] for place in joint.wanted]
        self.parameters = [args[place] for place in joint.weights]
        self.outputs: list[Tensor] = []
        self.versions = joint.versions((*args, *outputs), saved)
        self.grads: list[Tensor | None] | None = None  # of the outputs, while nothing is to be hurried for
        self.work: GraphWork | None = None

    def input_pass(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """The gradients of the inputs, found in their `.grad`; if none needs one, all of it waits."""
        if len(roots) == len(self.outputs) == 1:
            self.grads = list(grads)
        else:
            found = {id(root): grad for root, grad in zip(roots, grads, strict=True)}
            self.grads = [found.get(id(output)) for output in self.outputs]
        self.outputs = []
        if self.leaves:
            self._differentiate()

    def weight_pass(self, listeners: Listeners | None) -> None:
        """The gradients of the parameters."""
        if self.grads is not None:
            self._differentiate()
        if self.work is not None:
            work, self.work = self.work, None
            accumulate_graphs([work], listeners)

    def _differentiate(self) -> None:
        joint = self.joint
        saved, self.saved = self.saved, []
        grads, self.grads = self.grads or [], None
        if all(grad is None for grad in grads):
            return
        if joint.versions((), saved) != self.versions:
            raise StageError(
                "a parameter or an input of a compiled stage was changed in place between a forward and its backward, which "
                "needs it as it was. Change parameters after the step, or leave this stage uncompiled"
            )
        with torch.no_grad():
            found, self.work = joint.differentiated(saved, grads, self.parameters)
        for leaf, grad in zip(self.leaves, found, strict=True):
            if grad is not None:  # another stage of this rank may have added its part already
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        self.leaves, self.parameters = [], []


class _NotHeldError(Exception):
    """An input has a history of its own, or hooks: its gradient is autograd's to pass on."""


class _Written(NamedTuple):
    """Code that torch.compile wrote, made callable."""

    attached: FunctionType  # with autograd
    detached: FunctionType  # without; what `graph` keeps is then to be taken from there
    graph: _Graph


class _Graph:
    """Stands in the place of the graph in code that is called without autograd."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self.held: HeldGraph | None = None

    def __call__(self, *args: Value) -> Value:
        joint = self.joint
        for place in joint.wanted:
            given = args[place]
            if given.grad_fn is not None or given._backward_hooks or given._post_accumulate_grad_hooks:
                raise _NotHeldError
        outputs, saved = joint.computed(args)
        held = self.held = HeldGraph(joint, args, outputs, saved)
        for place in joint.rooted:
            outputs[place] = outputs[place].detach().requires_grad_()
            held.outputs.append(outputs[place])
        return tuple(outputs)


class Shortcuts:
    """Of one compiled part: in its place during a step. `begin` forgets what torch.compile would no longer run."""

    def __init__(self, eager: FunctionType, twin: Callable[..., Value]) -> None:
        self.eager, self.twin = eager, twin
        (self.module,) = inspect.getclosurevars(eager).nonlocals.values()
        self.read: dict[CodeType, _Written | None] = {}
        self.found: list[tuple[Callable[[_Frame], bool], _Written]] = []
        self.stance: object = None  # under which it was found

    def begin(self) -> None:
        """Before a step: what was found stays while torch.compile has that code, and is told to run it (`set_stance`)."""
        if not self.found:
            return
        there = {id(entry.code) for entry in _entries(self.eager.__code__)}
        mine = {id(written.attached.__code__) for _, written in self.found}
        if not mine <= there or self.stance is None or self.stance != _stance():
            self.found = []

    def __call__(self, *args: Value, **kwargs: Value) -> Value:
        frame = {"args": args, "kwargs": kwargs, "module": self.module}
        for holds, written in self.found:
            if holds(frame):
                return written.attached(*args, **kwargs)
        output = self.twin(*args, **kwargs)
        if torch.is_grad_enabled():
            with suppress(AttributeError, LookupError, TypeError):  # of a torch that keeps its code in another way
                self._learn(frame, output)
        return output

    def held(self, args: tuple[Value, ...], kwargs: dict[str, Value]) -> tuple[Value, HeldGraph] | None:
        """Call without autograd; None if that is not possible, or not known to be, or if somebody looks at what autograd does."""
        if _C._autograd._top_saved_tensors_default_hooks(False) is not None or torch.is_anomaly_enabled():
            return None
        frame = {"args": args, "kwargs": kwargs, "module": self.module}
        for holds, written in self.found:
            if holds(frame):
                try:
                    with torch.no_grad():
                        output = written.detached(*args, **kwargs)
                except _NotHeldError:
                    return None
                held, written.graph.held = written.graph.held, None
                return output, held  # type: ignore[return-value]
        return None

    def _learn(self, frame: _Frame, output: Value) -> None:
        """After a call in the long way: find the code that it has run, if that was compiled (see `torch.compiler.set_stance`)."""
        tensors = tensors_in(output)
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        if not trained or not all(map(is_output_of_joint, trained)) or len(set(map(id, tensors))) < len(tensors):
            return
        for entry in _entries(self.eager.__code__)[:1]:  # the last that ran
            code = entry.code
            if code not in self.read:
                self.read[code] = _written(code, self.eager)
            written = self.read[code]
            if written is not None and entry.guard_manager.check(frame):
                self.found.append((entry.guard_manager.check, written))
                self.stance = _stance()


def _stance() -> object:
    """What torch.compile has been told to do with code that it has compiled; None: nobody knows."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)


_UTILITIES = "__import_torch_dot__dynamo_dot_utils"
_MARKS = ("record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit")  # for the profiler alone
_NO_MARKS = SimpleNamespace(**dict.fromkeys(_MARKS, lambda *_: None))
# What such code consists of, in Python 3.11. Anything else (a jump, an instruction of a later Python) is not trusted.
_INSTRUCTIONS = """
    NOP RESUME COPY_FREE_VARS PUSH_NULL POP_TOP SWAP COPY LOAD_CONST LOAD_FAST LOAD_DEREF LOAD_GLOBAL LOAD_ATTR LOAD_METHOD
    STORE_FAST DELETE_FAST PRECALL CALL CALL_FUNCTION_EX KW_NAMES BINARY_SUBSCR UNPACK_SEQUENCE RETURN_VALUE
    BUILD_TUPLE BUILD_LIST BUILD_MAP BUILD_CONST_KEY_MAP LIST_EXTEND LIST_TO_TUPLE DICT_UPDATE DICT_MERGE
"""
_KNOWN = frozenset(_INSTRUCTIONS.split())


def _written(code: CodeType, eager: FunctionType) -> _Written | None:
    """The code, if it does nothing but call one graph and returns that graph's outputs."""
    steps = list(dis.get_instructions(code))
    names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    graphs = [name for name in names if name.startswith("__compiled_fn")]
    marks = sum(step.argval in _MARKS for step in steps)
    calls = sum(step.opname.startswith("CALL") for step in steps)
    known = all(step.opname in _KNOWN for step in steps) and not code.co_exceptiontable
    if len(graphs) != 1 or code.co_freevars != ("module",) or not known or calls != 1 + marks:
        return None
    if names - {graphs[0], _UTILITIES}:
        return None
    call: Value = eager.__globals__.get(graphs[0])
    while hasattr(call, "_torchdynamo_orig_callable"):  # what torch.compile wraps around it
        call = call._torchdynamo_orig_callable
    joint = getattr(call, "joint", None)
    if joint is None:
        return None
    graph = _Graph(joint)
    made = [
        FunctionType(code, {graphs[0]: run, _UTILITIES: _NO_MARKS}, code.co_name, None, eager.__closure__)
        for run in (joint, graph)
    ]
    return _Written(made[0], made[1], graph)
