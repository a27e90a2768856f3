"""Compiled stages whose backward comes in two parts.

    >>> layer = torch.nn.Linear(2, 1)
    >>> stage = torch.compile(layer, backend="aot_eager")
    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> with CompiledParts(stage).split():
    ...     y = stage(x)
    >>> with collecting() as work:
    ...     y.backward(torch.ones(3, 1))
    >>> x.grad is not None, layer.weight.grad is None
    (True, True)
    >>> accumulate_graphs(work)
    >>> layer.weight.grad
    tensor([[3., 3.]])

torch.compile traces a module and hands each graph to a backend, which AOTAutograd gives the forward and the backward as
graphs of operators. Here the backward graph is *cut* before the chosen backend compiles it: what the gradients of the
inputs need is one graph (I), the rest, which only the parameters' gradients need, another (W). While somebody is
`collecting`, a backward runs the first and hands over the second as a `GraphWork`, with what it needs: values that the
first part computed on its way, and saved activations. Otherwise both run one after the other, and autograd goes on as ever.

A graph whose inputs need gradients is called with *aliases* of its parameters, which need none: autograd would otherwise
visit the parameters in the input pass, without a gradient, and fire their hooks there. Which parameters they stand for is
noted on autograd's node of the call, where the backward finds it. One compiled graph so serves any number of equal layers.
"""

from __future__ import annotations

import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from penstock.stage.engine import run_engine

Compiled = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes a list of its inputs, which it empties, and returns its outputs."""
Compile = Callable[[fx.GraphModule, Sequence[Any]], Compiled]
"""Compiles one part of a backward graph for inputs such as these."""


class GraphWork(NamedTuple):
    """The weight part of one backward: computes the gradients of `parameters` from `kept`."""

    run: Compiled
    kept: list[Any]
    parameters: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """What is kept between the two parts; a storage that several values share counts once."""
        storages = [value.untyped_storage() for value in self.kept if isinstance(value, Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Collecting(threading.local):
    work: list[GraphWork] | None = None


_here = _Collecting()
_KEY = "penstock.stage.compiled"
_C: Any = torch._C


@contextmanager
def collecting() -> Iterator[list[GraphWork]]:
    """While this is open, backwards that run in this thread, or in engine threads on its behalf, leave their weight part."""
    work: list[GraphWork] = []
    previous, _here.work = _here.work, work
    _C._stash_obj_in_tls(_KEY, work)
    try:
        yield work
    finally:
        _here.work = previous
        _C._stash_obj_in_tls(_KEY, previous)


def _collected() -> list[GraphWork] | None:
    if _here.work is not None:
        return _here.work
    return _C._get_obj_in_tls(_KEY) if _C._is_key_in_tls(_KEY) else None


def accumulate_graphs(work: list[GraphWork]) -> None:
    """Run the weight parts; the engine accumulates each parameter once, with all its hooks."""
    roots: list[Tensor] = []
    grads: list[Tensor] = []
    with torch.no_grad():
        while work:
            run, kept, parameters = work.pop()
            for parameter, grad in zip(parameters, run(kept), strict=True):
                if grad is not None and parameter.requires_grad:
                    roots.append(parameter)
                    grads.append(grad)
    if roots:
        run_engine(tuple(roots), tuple(grads))


class SplitBackend:
    """A backend for torch.compile that compiles with another one, and cuts every backward in two."""

    def __init__(self, inner: Any = "inductor") -> None:
        self.inner = inner

    def __eq__(self, other: object) -> bool:
        """Equal ones share compiled code: thirty layers, each compiled by itself, are then compiled once."""
        return isinstance(other, SplitBackend) and bool(self.inner == other.inner)

    def __hash__(self) -> int:
        return hash(type(self))

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        weights = frozenset(
            place
            for place, example in enumerate(examples)
            if isinstance(example, nn.Parameter) and example.requires_grad
        )
        make = self._with_inductor if _is_inductor(self.inner) else self._with_any
        return _with_aliases(make(graph, examples, weights), sorted(weights))

    def _with_any(self, graph: fx.GraphModule, examples: Sequence[Any], weights: frozenset[int]) -> Callable[..., Any]:
        """AOTAutograd takes the graph apart; the backend compiles the parts, which need no gradient any more."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch._aot_autograd.utils import make_boxed_func

        inner = lookup_backend(self.inner) if isinstance(self.inner, str) else self.inner
        as_it_is = inner in (lookup_backend("eager"), lookup_backend("aot_eager"))

        def compiler(part: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
            compiled: Compiled = make_boxed_func(part.forward if as_it_is else inner(part, list(inputs)))
            return compiled

        def backward(part: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
            return split_backward(part, inputs, weights=weights, compiler=compiler)

        result: Callable[..., Any] = aot_autograd(fw_compiler=compiler, bw_compiler=backward)(graph, examples)
        return result

    def _with_inductor(
        self, graph: fx.GraphModule, examples: Sequence[Any], weights: frozenset[int]
    ) -> Callable[..., Any]:
        """Inductor's own way, but for the compilation of the backward graph."""
        import torch._functorch.config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(part: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            if not options.get("is_backward"):
                return compile_fx_inner(part, inputs, **options)
            saved = options.pop("static_input_idxs", ())

            def compiler(half: fx.GraphModule, given: Sequence[Any]) -> Compiled:
                static = [place for place, value in enumerate(given) if any(value is inputs[at] for at in saved)]
                return compile_fx_inner(half, given, static_input_idxs=static, **options)

            return split_backward(part, inputs, weights=weights, compiler=compiler)

        # The cache holds backward graphs in one piece. Saved activations may not be overwritten by the first part: the second
        # reads some of them.
        with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False):
            result: Any = compile_fx(graph, examples, inner, config_patches=_inductor_options(self.inner))
        return result  # type: ignore[no-any-return]


def _with_aliases(compiled: Callable[..., Any], weights: list[int]) -> Callable[..., Any]:
    """Call a compiled graph with aliases of its parameters, and note on its node in autograd's graph which they are."""
    if not weights:
        return compiled

    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled() or not _needs_input_gradients(args, weights):
            return compiled(*args)
        given = list(args)
        for place in weights:
            given[place] = args[place].detach()
        outputs = compiled(*given)
        node = _node_of(outputs)
        if node is not None:
            node.metadata[_KEY] = tuple([args[place] for place in weights])
        return outputs

    return call


def _needs_input_gradients(args: tuple[Any, ...], weights: list[int]) -> bool:
    """Whether something else than a parameter needs a gradient. If not, nothing is to be hurried for."""
    others = [value for place, value in enumerate(args) if place not in weights]
    return any(isinstance(value, Tensor) and value.requires_grad for value in others)


def _node_of(outputs: Sequence[Any]) -> Any:
    """The node of a compiled graph among autograd's, found from one of its outputs; these may be views of what it made."""
    for output in outputs:
        node = output.grad_fn if isinstance(output, Tensor) else None
        while node is not None:
            if type(node).__name__.startswith("CompiledFunction"):
                return node
            node = node.next_functions[0][0] if node.next_functions else None
    return None


def _is_inductor(inner: Any) -> bool:
    return inner == "inductor" or getattr(inner, "compiler_name", None) == "inductor"


def _inductor_options(inner: Any) -> dict[str, Any]:
    return dict(getattr(inner, "config", {}))


def split_backward(
    graph: fx.GraphModule, inputs: Sequence[Any], *, weights: frozenset[int], compiler: Compile
) -> Compiled:
    """Cut a backward graph of AOTAutograd in two, and compile both parts.

    `weights` are the places, among the inputs of the forward, of the parameters that need a gradient.
    """
    (output,) = graph.graph.find_nodes(op="output")
    grads: list[Any] = list(output.args[0])  # nodes, and None for inputs that need no gradient
    sources = [_source(description) for description in output.meta.get("desc", ())]
    waiting = [place for place, source in enumerate(sources) if source in weights]
    ends = [grads[place] for place in waiting if grads[place] is not None]
    if not ends or _has_effects(graph.graph):
        return compiler(graph, inputs)
    first = _closed(
        graph.graph, [grad for place, grad in enumerate(grads) if place not in waiting and grad is not None]
    )
    given = graph.graph.find_nodes(op="placeholder")
    second = _ancestors(ends) - first - set(given)
    crossing = [
        node
        for node in graph.graph.nodes
        if node not in second and (node in ends or any(user in second for user in node.users))
    ]
    made = [node for node in crossing if node.op != "placeholder"]
    early = [grad for place, grad in enumerate(grads) if place not in waiting]
    reads = [node for node in given if node in first]
    parts = _Parts(
        places=[place for place in range(len(grads)) if place not in waiting],
        waiting=waiting,
        reads=[given.index(node) for node in reads],
        passes=[given.index(node) for node in crossing if node.op == "placeholder"],
        num_early=len(early),
    )
    kept = [node for node in crossing if node.op == "placeholder"] + made
    values = dict(zip(given, inputs, strict=True))
    if made or any(grad is not None for grad in early):
        part = _extracted(graph, first, reads, [*early, *made])
        parts.first = compiler(part, [values[node] for node in reads])
    part = _extracted(graph, second, kept, [grads[place] for place in waiting])
    parts.second = compiler(part, [values.get(node, node.meta["val"]) for node in kept])
    return _boxed(parts.run)


def _boxed(run: Compiled) -> Compiled:
    """Marked as a function that takes a list and empties it; it must be a plain function for torch._dynamo to see that."""

    def boxed(given: list[Any]) -> Sequence[Any]:
        return run(given)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


class _Parts:
    """A backward in two parts, called as AOTAutograd calls one in one piece."""

    def __init__(
        self, *, places: list[int], waiting: list[int], reads: list[int], passes: list[int], num_early: int
    ) -> None:
        self.places = places  # of the gradients that the first part gives, among all gradients
        self.waiting = waiting  # of those of parameters
        self.reads = reads  # which inputs the first part reads
        self.passes = passes  # which inputs are kept for the second
        self.num_early = num_early
        self.first: Compiled | None = None
        self.second: Compiled = _nothing

    def run(self, given: list[Any]) -> list[Any]:
        kept = [given[place] for place in self.passes]
        found: list[Any] = [None] * (len(self.places) + len(self.waiting))
        if self.first is not None:
            reads = [given[place] for place in self.reads]
            given.clear()
            values = self.first(reads)
            for place, value in zip(self.places, values, strict=False):
                found[place] = value
            kept += values[self.num_early :]
        else:
            given.clear()
        node = _C._current_autograd_node()
        parameters = None if node is None else node.metadata.get(_KEY)
        if parameters is None:  # it was called with the parameters themselves
            for place, value in zip(self.waiting, self.second(kept), strict=True):
                found[place] = value
            return found
        work = _collected()
        (accumulate_graphs if work is None else work.extend)([GraphWork(self.second, kept, parameters)])
        return found


def _nothing(given: list[Any]) -> Sequence[Any]:
    return ()


def _source(description: Any) -> int | None:
    """The place of the forward's input of which this output of a backward graph is the gradient."""
    return getattr(getattr(description, "grad_of", None), "idx", None)


def _has_effects(graph: fx.Graph) -> bool:
    """Whether the graph does more than compute its outputs: such a backward stays in one piece."""
    return any(
        node.op == "call_function"
        and (getattr(getattr(node.target, "_schema", None), "is_mutable", False) or not node.users)
        for node in graph.nodes
    )


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    stack = list(nodes)
    found: set[fx.Node] = set(stack)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def _closed(graph: fx.Graph, ends: list[fx.Node]) -> set[fx.Node]:
    """What belongs to the first part: all that its ends need, the pieces of values that it computes anyway, and whatever
    draws random numbers, so that they are drawn in the same order as in a backward in one piece."""
    random = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    found = _ancestors([*ends, *random])
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in found:
            found.add(node)
    return found


def _extracted(
    graph: fx.GraphModule, nodes: set[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node | None]
) -> fx.GraphModule:
    """The part of a graph that computes `outputs` from `inputs` with the given nodes."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        # A name of its own, since inductor finds compiled graphs by their code: one that may overwrite its inputs, which an
        # equal backward in one piece does, must not be taken for this one.
        copies[node] = part.placeholder(f"split_{node.name}")
        copies[node].meta = dict(node.meta)
    for node in graph.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    end = part.output([None if node is None else copies[node] for node in outputs])
    (old,) = graph.graph.find_nodes(op="output")
    end.meta = {key: value for key, value in old.meta.items() if key not in ("desc", "user_visible_output_idxs")}
    end.meta["user_visible_output_idxs"] = []
    part.eliminate_dead_code()
    part.lint()
    return fx.GraphModule(graph, part)


class CompiledParts:
    """The parts of a stage that torch.compile has compiled, each with a twin whose backward comes in two.

        parts = CompiledParts(module)
        with parts.split():
            output = module(x)             # the twins run in the place of the parts

    A twin is compiled with the options of its part. The part itself is only made to look away while the twin runs: it is
    left as it was, and both work with the same parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places: list[
            tuple[dict[str, Any], str, Any]
        ] = []  # whose attribute, its name, and what stands there instead
        for part in module.modules():
            found = _compiled_call(part)
            if found is not None:
                name, context = found
                self.places.append((part.__dict__, name, _twin(part, name, context)))

    def __bool__(self) -> bool:
        return bool(self.places)

    @contextmanager
    def split(self) -> Iterator[None]:
        """While this is open, calls of the parts go to their twins."""
        before = [attributes[name] for attributes, name, _ in self.places]
        for attributes, name, twin in self.places:
            attributes[name] = twin
        try:
            yield
        finally:
            for (attributes, name, _), old in zip(self.places, before, strict=True):
                attributes[name] = old


def _compiled_call(part: nn.Module) -> tuple[str, Any] | None:
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


def _twin(part: nn.Module, name: str, context: Any) -> Callable[..., Any]:
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):  # what torch._dynamo wraps around it
        backend = backend._torchdynamo_orig_backend
    options = {"backend": SplitBackend(backend), "fullgraph": bool(context.fullgraph), "dynamic": context._dynamic}
    if name == "forward":
        twin: Any = torch.compile(part.get_submodule("_orig_mod"), **options)
        return twin.forward  # type: ignore[no-any-return]
    compiled: Callable[..., Any] = torch.compile(part._call_impl, **options)
    return compiled
