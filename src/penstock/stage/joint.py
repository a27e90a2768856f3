"""A compiled graph, forward and backward, run with as little of autograd in between as there can be.

    joint = Joint.of(noted, examples)
    outputs = joint(*args)             # one node of autograd, whatever the number of parameters
    with collecting() as work:
        run_engine(outputs, grads)     # the gradients of the inputs
    accumulate_graphs(work)            # those of the parameters

AOTAutograd has a runtime of its own, which is ready for everything that a graph may do: outputs that alias inputs, inputs that
are mutated, tensor subclasses, sizes that change. A stage of a pipeline hardly ever does any of it, and pays for it in every
microbatch. So a graph that does none of it is called here directly; any other goes the long way (see `compiled.py`).

Parameters are no inputs of the node: autograd would visit them in the input pass. `save_for_backward` is used as ever, so that
a saved tensor which was changed in place is found out, and hooks that move saved tensors away see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from penstock.errors import StageError
from penstock.nest import Value
from penstock.stage.cut_graph import (
    NOTE,
    BackwardParts,
    Compile,
    Compiled,
    GraphWork,
    called_shortly,
    hand_over,
    here,
    is_in_one_piece,
    split_backward,
)

_C: Any = torch._C
_ANCHOR = torch.zeros((), requires_grad=True)  # where no input needs a gradient, the outputs still do


@dataclass
class TracedGraph:
    """What AOTAutograd handed to the compilers of a graph, and what they made of it."""

    weights: frozenset[int] = frozenset()  # places of parameters among the inputs
    forward: Compiled | None = None
    num_inputs: int = 0  # of the forward graph
    metadata: Any = None  # what AOTAutograd found out about the graph
    backward: BackwardParts | None = None
    tangents: Sequence[Value] = ()  # the last inputs of the backward graph, as they were traced

    def take_forward(self, part: fx.GraphModule, compiler: Callable[[], Compiled]) -> Compiled:
        context = torch._guards.TracingContext.try_get()
        self.metadata = None if context is None else context.fw_metadata  # a backend may trace the part once more
        self.num_inputs = len(part.graph.find_nodes(op="placeholder"))
        compiled = compiler()
        self.forward = called_shortly(compiled)
        return compiled

    def take_backward(self, part: fx.GraphModule, inputs: Sequence[object], compiler: Compile) -> Compiled:
        parts = split_backward(part, inputs, weights=self.weights, compiler=compiler)
        if isinstance(parts, BackwardParts):
            self.backward, self.tangents = parts, inputs
            return parts.boxed()
        return parts


class Joint:
    """A graph whose forward and backward are called directly."""

    def __init__(self, noted: TracedGraph, wanted: list[int]) -> None:
        assert noted.forward is not None, "only a graph that was compiled is called"
        assert noted.backward is not None, "only a graph whose backward was cut is called directly"
        metadata = noted.metadata
        self.forward = noted.forward
        self.backward = noted.backward
        self.wanted = wanted  # the places of inputs that need gradients and are no parameters
        self.weights = sorted(noted.weights)  # those of parameters
        self.num_outputs: int = metadata.num_outputs
        self.views: list[int] = list(metadata.unsafe_view_out_indices)
        differentiable = [info.requires_grad for info in metadata.output_info]
        self.constants = [place for place, needs in enumerate(differentiable) if not needs]
        self.rooted = [place for place, needs in enumerate(differentiable) if needs]
        tangents = noted.tangents[len(noted.tangents) - len(self.rooted) :]
        self.tangents = [_Like(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tangents]
        self.amp: bool = _C._is_any_autocast_enabled()  # its casts are in the graph by now
        self.places = [self.backward.sources.index(place) for place in wanted]
        self.held_to_input: int | None = None  # bytes that a microbatch holds after its forward, once one ran
        self.held_to_weight: int | None = None  # and after its input pass

    @classmethod
    def of(cls, noted: TracedGraph, examples: Sequence[object]) -> Joint | None:
        """None if the graph does something that only AOTAutograd's own runtime can do."""
        wanted = [
            place
            for place, example in enumerate(examples)
            if isinstance(example, Tensor) and example.requires_grad and place not in noted.weights
        ]
        plain = noted.forward is not None and noted.backward is not None and noted.num_inputs == len(examples)
        if not plain or not _is_plain(noted.metadata) or not set(wanted) <= set(noted.backward.sources):  # type: ignore[union-attr]
            return None
        if any(not isinstance(size, int) for tangent in noted.tangents for size in getattr(tangent, "shape", ())):
            return None
        return cls(noted, wanted)

    def __call__(self, *args: object) -> Value:
        """Call the graph as one node of autograd. Where the backward comes in one piece it has the parameters among its inputs:
        autograd gives them their gradients, with those of other code."""
        leaves = [args[place] for place in self.wanted]
        whole = bool(here.in_one_piece) and is_in_one_piece(parameters := [args[place] for place in self.weights])
        if whole:
            leaves += parameters
        return _JointFunction.apply(self, args, whole, *(leaves or (_ANCHOR,)))  # type: ignore[no-untyped-call]

    def computed(self, args: Sequence[object]) -> tuple[list[Value], list[Value]]:
        """The forward: its outputs, and what it saves for the backward."""
        values = self.run(self.forward, list(args))
        return list(values[: self.num_outputs]), list(values[self.num_outputs :])

    def differentiated(
        self, saved: list[Value], grads: Sequence[Tensor | None], parameters: Sequence[Tensor]
    ) -> tuple[list[Value], GraphWork]:
        """The input pass: the gradients of `wanted`, and what is left to do for the parameters. Empties `saved`."""
        saved += [like.fit(grad) for like, grad in zip(self.tangents, grads, strict=True)]
        found, kept = self.run(self.backward.inputs, saved)
        if self.held_to_weight is None:
            self.held_to_weight = _bytes_beside(kept, parameters)
        second = self.backward.second
        run = partial(self.run, second) if self.amp else second
        return [found[place] for place in self.places], GraphWork(run, kept, parameters)

    def run(self, call: Compiled, given: list[object]) -> Value:
        """Run a part; autocast, whose casts are in the graph, must not cast again."""
        if not self.amp:
            return call(given)
        with _C._DisableAutocast():
            return call(given)


class _JointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Joint, args: tuple[Value, ...], in_one_piece: bool, *leaves: Tensor) -> Value:
        outputs, saved = joint.computed(args)
        ctx.save_for_backward(*[value.detach() if value._is_view() else value for value in saved])
        ctx.set_materialize_grads(False)
        ctx.joint, ctx.in_one_piece = joint, in_one_piece
        ctx.parameters = [args[place] for place in joint.weights]
        if joint.held_to_input is None:  # its inputs and outputs are held as well, saved or not
            there = [
                value for place, value in enumerate(args) if place not in joint.wanted and isinstance(value, Tensor)
            ]
            joint.held_to_input = _bytes_beside([*leaves, *outputs, *saved], [*there, _ANCHOR])  # parameters, the batch
        for place in joint.views:
            outputs[place] = torch.ops.aten._unsafe_view(outputs[place], outputs[place].shape)
        if joint.constants:
            ctx.mark_non_differentiable(*[outputs[place] for place in joint.constants])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Value, ...]:
        joint: Joint = ctx.joint
        if torch.is_grad_enabled():
            raise StageError(
                "the backward of a compiled stage cannot be differentiated again: call backward() without create_graph=True, "
                "or leave this stage uncompiled"
            )
        given = [grads[place] for place in joint.rooted]
        found, work = joint.differentiated(list(ctx.saved_tensors), given, ctx.parameters)
        if ctx.in_one_piece:
            found += work.apart()
        else:
            hand_over(work)
        return (None, None, None, *(found or (None,)))


def _is_joint(node: object) -> bool:
    return type(node).__name__ == f"{_JointFunction.__name__}Backward"


def parameters_of(node: Any) -> Sequence[Tensor] | None:
    """Those to which the graph behind a node of autograd's gives gradients past autograd; None: it is no such graph."""
    found: Sequence[Tensor] | None = node.parameters if _is_joint(node) else node.metadata.get(NOTE)
    return found


def _bytes_beside(values: Sequence[object], parameters: Sequence[Tensor]) -> int:
    """Of tensors, but for those that are there anyway; what is there twice counts once, and of a batch one microbatch."""
    known = {parameter.data_ptr() for parameter in parameters}
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum({t.data_ptr(): t.nbytes for t in tensors if t.data_ptr() not in known}.values())


class _Like(NamedTuple):
    """What the backward graph was traced with in the place of a gradient of an output."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def fit(self, grad: Tensor | None) -> Tensor:
        """The gradient, laid out in memory as the graph expects; zeros where there is none."""
        if grad is not None and grad.stride() == self.stride:
            return grad
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.zero_() if grad is None else made.copy_(grad)


# Of AOTAutograd's notes on a graph: what must be none or nothing.
_NEVER = """
    num_mutated_inp_runtime_indices num_mutated_graph_handled_indices_seen_by_autograd num_intermediate_bases num_outputs_aliased
    num_symints_saved_for_bw num_tensors_saved_with_no_vc_check num_opaque_objects_saved_for_bw num_backward_tokens tokens
    num_graphsafe_rng_states is_rng_op_functionalized act_input_indices dynamic_outputs
    indices_of_inputs_that_requires_grad_with_mutations_in_bw
"""


def _is_plain(metadata: Any) -> bool:
    if metadata is None or any(getattr(metadata, name, None) for name in _NEVER.split()):
        return False
    if metadata.grad_enabled_mutation is not None:
        return False
    subclasses = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta)
    if any(type(meta).__name__ == "SubclassCreationMeta" for meta in subclasses):
        return False
    return all(issubclass(info.raw_type, Tensor) for info in metadata.output_info)
