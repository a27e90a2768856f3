"""Backends for torch.compile that compile a stage as another one does, forward and backward at once, whole or in two parts.

    >>> from penstock.stage.cut_graph import accumulate_graphs, collecting
    >>> layer = torch.nn.Linear(2, 1)
    >>> stage = torch.compile(layer, backend=SplitBackend("aot_eager"))
    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> y = stage(x)
    >>> with collecting() as work:
    ...     y.backward(torch.ones(3, 1))
    >>> x.grad is not None, layer.weight.grad is None
    (True, True)
    >>> accumulate_graphs(work)
    >>> layer.weight.grad
    tensor([[3., 3.]])

torch.compile traces a module and hands each graph to a backend, which AOTAutograd gives the forward and the backward as
graphs of operators. `SplitBackend` *cuts* the backward graph before the chosen backend compiles it (`penstock.stage.cut_graph`).

A graph is called with *aliases* of its parameters: autograd would otherwise visit the parameters in the input pass, without a
gradient, and fire their hooks there, and once more for every other graph that uses them. Which parameters they stand for is
noted on autograd's node of the call, where the backward finds it. One compiled graph so serves any number of equal layers.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.errors import NotCompiled
from penstock.nest import Value
from penstock.stage.cut_graph import NOTE, Compiled, here, is_in_one_piece
from penstock.stage.joint import Joint, TracedGraph

_probes: list[threading.Thread] = []  # see `probe_processor`
_PROBE_SECONDS = 60.0


GraphCall: TypeAlias = Callable[..., Value]
"""A graph as a function of its inputs."""
Backend: TypeAlias = Callable[[fx.GraphModule, list[object]], GraphCall]


@contextmanager
def on_call(also: Callable[[], object]) -> Iterator[None]:
    """While this is open, a graph that is called in this thread calls this first. If that raises, the graph does not run."""
    before, here.also = here.also, (*here.also, also)
    try:
        yield
    finally:
        here.also = before


class StageBackend:
    """Compiles with another backend, forward and backward at once; what that cannot compile runs as it is, and says why.

        torch.compile(module, backend=StageBackend("inductor", memory_budget=0.5))

    With a `memory_budget` from 0 to 1, torch's partitioner keeps at most about that share of what a forward saves, and has the
    rest computed again in the backward.
    """

    num_graphs = 0  # that this process has compiled for stages so far

    def __init__(self, inner: object = "inductor", *, memory_budget: float | None = None) -> None:
        again = inner if isinstance(inner, StageBackend) else None
        self.inner: object = inner if again is None else again.inner  # the name of a backend, or one
        self.memory_budget: float | None = memory_budget if again is None else again.memory_budget
        self.told = False  # that something could not be compiled
        self.joints: list[Joint] = []  # graphs that are called directly
        self.on_uncut: Callable[[str], None] | None = None  # is told what has a backward that cannot be cut

    def __eq__(self, other: object) -> bool:
        """Equal ones share compiled code: thirty layers, each compiled by itself, are then compiled once."""
        same = type(other) is type(self) and bool(self.inner == other.inner)
        return same and bool(self.memory_budget == other.memory_budget)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(type(self))

    def __call__(self, graph: fx.GraphModule, examples: Sequence[object]) -> GraphCall:
        import torch._functorch.config as functorch_config
        from torch._dynamo.exc import RestartAnalysis, SkipFrame

        StageBackend.num_graphs += 1
        options: dict[str, Value] = {"force_non_lazy_backward_lowering": True}
        if self.memory_budget is not None:
            options["activation_memory_budget"] = self.memory_budget
        try:
            with functorch_config.patch(**options):
                return _noticed(self.compiled(graph, examples))
        except (RestartAnalysis, SkipFrame):  # torch._dynamo's own way of beginning again
            raise
        except Exception as error:  # noqa: BLE001  whatever a backend cannot do, the stage can still run
            self.tell(error)
            return _noticed(graph.forward)

    def tell(self, error: BaseException) -> None:
        """Say, once, why something runs eagerly."""
        if not self.told:
            self.told = True
            reason = (str(error).strip().splitlines() or [""])[0]
            warnings.warn(
                f"a stage could not be compiled and runs eagerly, with its backward in one piece: "
                f"{type(error).__name__}: {reason}",
                NotCompiled,
                stacklevel=2,
            )

    def compiled(self, graph: fx.GraphModule, examples: Sequence[object]) -> GraphCall:
        """The graph as a function, differentiable where it must be."""
        if self.memory_budget is not None and not self.is_inductor:
            return self.with_aot(graph, examples, TracedGraph())
        return self._inner()(graph, list(examples))

    @property
    def is_inductor(self) -> bool:
        return self.inner == "inductor" or getattr(self.inner, "compiler_name", None) == "inductor"

    def _inner(self) -> Backend:
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(self.inner) if isinstance(self.inner, str) else self.inner  # type: ignore[return-value]

    def with_aot(self, graph: fx.GraphModule, examples: Sequence[object], noted: TracedGraph) -> GraphCall:
        """AOTAutograd takes the graph apart; the backend compiles the parts, which need no gradient any more."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

        inner = self._inner()
        bare = getattr(inner, "compiler_fn", inner)  # torch.compile wraps those that have a name
        as_it_is = bare in (lookup_backend("eager"), lookup_backend("aot_eager"))

        def compiler(part: fx.GraphModule, inputs: Sequence[object]) -> Compiled:
            compiled: Compiled = make_boxed_func(part.forward if as_it_is else inner(part, list(inputs)))
            return compiled

        make = aot_autograd(
            fw_compiler=lambda part, inputs: noted.take_forward(part, partial(compiler, part, inputs)),
            bw_compiler=partial(noted.take_backward, compiler=compiler),
            partition_fn=default_partition if self.memory_budget is None else min_cut_rematerialization_partition,
        )
        result: GraphCall = make(graph, examples)
        return result


class SplitBackend(StageBackend):
    """A `StageBackend` that also cuts every backward in two."""

    def compiled(self, graph: fx.GraphModule, examples: Sequence[object]) -> GraphCall:
        spread = any(map(is_traceable_wrapper_subclass, examples))  # AOTAutograd takes such tensors apart
        weights = frozenset(
            place
            for place, example in enumerate(examples)
            if isinstance(example, nn.Parameter) and example.requires_grad and not spread
        )
        noted = TracedGraph(weights)
        made = (self.with_inductor if self.is_inductor else self.with_aot)(graph, examples, noted)
        # CUDA graphs want to be called in the way in which they were recorded.
        replays = getattr(self.inner, "config", {}).get("triton.cudagraphs")
        joint = None if replays else Joint.of(noted, examples)
        if joint is not None:
            self.joints.append(joint)
            return joint
        if noted.backward is not None:
            return _with_aliases(made, sorted(weights))
        # Uncut: it gives its gradients to the parameters themselves, in I.
        if self.on_uncut is not None and (spread or weights) and torch.is_grad_enabled():
            what = "tensor-parallel weights (DTensor)" if spread else "weights (of a graph whose backward has effects)"
            self.on_uncut(f"compiled {what}")
        return made

    def with_inductor(self, graph: fx.GraphModule, examples: Sequence[Value], noted: TracedGraph) -> GraphCall:
        """Inductor's own way, but for the compilation of the backward graph."""
        import torch._functorch.config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def compile_part(part: fx.GraphModule, inputs: Sequence[Value], **options: Value) -> Value:
            if not options.get("is_backward"):
                for probe in _probes:
                    probe.join(_PROBE_SECONDS)  # else inductor asks once more
                return noted.take_forward(part, partial(compile_fx_inner, part, inputs, **options))
            saved = options.pop("static_input_idxs", ())

            def compiler(half: fx.GraphModule, given: Sequence[Value]) -> Compiled:
                static = [place for place, value in enumerate(given) if any(value is inputs[at] for at in saved)]
                return compile_fx_inner(half, given, static_input_idxs=static, **options)

            return noted.take_backward(part, inputs, compiler)

        # The cache of AOTAutograd holds backward graphs in one piece (that of inductor is used for each part). Saved activations
        # may not be overwritten by the first part: the second reads some of them. What the parts are called with need not be
        # looked at in each call: guards, the forward and `Joint` answer for it.
        options = {"size_asserts": False, "alignment_asserts": False, **getattr(self.inner, "config", {})}
        with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False):
            result: Value = compile_fx(graph, examples, compile_part, config_patches=options)
        return result  # type: ignore[no-any-return]


def _noticed(run: GraphCall) -> GraphCall:
    """The function, of whose calls somebody may want to know (`on_call`)."""

    def call(*args: Value) -> Value:
        for also in here.also:
            also()
        return run(*args)

    return call


def _with_aliases(compiled: GraphCall, weights: list[int]) -> GraphCall:
    """Call a compiled graph with aliases of its parameters, and note on its node in autograd's graph which they are."""
    if not weights:
        return compiled

    def call(*args: Value) -> Value:
        parameters = [args[place] for place in weights]
        if not torch.is_grad_enabled() or is_in_one_piece(parameters):
            return compiled(*args)
        others = [value for place, value in enumerate(args) if place not in weights and isinstance(value, Tensor)]
        given = list(args)
        # Where nothing else needs a gradient, autograd makes a node for their sake, and still gives them nothing.
        alone = not any(other.requires_grad for other in others)
        for place in weights:
            given[place] = args[place].detach().requires_grad_(alone)
        since = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        outputs = compiled(*given)
        node = _node_of((*outputs, *given), since)  # what a graph does may be to change an input, and nothing else
        if node is not None:
            node.metadata[NOTE] = parameters  # type: ignore[index]  # torch has it as a method
        return outputs

    return call


def _node_of(tensors: Sequence[object], since: int) -> Node | None:
    """The node of a compiled graph among autograd's, found from what it made or changed; views of that may be in between.

    An output may be a view of an input, which leads to nodes of graphs that ran before: those have lower numbers than `since`.
    """
    stack = [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor) and tensor.grad_fn is not None]
    while stack:
        node = stack.pop(0)
        if node._sequence_nr() >= since:
            if type(node).__name__.startswith("CompiledFunction"):
                return node
            stack += [before for before, _ in node.next_functions if before is not None]
    return None


@cache
def probe_processor() -> None:
    """Have inductor find out beside other work, once, for which vector instructions it can build code.

    It builds and loads a small program for each kind, 2 to 3 seconds each, one after the other in the middle of its first graph,
    where ranks that share a cache wait for one another. It keeps the answers.
    """
    with suppress(ImportError, AttributeError):  # of a torch that asks in another way
        from torch._inductor import cpu_vec_isa

        known = cpu_vec_isa.x86_isa_checker()  # elsewhere than on x86 there is only one kind, if any
        for kind in cpu_vec_isa.supported_vec_isa_list:
            if all(name in known for name in str(kind).split()):
                probe = threading.Thread(target=_probe, args=(kind,), name="penstock-probe", daemon=True)
                probe.start()
                _probes.append(probe)


def _probe(kind: object) -> None:
    with suppress(Exception):  # inductor asks again where it needs the answer, and tells what is wrong
        bool(kind)
