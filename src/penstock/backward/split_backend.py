"""A backend for torch.compile whose graphs leave their weight gradients for later, in the forward of a split backward.

    module.compile(backend=SplitBackend("inductor", memory_budget=0.5))

AOTAutograd traces a graph into a forward and a backward graph. The backward graph is partitioned before the chosen backend
compiles it (`penstock.backward.partition_backward`). A graph that is called while weight gradients are deferred gets *aliases*
of its parameters, so that autograd does not visit the parameters in the input pass, and its backward leaves a `GraphWork`.
Any other call gets the parameters themselves: autograd receives all gradients at once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.backward.partition_backward import BackwardPartition, partition_backward
from penstock.errors import NotCompiled
from penstock.nest import Value
from penstock.stage.buffers import memory_of
from penstock.stage.intercept import current

Boxed: TypeAlias = Callable[[list[Value]], Sequence[Value]]
"""A compiled graph: takes a list of its inputs, which it empties, and returns its outputs."""
Compile: TypeAlias = Callable[[fx.GraphModule, Sequence[Value], Sequence[int] | None], Boxed]
"""Compiles a part of a backward graph for inputs such as these; given which inputs of the whole backward graph they are."""


class GraphWork:
    """The weight-gradient part of one backward: computes the gradients of `parameters` from `kept`."""

    def __init__(self, run: Boxed, kept: list[Value], parameters: Sequence[Tensor]) -> None:
        self.run, self.kept, self.parameters = run, kept, parameters

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that are trained, and a gradient for each of them."""
        found = zip(self.parameters, self.run(self.kept), strict=True)
        pairs = [(parameter, grad) for parameter, grad in found if grad is not None and parameter.requires_grad]
        return [parameter for parameter, _ in pairs], [grad for _, grad in pairs]

    def apart(self) -> list[Value]:
        """Return a gradient for each parameter, in memory of its own: autograd keeps what it is given, and adds to it."""
        known = [memory_of(value) for value in self.kept]  # which `run` empties
        values = list(self.run(self.kept))
        known += map(memory_of, values)
        for place, value in enumerate(values):
            if value is not None and known.count(memory_of(value)) > 1:
                values[place] = value.clone()
        return values


class DeferredCall:
    """A call of a graph with aliases: for which parameters its backward leaves work, and where. Owned by autograd's node."""

    def __init__(self, parameters: Sequence[Tensor], graphs: list[Any]) -> None:
        self.parameters, self.graphs = parameters, graphs

    def announce(self, _: object) -> None:
        """Tell the backward graph, which runs next in this thread, whose gradients it leaves."""
        _here.call = weakref.ref(self)


class _Here(threading.local):
    call: weakref.ref[DeferredCall] | None = None
    ran: list[SplitGraph] | None = None  # graphs that were called, while somebody wants to know


_here = _Here()
_MOST_MEASURED = 64  # calls without a backward, as an evaluation with gradients makes them
_NOTE = "penstock.backward.split_backend"  # under this key autograd's node of a call owns its `DeferredCall`


class recording_graphs:
    """While this is open, graphs of a `SplitBackend` that this thread calls are noted in its list."""

    def __enter__(self) -> list[SplitGraph]:
        self.previous, _here.ran = _here.ran, []
        return _here.ran

    def __exit__(self, *_: object) -> None:
        _here.ran = self.previous


class SplitGraph:
    """One graph that torch.compile has traced."""

    def __init__(self, weights: list[int], *, spread: bool) -> None:
        self.weights = weights  # places of parameters that need a gradient, among the inputs
        self.spread = spread  # over a mesh: AOTAutograd takes such tensors apart
        self.made: Callable[..., Value] | None = None
        self.partition: BackwardPartition | None = None
        # Of calls before the first backward: bytes, by address, of inputs and outputs; and addresses of what is there anyway.
        self.measured: list[tuple[dict[int, int], set[int]]] = []
        self.parameters: set[int] = set()  # their addresses
        self.held_to_input: int | None = None  # bytes that a microbatch holds after its forward, once a backward ran
        self.held_to_weight: int | None = None  # and after its input pass

    @property
    def whole(self) -> str:
        """The weights whose gradients cannot be deferred; "" if they can."""
        if self.partition is not None or not (self.weights or self.spread):
            return ""
        return "tensor-parallel weights (DTensor)" if self.spread else "weights (of a graph whose backward has effects)"

    def __call__(self, *args: Value) -> Value:
        if _here.ran is not None:
            _here.ran.append(self)
        assert self.made is not None, "torch.compile calls what its backend has returned"
        pending = current()
        if not torch.is_grad_enabled():
            return self.made(*args)
        parameters = [args[place] for place in self.weights]
        self.parameters = {one.data_ptr() for one in parameters} if self.held_to_weight is None else set()
        if pending is None or self.partition is None or any(id(one) in pending.deferral.whole for one in parameters):
            outputs = self.made(*args)
        else:
            outputs = self.deferred(self.made, args, DeferredCall(parameters, pending.graphs))
        if self.held_to_input is None and not self.spread and len(self.measured) < _MOST_MEASURED:
            self.measure(args, outputs)
        return outputs

    def deferred(self, made: Callable[..., Value], args: Sequence[Value], call: DeferredCall) -> Value:
        """Call the graph with aliases of its parameters."""
        tensors = [value for place, value in enumerate(args) if place not in self.weights and isinstance(value, Tensor)]
        before = {tensor.grad_fn for tensor in tensors}
        given = list(args)
        # Where nothing else needs a gradient, autograd makes a node for their sake, and still gives them nothing.
        alone = not any(tensor.requires_grad for tensor in tensors)
        for place in self.weights:
            given[place] = args[place].detach().requires_grad_(alone)
        outputs = made(*given)
        node = _node_of((*outputs, *tensors), before)  # a graph may change an input, and return nothing
        if node is not None:
            node.metadata[_NOTE] = call  # type: ignore[index]  # torch has it as a method
            node.register_prehook(call.announce)
        return outputs

    def measure(self, args: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Note what is held after a forward; an input that needs no gradient is a part of the batch, and there anyway."""
        others = [value for place, value in enumerate(args) if place not in self.weights]
        held = [one for one in (*others, *outputs) if isinstance(one, Tensor) and one.requires_grad]
        sizes = {one.data_ptr(): one.nbytes for one in held}
        there = {one.data_ptr() for one in args if isinstance(one, Tensor)}
        self.measured.append((sizes, there - sizes.keys()))

    def sum_held(self, saved: Sequence[Value]) -> int:
        """Bytes that were held after the forward whose saved tensors these are."""
        sizes = _sizes(saved, set())
        held, there = max(self.measured, key=lambda one: len(sizes.keys() & (one[0].keys() | one[1])))
        self.measured = []
        return sum({**held, **_sizes(saved, there)}.values())

    def compile_backward(self, graph: fx.GraphModule, inputs: Sequence[Value], compiler: Compile) -> Boxed:
        """Partition a backward graph and compile both parts; one that cannot be partitioned is compiled as it is."""
        partition = partition_backward(graph, frozenset(self.weights))
        if partition is None:
            return compiler(graph, inputs, None)
        first, reads, passes = partition.input_graph, partition.reads, partition.passes
        compiled = None if first is None else compiler(first, [inputs[place] for place in reads], reads)
        kept = [inputs[place] for place in passes] + partition.made
        second = compiler(partition.weight_graph, kept, passes)
        self.partition = partition

        def backward(given: list[Value]) -> Sequence[Value]:
            return self.run_backward(partition, compiled, second, given)

        backward._boxed_call = True  # type: ignore[attr-defined]  # takes a list and empties it
        return backward

    def run_backward(
        self, partition: BackwardPartition, first: Boxed | None, second: Boxed, given: list[Value]
    ) -> Sequence[Value]:
        """Compute the gradients of inputs, and leave those of parameters, or compute them, too."""
        call = None if _here.call is None else _here.call()
        _here.call = None
        if self.held_to_input is None:
            self.held_to_input = self.sum_held(given[: partition.num_saved])
        kept = [given[place] for place in partition.passes]
        reads = [given[place] for place in partition.reads]
        given.clear()
        found: list[Value] = [None] * partition.num_grads
        if first is not None:
            values = first(reads)
            kept += values[len(partition.places) :]
            memory = [memory_of(value) for value in (*values[: len(partition.places)], *kept)]
            for place, value in zip(partition.places, values, strict=False):
                # Whoever takes a gradient may add to it in place.
                found[place] = value.clone() if value is not None and memory.count(memory_of(value)) > 1 else value
        if self.held_to_weight is None:
            self.held_to_weight = sum(_sizes(kept, self.parameters).values())
        if call is not None:
            call.graphs.append(GraphWork(second, kept, call.parameters))
            return found
        for place, value in zip(partition.waiting, GraphWork(second, kept, ()).apart(), strict=True):
            found[place] = value
        return found


def _sizes(values: Sequence[Value], known: set[int]) -> dict[int, int]:
    """Bytes of tensors, by address, but for those at known addresses."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return {one.data_ptr(): one.nbytes for one in tensors if one.data_ptr() not in known}


def _node_of(tensors: Sequence[object], before: set[Node | None]) -> Node | None:
    """Find autograd's node of a compiled graph from what it made or changed; views of that may be in between.

    An output may be a view of an input, which leads to nodes that were there `before`.
    """
    stack = [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor)]
    seen: set[Node | None] = {None, *before}
    while stack:
        node = stack.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("CompiledFunction") and _NOTE not in node.metadata:  # type: ignore[operator]
            return node
        stack += [following for following, _ in node.next_functions]
    return None


class SplitBackend:
    """Compiles with another backend; what that cannot compile runs as it is, and a warning says why.

    With a `memory_budget` from 0 to 1, torch's partitioner keeps at most about that share of what a forward saves, and has the
    rest computed again in the backward. A backend with another `version` shares nothing with this one.
    """

    def __init__(self, inner: object = "inductor", *, memory_budget: float | None = None, version: int = 0) -> None:
        self.inner = inner  # the name of a backend, or one
        self.memory_budget = memory_budget
        self.version = version
        self.told = False  # that something could not be compiled

    def __eq__(self, other: object) -> bool:
        """Equal ones share compiled code: thirty layers, each compiled by itself, are then compiled once."""
        return isinstance(other, SplitBackend) and bool(
            self.inner == other.inner and (self.memory_budget, self.version) == (other.memory_budget, other.version)
        )

    def __hash__(self) -> int:
        return hash(type(self))

    def __call__(self, graph: fx.GraphModule, examples: Sequence[Value]) -> Callable[..., Value]:
        from functorch.compile import config  # type: ignore[import-untyped]
        from torch._dynamo.exc import RestartAnalysis, SkipFrame

        # The cache of AOTAutograd holds backward graphs in one piece. Saved activations may not be overwritten by the
        # input-gradient graph: the weight-gradient graph reads some of them.
        options: dict[str, Value] = {"enable_autograd_cache": False, "donated_buffer": False}
        options["force_non_lazy_backward_lowering"] = True
        if self.memory_budget is not None:
            options["activation_memory_budget"] = self.memory_budget
        spread = any(map(is_traceable_wrapper_subclass, examples))
        trained = [isinstance(one, nn.Parameter) and one.requires_grad and not spread for one in examples]
        made = SplitGraph([place for place, wanted in enumerate(trained) if wanted], spread=spread)
        try:
            with config.patch(**options):
                made.made = (self.with_inductor if self.is_inductor else self.with_aot)(graph, examples, made)
        except (RestartAnalysis, SkipFrame):  # torch._dynamo's own way of beginning again
            raise
        except Exception as error:  # noqa: BLE001  whatever a backend cannot do, the stage can still run
            self.tell(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            made.made, made.weights = graph.forward, []
        return made.__call__

    def tell(self, reason: str) -> None:
        """Say, once, why something runs eagerly."""
        if not self.told:
            self.told = True
            text = "a stage could not be compiled and runs eagerly, with its backward in one piece"
            warnings.warn(f"{text}: {reason}", NotCompiled, stacklevel=2)

    @property
    def is_inductor(self) -> bool:
        return self.inner == "inductor" or getattr(self.inner, "compiler_name", None) == "inductor"

    def with_aot(self, graph: fx.GraphModule, examples: Sequence[Value], made: SplitGraph) -> Callable[..., Value]:
        """AOTAutograd takes the graph apart; the backend compiles the parts, which need no gradient any more."""
        from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.registry import lookup_backend

        inner: Any = lookup_backend(self.inner) if isinstance(self.inner, str) else self.inner
        bare = getattr(inner, "compiler_fn", inner)  # torch.compile wraps those that have a name
        as_it_is = bare in (lookup_backend("eager"), lookup_backend("aot_eager"))

        def compiler(part: fx.GraphModule, inputs: Sequence[Value], _: object = None) -> Boxed:
            compiled: Boxed = make_boxed_func(part.forward if as_it_is else inner(part, list(inputs)))
            return compiled

        make = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=lambda part, inputs: made.compile_backward(part, inputs, compiler),
            partition_fn=default_partition if self.memory_budget is None else min_cut_rematerialization_partition,
        )
        result: Callable[..., Value] = make(graph, examples)
        return result

    def with_inductor(self, graph: fx.GraphModule, examples: Sequence[Value], made: SplitGraph) -> Callable[..., Value]:
        """Inductor's own way, but for the compilation of the backward graph."""
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def compile_part(part: fx.GraphModule, inputs: Sequence[Value], **options: Value) -> Value:
            if not options.get("is_backward"):
                return compile_fx_inner(part, inputs, **options)
            static = options.pop("static_input_idxs", ())

            def compiler(half: fx.GraphModule, given: Sequence[Value], places: Sequence[int] | None) -> Boxed:
                known = static if places is None else [at for at, place in enumerate(places) if place in static]
                return compile_fx_inner(half, given, static_input_idxs=known, **options)

            return made.compile_backward(part, inputs, compiler)

        # What the parts are called with need not be looked at in each call: guards and the forward answer for it.
        options = {"size_asserts": False, "alignment_asserts": False, **getattr(self.inner, "config", {})}
        result: Value = compile_fx(graph, examples, compile_part, config_patches=options)
        return result  # type: ignore[no-any-return]
