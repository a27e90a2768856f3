"""The compiled parts of a stage, each with a twin that a schedule runs in its place; and `compile=`, which compiles a stage.

    compile_in_place(module, {"backend": "inductor", "mode": "max-autotune"})
    parts = CompiledParts(module, split=True)
    with parts.running():
        output = module(x)             # the twins run in the place of the parts

A twin is compiled with the options of its part, by a backend of `penstock.stage.compiled`. The part itself is only made to look
away while the twin runs: it is left as it was, and both work with the same parameters.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from penstock.errors import StageError, UnknownNameError
from penstock.nest import Value
from penstock.stage.compiled import SplitBackend, StageBackend, on_call
from penstock.stage.cut_graph import in_one_piece
from penstock.stage.engine import nodes_reached
from penstock.stage.joint import parameters_of

if TYPE_CHECKING:
    from torch._dynamo.eval_frame import OptimizeContext

CompileOptions = bool | Mapping[str, Value]
"""What `compile=` takes: True, or options of torch.compile, and `memory_budget`."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NAMES = ("backend", "mode", "options", "dynamic", "fullgraph", "memory_budget")


def check_compile_options(given: object) -> None:
    """Refuse what `compile=` does not know.

    >>> check_compile_options({"backened": "inductor"})
    Traceback (most recent call last):
        ...
    penstock.errors.UnknownNameError: compile has no option 'backened'; did you mean 'backend'?
    """
    if not isinstance(given, bool | Mapping):
        raise StageError(f'compile={given!r}; expected True, or options of torch.compile: {{"backend": "inductor"}}')
    for name in given if isinstance(given, Mapping) else ():
        if name not in _NAMES:
            near = difflib.get_close_matches(str(name), _NAMES, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(_NAMES)}"
            raise UnknownNameError(f"compile has no option {name!r}; {meant}")
    budget = given.get("memory_budget") if isinstance(given, Mapping) else None
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1):
        raise StageError(f"memory_budget={budget!r}; expected a share from 0 (recompute all) to 1 (as torch does)")


def compile_in_place(module: nn.Module, given: CompileOptions) -> None:
    """Compile a stage's module as ``module.compile(**options)`` does: its parameters keep their names, and its class stays.

    compile_in_place(module, {"backend": "aot_eager"})
    """
    check_compile_options(given)
    if given is False:
        return
    if _compiled_call(module) is not None:
        raise StageError(
            "the stage's module is compiled already; give compile=, or a compiled module, and not both of them"
        )
    options = dict(given) if isinstance(given, Mapping) else {}
    budget = options.pop("memory_budget", None)
    for_inner = {name: options.pop(name) for name in ("backend", "mode", "options", "dynamic") if name in options}
    made = torch.compile(lambda x: x, **for_inner)
    inner = _inner_backend(inspect.getclosurevars(made).nonlocals["self"])
    module.compile(backend=StageBackend(inner, memory_budget=budget), dynamic=for_inner.get("dynamic"), **options)


def _inner_backend(context: OptimizeContext) -> object:
    """The backend that torch.compile made of its options."""
    backend: object = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):  # what torch._dynamo wraps around it
        backend = backend._torchdynamo_orig_backend
    named = getattr(backend, "compiler_fn", None)  # torch.compile wraps what is no backend of inductor's
    return named if isinstance(named, StageBackend) else backend


class CompiledPart:
    """One part: where its compiled call is kept, and what else can stand there."""

    def __init__(self, module: nn.Module, *, place: str, context: OptimizeContext, split: bool, alone: bool) -> None:
        self.module = module.get_submodule("_orig_mod") if place == "forward" else module  # an OptimizedModule, or not
        self.attributes = module.__dict__
        self.place = place  # the name of the attribute that is called
        self.backend = (SplitBackend if split else StageBackend)(_inner_backend(context))
        self.context = context  # the options with which it was compiled
        self.compile(alone=alone)

    def compile(self, *, alone: bool) -> None:
        self.called = False  # in a step
        self.hooks = _hooks_inside(self.module)
        self.backend.joints.clear()
        self.eager = _call_of(self.module, alone=alone)
        inside = [part for part in self.module.modules() if has_hooks(part)]
        for wrapper in self.module.modules():  # such as run a module on several devices or replicas
            inside += wrapper.children() if type(wrapper).__module__.startswith("torch.nn.parallel.") else ()
        self.forwards = {part: made for part in inside if (made := _forward_of(part)) is not None}
        fullgraph, dynamic = bool(self.context.fullgraph), self.context._dynamic
        self.twin = torch.compile(self.eager, backend=self.backend, fullgraph=fullgraph, dynamic=dynamic)

    def begin(self) -> None:
        """Before a step. Hooks are traced with the module, and torch.compile does not ask whether they are still the same."""
        if self.hooks != _hooks_inside(self.module):
            self.compile(alone=True)

    def first_call(self, *args: object, **kwargs: object) -> object:
        """The twin's first call in a step, which shows whether there is a graph in it."""
        try:
            # It stands here again where a forward is run a second time, as if the first had not been (`AtOnce`).
            output = self.twin(*args, **kwargs) if self.called else self.told_if_untraced(args, kwargs)
        except Exception:
            self.compile(alone=True)  # torch.compile may have given up on code that was called with something wrong
            raise
        self.called = True
        if self.attributes[self.place] == self.first_call:
            self.attributes[self.place] = self.twin
        return output

    def told_if_untraced(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Value:
        """Call the twin; if torch.compile finds nothing in it that it can compile, say so, and why."""
        breaks = torch._dynamo.utils.counters["graph_break"]
        before = dict(breaks)
        calls: list[None] = []
        with on_call(lambda: calls.append(None)):
            output: Value = self.twin(*args, **kwargs)
        if not calls and next(self.module.parameters(), None) is not None:  # else there may be nothing to compute
            news = [reason for reason, count in breaks.items() if count > before.get(reason, 0)]
            self.backend.tell(StageError(news[-1] if news else "torch.compile found no graph in it"))
        return output


class CompiledParts:
    """All compiled parts of a module, without what data parallelism has put around it; none of them is inside another.

    With `split`, the backward of each comes in two parts. That of a module which is compiled as a whole always does, so that
    all plans share what is compiled. (Parts beside eager ones may share parameters with those, whose hooks would
    fire once for each in a backward in one piece.)
    """

    def __init__(self, module: nn.Module, *, split: bool) -> None:
        whole = _compiled_call(module) is not None
        self.split = split = split or whole
        self.parts: list[CompiledPart] = []
        self.outer = module if whole else None  # compiled itself, with nothing around it
        # While the twins run: where something else stands than before, under which name, and what stood there.
        self.before: list[tuple[dict[str, Value], str, Value]] | None = None
        # Parameters of graphs one of which other code was found to use, too.
        self.used_outside: dict[int, Tensor] = {}
        self.looked_at: int | None = None  # how many graphs there were when `look` last looked for such
        self.parameters: Sequence[Tensor] = ()  # as they were at the beginning of a step
        inside: set[nn.Module] = set()
        for part in module.modules():
            found = _compiled_call(part)
            if found is not None and part not in inside:
                place, context = found
                self.parts.append(CompiledPart(part, place=place, context=context, split=split, alone=whole))
                inside.update(part.modules())
        within = {id(parameter) for part in inside for parameter in part._parameters.values() if parameter is not None}
        beside = {id(p) for part in module.modules() if part not in inside for p in part._parameters.values()}
        self.shared = not within.isdisjoint(beside)  # whether some parameter is used by an eager part as well

    def __bool__(self) -> bool:
        return bool(self.parts)

    def held(self) -> tuple[int, int] | None:
        """Bytes that a microbatch holds from F to I, and from I to W; None before both ran, or if it is not one graph."""
        joints = [joint for part in self.parts for joint in part.backend.joints]
        if len(self.parts) != 1 or len(joints) != 1:
            return None
        to_input, to_weight = joints[0].held_to_input, joints[0].held_to_weight
        return None if to_input is None or to_weight is None else (to_input, to_weight)

    def in_one_piece(self, *, split: bool) -> in_one_piece:
        """Around a forward: which graphs give their gradients by way of autograd.

        If the backward will not be `split` these are all graphs, unless one graph is the whole module. Otherwise they are those
        with a parameter that other code uses, which would be told of two gradients, one by autograd and one by W.
        """
        return in_one_piece(self.used_outside if split or self.outer is not None else True)

    @property
    def looked(self) -> bool:
        """Whether it is known of all graphs who uses their parameters, as far as that matters."""
        return not self.split or self.looked_at == StageBackend.num_graphs

    def look(self, roots: Sequence[Tensor]) -> bool:
        """After a forward: whether it shows parameters of graphs that other code uses too, and nobody knew of.

        That may be eager code of the stage, a hook, or the loss.
        """
        graphs: list[dict[int, Tensor]] = []  # the parameters of each
        outside = {id(root) for root in roots if root.is_leaf}
        for node in nodes_reached(roots):
            parameters = parameters_of(node)
            if parameters is None:
                outside.update(id(getattr(following, "variable", None)) for following, _ in node.next_functions)
            else:
                graphs.append({id(parameter): parameter for parameter in parameters})
        known = len(self.used_outside)
        # A graph has its backward in one piece or in two, for all its parameters: so one leads to another.
        while touched := [graph for graph in graphs if not outside.isdisjoint(graph)]:
            graphs = [graph for graph in graphs if outside.isdisjoint(graph)]
            for graph in touched:
                outside.update(graph)
                self.used_outside.update(graph)
        self.looked_at = StageBackend.num_graphs
        return len(self.used_outside) > known

    def install(self) -> None:
        """From now on calls of the parts go to their twins."""
        if self.before is not None:
            return
        self.before = []
        if self.used_outside or not self.parameters:
            parameters = [parameter for part in self.parts for parameter in part.module.parameters()]
            if list(map(id, parameters)) != list(map(id, self.parameters)):  # others were put there since
                self.used_outside, self.looked_at, self.parameters = {}, None, parameters
        for part in self.parts:
            part.begin()
            calls = [(part.attributes, part.place, part.twin if part.called else part.first_call)]
            # torch.compile sees every forward inside, whatever hooks are around it.
            calls += [(vars(inside), "forward", forward) for inside, forward in part.forwards.items()]
            for table, name, call in calls:
                self.before.append((table, name, table.get(name)))
                table[name] = call

    def remove(self) -> None:
        """All is as it was."""
        for table, name, call in reversed(self.before or ()):
            if call is None:
                del table[name]
            else:
                table[name] = call
        self.before = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this is open, calls of the parts go to their twins."""
        self.install()
        try:
            yield
        finally:
            self.remove()


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than call what it has compiled. (Hooks of what is compiled are compiled, too.)"""
    own = module._backward_hooks or module._backward_pre_hooks or module._forward_hooks or module._forward_pre_hooks
    return bool(own or of_all_modules._has_any_global_hook())


def _hooks_inside(module: nn.Module) -> list[tuple[str, int]]:
    """The numbers of all hooks of a module and its parts; no two hooks of a process have the same."""
    return [(name, key) for part in module.modules() for name in HOOKS for key in part.__dict__[name]]


def _call_of(module: nn.Module, *, alone: bool) -> FunctionType:
    """A call of the module as torch.compile sees it: from a function of its own on, through whatever module that is.

    torch.compile keeps what it has compiled with the code of a function, and only so many versions of it. So a stage that is
    compiled as a whole has code `alone`; equal layers of one stage, each compiled by itself, share theirs.
    """

    def call(*args: Value, **kwargs: Value) -> Value:
        return module._call_impl(*args, **kwargs)

    assert isinstance(call, FunctionType), "torch.compile keeps its code with that of a function"
    if alone:
        call.__code__ = call.__code__.replace(co_name="call_stage")
    return call


def _forward_of(module: nn.Module) -> Callable[..., Value] | None:
    """A forward to put in the place of torch's own where something is around it; None: it can stay.

    torch.compile does not look into some hooks (those of `fully_shard`), nor into torch's own wrappers, and gives up on the call
    that has them. It then compiles the forward inside by itself, but not that of a class of torch's, such as nn.Sequential: it
    does not begin in such code.
    """
    inner = type(module).forward
    if "forward" in module.__dict__ or not str(inner.__module__).startswith("torch."):
        return None

    def forward(*args: Value, **kwargs: Value) -> Value:
        return inner(module, *args, **kwargs)

    return forward


def _compiled_call(part: nn.Module) -> tuple[str, OptimizeContext] | None:
    """Under which name a compiled module keeps its compiled call, and the options with which it was compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # it takes long to import, and nothing is compiled without it
        return None
    if isinstance(part, dynamo.OptimizedModule):
        name, context = "forward", part.dynamo_ctx
    elif part._compiled_call_impl is not None:  # module.compile()
        name, call = "_compiled_call_impl", part._compiled_call_impl
        context = inspect.getclosurevars(call).nonlocals.get("self")
    else:
        return None
    return (name, context) if isinstance(context, dynamo.OptimizeContext) else None
