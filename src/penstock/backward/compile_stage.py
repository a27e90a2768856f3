"""`compile=`, which compiles a stage; and the compiled parts of a stage in a step, whoever has compiled them.

    compile_in_place(module, {"backend": "inductor", "mode": "max-autotune"})
    compiled = CompiledStage(module, deferral)
    with compiled.running(split=True):
        output = module(x)             # graphs come from a `SplitBackend`

A module that `compile=` has compiled has such a backend. In forwards and input passes of a split backward, parts that the user
has compiled are directed to one by ``torch.compiler.set_stance(force_backend=)``; in full backwards they run as they are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.backward.split_backend import SplitBackend, SplitGraph, recording_graphs
from penstock.errors import StageError
from penstock.nest import Value
from penstock.stage.compile_options import CompileOptions, check_compile_options
from penstock.stage.deferred import Deferral, say_not_deferred
from penstock.stage.engine import nodes_reached
from penstock.stage.pipeline_stage import PipelineStage

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def compile_once(stage: PipelineStage, module: nn.Module) -> None:
    """Do what `compile` asked for. `module` is the user's own, inside of what data parallelism has put around it."""
    compile_in_place(module, stage._compile)
    stage._compile = False


def compile_in_place(module: nn.Module, given: CompileOptions) -> None:
    """Compile a stage's module as ``module.compile(**options)`` does: its parameters keep their names, and its class stays.

    compile_in_place(module, {"backend": "aot_eager"})
    """
    check_compile_options(given)
    if given is False:
        return
    if _context_of(module) is not None:
        raise StageError(
            "the stage's module is compiled already; give compile=, or a compiled module, and not both of them"
        )
    options: dict[str, Value] = {}
    if isinstance(given, Mapping):
        options.update(given)
    budget = options.pop("memory_budget", None)
    for_inner = {name: options.pop(name) for name in ("backend", "mode", "options", "dynamic") if name in options}
    made = torch.compile(lambda x: x, **for_inner)
    backend = SplitBackend(_backend_of(inspect.getclosurevars(made).nonlocals["self"]), memory_budget=budget)

    def call_stage(*args: Value, **kwargs: Value) -> Value:
        return module._call_impl(*args, **kwargs)

    # torch.compile does not begin in code of torch's, as that of nn.Sequential. And it keeps only so many versions of a code.
    call_stage.__code__ = call_stage.__code__.replace()
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True  # of code that is called from here, too
    dynamic = for_inner.get("dynamic")
    module._compiled_call_impl = torch.compile(call_stage, backend=backend, dynamic=dynamic, **options)


class CompiledStage:
    """What torch.compile has compiled in a module, without what data parallelism has put around it."""

    def __init__(self, module: nn.Module, deferral: Deferral | None = None) -> None:
        self.module = module
        self.deferral = deferral  # of a split backward
        self.parts: list[nn.Module] = []  # none of them is inside another
        inside: set[nn.Module] = set()
        backends: list[object] = []
        for part in module.modules():
            context = _context_of(part)
            if context is not None and part not in inside:
                self.parts.append(part)
                backends.append(_backend_of(context))
                inside.update(part.modules())
        self.is_inductor = any(SplitBackend(getattr(one, "inner", one)).is_inductor for one in backends)
        self.own = next((one for one in backends if isinstance(one, SplitBackend)), None)
        self.backend: SplitBackend | None = None  # what parts are directed to
        if deferral is not None and self.own is None and backends:
            if all(one == backends[0] for one in backends):
                self.backend = SplitBackend(backends[0])
            else:
                say_not_deferred("parts that are compiled by different backends")
        self.inner = backends[0] if backends else None
        self.hooks = _hooks_inside(self.parts)
        self.forwards = _forwards_inside(self.parts)
        self.graphs: list[SplitGraph] | None = None  # that the first forward has called
        self.looking = False  # in this step, in which nothing is deferred
        self.looks = 0  # forwards of this step that `look` has seen
        self.known: list[object] = []  # parameters and modes of the parts when they were last looked at

    def __bool__(self) -> bool:
        return bool(self.parts)

    def begin_step(self) -> None:
        """Prepare for a step. In the first one, and if parameters or modes have changed since, nothing is deferred."""
        hooks = _hooks_inside(self.parts)
        if hooks != self.hooks:  # they are traced with the module, and torch.compile does not look at them again
            self.hooks, self.forwards = hooks, _forwards_inside(self.parts)
            before = self.backend or self.own or SplitBackend(self.inner)
            version = before.version + 1
            self.backend = SplitBackend(before.inner, memory_budget=before.memory_budget, version=version)
        if self.deferral is not None:
            known: list[object] = [part.training for part in self.module.modules()]
            for parameter in self.module.parameters():
                known += (parameter, parameter.requires_grad)
            if len(known) != len(self.known) or any(
                one is not other for one, other in zip(known, self.known, strict=True)
            ):
                self.known, self.looking = known, True
                self.deferral.whole = {}
            self.deferral.looking = self.looking

    def end_step(self, count: int) -> None:
        """Look again in the next step if this one has not come to all of its `count` forwards with a split backward."""
        if self.looking and self.looks < count:
            self.known = []
        self.looking, self.looks = False, 0
        if self.deferral is not None:
            self.deferral.looking = False

    @contextmanager
    def running(self, *, split: bool) -> Iterator[None]:
        """Wrap a forward, or an input pass: parts are directed to a `SplitBackend` where that is needed."""
        if self.forwards:
            tables, self.forwards = self.forwards, []
            for module, forward in tables:
                vars(module)["forward"] = forward
            try:
                with self.running(split=split):
                    yield
            finally:
                self.forwards = tables
                for module, _ in tables:
                    del vars(module)["forward"]
        elif self.graphs is None:
            with self.first_call(), self.running(split=split):
                yield
        elif self.backend is None or not (split or self.backend.version) or not _stance_is_free():
            yield
        else:
            with torch.compiler.set_stance("default", force_backend=self.backend):
                yield

    @contextmanager
    def first_call(self) -> Iterator[None]:
        """Wrap the first forward; if torch.compile finds nothing in it that it can compile, say so, and why."""
        counters: Any = torch._dynamo.utils.counters
        breaks = dict(counters["graph_break"])
        graphs = counters["stats"]["unique_graphs"]
        self.graphs = []
        try:
            with recording_graphs() as self.graphs:
                yield
        except BaseException:
            self.graphs = None
            raise
        for graph in self.graphs:
            if graph.whole and self.deferral is not None:
                say_not_deferred(f"compiled {graph.whole}")
        if not self.graphs and counters["stats"]["unique_graphs"] == graphs:
            news = [reason for reason, count in counters["graph_break"].items() if count > breaks.get(reason, 0)]
            if news:
                (self.backend or self.own or SplitBackend(self.inner)).tell(f"StageError: {news[-1]}")

    def look(self, roots: Sequence[Tensor]) -> None:
        """After a forward in which nothing was deferred: find the parameters of graphs that other code uses, too.

        That may be eager code of the stage, a hook, or the loss. Their gradients, and those of all other parameters of such a
        graph, are not deferred: hooks would hear of two gradients, one of I and one of W.
        """
        assert self.deferral is not None, "only a split backward defers"
        self.looks += 1
        graphs: list[dict[int, Tensor]] = []  # the parameters of each
        outside = {id(root) for root in roots if root.is_leaf}
        for node in nodes_reached(roots):
            leaves = [getattr(following, "variable", None) for following, _ in node.next_functions]
            used: dict[int, Tensor] = {}
            for leaf in leaves:
                if isinstance(leaf, nn.Parameter):  # other leaves are inputs of the stage
                    used[id(leaf)] = leaf
            if node.name().startswith("CompiledFunction"):
                graphs.append(used)
            else:
                outside.update(used)
        while touched := [graph for graph in graphs if not outside.isdisjoint(graph)]:
            graphs = [graph for graph in graphs if outside.isdisjoint(graph)]
            for graph in touched:
                outside.update(graph)
                self.deferral.whole.update(graph)
        self.deferral.skip = {**self.deferral.skip, **self.deferral.whole}

    def held(self) -> tuple[int, int] | None:
        """Bytes that a microbatch holds from F to I, and from I to W; None before both ran, or if it is not one graph."""
        if self.parts != [self.module] or self.graphs is None or len(self.graphs) != 1:
            return None
        to_input, to_weight = self.graphs[0].held_to_input, self.graphs[0].held_to_weight
        return None if to_input is None or to_weight is None else (to_input, to_weight)


def _hooks_inside(parts: Sequence[nn.Module]) -> list[tuple[str, int]]:
    """The numbers of all hooks of parts and their modules; no two hooks of a process have the same."""
    modules = [module for part in parts for module in part.modules()]
    return [(name, key) for module in modules for name in HOOKS for key in module.__dict__[name]]


def _forwards_inside(parts: Sequence[nn.Module]) -> list[tuple[nn.Module, Callable[..., Value]]]:
    """Modules of torch's own classes with hooks of `fully_shard` around them, and a forward to put in the place of theirs.

    torch.compile does not look into such hooks, and gives up on the call that has them. It then compiles the forward inside by
    itself, but not one of a class of torch's, such as nn.Sequential: it does not begin in such code.
    """
    found: list[tuple[nn.Module, Callable[..., Value]]] = []
    for part in parts:
        for module in part.modules():
            inner = type(module).forward
            hooked = module._forward_pre_hooks or module._forward_hooks
            if hooked and "forward" not in vars(module) and str(inner.__module__).startswith("torch."):
                found.append((module, _forward_of(module)))
    return found


def _forward_of(module: nn.Module) -> Callable[..., Value]:
    inner = type(module).forward

    def forward(*args: Value, **kwargs: Value) -> Value:
        return inner(module, *args, **kwargs)

    return forward


def _stance_is_free() -> bool:
    """Whether nobody but penstock has told torch.compile what to do (`torch.compiler.set_stance`)."""
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    if getattr(stance, "stance", "default") != "default":
        return False
    return isinstance(getattr(stance, "backend", None), SplitBackend | None)


def _context_of(part: nn.Module) -> Any:
    """The context of torch.compile with the options by which a module was compiled; None if it was not."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # it takes long to import, and nothing is compiled without it
        return None
    context: object = None
    if isinstance(part, dynamo.OptimizedModule):
        context = part.dynamo_ctx
    elif part._compiled_call_impl is not None:  # module.compile()
        context = inspect.getclosurevars(part._compiled_call_impl).nonlocals.get("self")
    return context if isinstance(context, dynamo.OptimizeContext) else None


def _backend_of(context: Any) -> object:
    """The backend that torch.compile made of its options."""
    backend: object = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):  # what torch._dynamo wraps around it
        backend = backend._torchdynamo_orig_backend
    named = getattr(backend, "compiler_fn", None)  # torch.compile wraps what is no backend of inductor's
    return named if isinstance(named, SplitBackend) else backend
