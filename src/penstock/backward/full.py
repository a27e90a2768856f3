"""Full backward: input and parameter gradients in one engine call. And weight gradients computed by a function of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.backward.engine_protocol import Args, Kwargs, MicrobatchPass, Output, Run, Seeds
from penstock.errors import StageError
from penstock.stage.engine import run_engine, run_on_host

Edges = list[GradientEdge | None]


def edges_of(roots: Iterable[Tensor]) -> Edges:
    """Return the gradient edges of `roots`; None for tensors without a gradient.

    An edge keeps the autograd graph of a tensor alive, but not the tensor.
    """
    return [get_gradient_edge(root) if root.requires_grad else None for root in roots]


@dataclass(slots=True)
class FullPass:
    """A microbatch whose backward is one engine call."""

    edges: Edges

    def backward(self, seeds: Seeds) -> None:
        edges, self.edges = self.edges, []
        roots: list[GradientEdge] = []
        grads: list[Tensor] = []
        for place, grad in seeds:
            edge = edges[place]
            if edge is not None:
                roots.append(edge)
                grads.append(grad)
        if not roots:
            return
        if grads[0].is_cpu:  # as `run_engine` does
            run_on_host(tuple(roots), tuple(grads), False, False, (), True, True)
        else:
            run_engine(tuple(roots), tuple(grads))

    def backward_input(self, seeds: Seeds) -> None:
        self.backward(seeds)

    def backward_weight(self) -> None:
        """Nothing is deferred."""

    def recompute(self, args: Args, kwargs: Kwargs) -> None:
        """All saved tensors are still there."""

    def offload(self) -> None:
        """Saved tensors stay on the device."""

    def load(self) -> None:
        """Saved tensors have stayed on the device."""


class FullEngine:
    """Runs the module as it is."""

    def forward(self, run: Run, args: Args, kwargs: Kwargs) -> tuple[MicrobatchPass, Output]:
        output = run(args, kwargs)
        edges: Edges = []
        for root in output.roots:
            if root.requires_grad:
                edges.append(get_gradient_edge(root))
            else:
                edges.append(None)
        return FullPass(edges), output

    def begin_step(self, loss: object) -> None:
        """Nothing to prepare."""

    def end_step(self) -> None:
        """Nothing to release."""


class ManualPass(FullPass):
    """A microbatch whose parameter gradients are computed by a function of the user."""

    __slots__ = ("builder", "weight")

    def __init__(self, edges: Edges, builder: Callable[[], Callable[[], None]]) -> None:
        super().__init__(edges)
        self.builder = builder

    def backward(self, seeds: Seeds) -> None:
        self.backward_input(seeds)
        self.backward_weight()

    def backward_input(self, seeds: Seeds) -> None:
        super().backward(seeds)
        self.weight = self.builder()
        if not callable(self.weight):
            raise StageError(
                f"dw_builder must return a function without arguments that does the weight work, got {self.weight!r}; "
                "write `def dw_builder(): return my_weight_work`, not `return my_weight_work()`"
            )

    def backward_weight(self) -> None:
        self.weight()


class ManualEngine(FullEngine):
    """Calls ``dw_builder()`` after each input pass; the function that it returns is the weight pass.

    >>> log = []
    >>> ManualEngine(lambda: lambda: log.append("dW")).forward(lambda *_: Output(), (), {})[0].backward([])
    >>> log
    ['dW']
    """

    def __init__(self, dw_builder: Callable[[], Callable[[], None]]) -> None:
        self.builder = dw_builder

    def begin_step(self, loss: object) -> None:
        if not callable(self.builder):
            raise StageError(
                f"dw_builder must be a function that returns the weight work, got {self.builder!r}; "
                "write `dw_builder=lambda: my_weight_work`"
            )

    def forward(self, run: Run, args: Args, kwargs: Kwargs) -> tuple[MicrobatchPass, Output]:
        output = run(args, kwargs)
        return ManualPass(edges_of(output.roots), self.builder), output
