"""Split backward: I computes the gradients of inputs, W those of parameters whose gradients can be deferred."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.backward.engine_protocol import Args, Kwargs, MicrobatchPass, Output, Run, Seeds
from penstock.backward.full import Edges, FullPass, edges_of
from penstock.nest import Value, tensors_in
from penstock.stage.backward import Deferral, Pending, backward_weight, input_pass, run_deferred


class SplitPass(FullPass):
    """A microbatch whose backward comes in two parts."""

    __slots__ = ("needed", "pending")

    def __init__(self, edges: Edges, pending: Pending, *, needed: bool) -> None:
        super().__init__(edges)
        self.pending = pending
        self.needed = needed  # whether an input needs a gradient

    def backward(self, seeds: Seeds) -> None:
        self.backward_input(seeds)
        self.backward_weight()

    def backward_input(self, seeds: Seeds) -> None:
        edges, self.edges = self.edges, []
        roots: list[Tensor | GradientEdge] = []
        grads: list[Tensor] = []
        for place, grad in seeds:
            edge = edges[place]
            if edge is not None:
                roots.append(edge)
                grads.append(grad)
        input_pass(tuple(roots), tuple(grads), self.pending, needed=self.needed)

    def backward_weight(self) -> None:
        backward_weight(self.pending)


class SplitEngine:
    """Runs forwards that leave what their weight pass will need."""

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral
        self.pending: Pending | None = None  # of the forward that runs now

    def begin_step(self, loss: object) -> None:
        """Nothing to prepare."""

    def end_step(self) -> None:
        self.deferral.reset()

    def call(self, module: Value, args: Args, kwargs: Kwargs) -> Value:
        """Call the module of the stage, inside of a forward."""
        output, self.pending = run_deferred(self.deferral, module, args, kwargs)
        return output

    def forward(self, run: Run, args: Args, kwargs: Kwargs) -> tuple[MicrobatchPass, Output]:
        output = run(args, kwargs)
        pending, self.pending = self.pending, None
        assert pending is not None, "the forward has called the module"
        needed = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        return SplitPass(edges_of(output.roots), pending, needed=needed), output
