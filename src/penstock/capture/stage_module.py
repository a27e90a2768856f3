"""One stage of a captured model, as a module.

    stage = pipe.get_stage_module(1)
    stage(hidden)                   # runs alone: the tuple of its outputs; the last one returns what the model returns
    stage.state_dict()              # the names of the user's model: "layers.3.attn.q.weight"
    stage.inputs, stage.outputs     # its wires
    stage.eval()                    # dropout off, batch norm by its statistics: as on the model

Batch norm in training uses the statistics of each microbatch and updates the running ones in place after each of
them, as a plain loop over the microbatches does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock.capture.arguments import model_values
from penstock.capture.cutter import StagePiece
from penstock.capture.stage_graph import OperatorGraph
from penstock.capture.wires import Fixed, Guard, Key, Wire, check_sizes, sizes_fit, where
from penstock.errors import CaptureError, ShapeError
from penstock.misfits import takes
from penstock.nest import Kind, Nest, Value

if TYPE_CHECKING:
    from penstock.capture.retrace import Retracer


@dataclass(frozen=True)
class OutputRecipe:
    """How the last stage puts the model's output together."""

    recipe: Nest
    fixed: tuple[tuple[int, object], ...]

    def build(self, values: Sequence[object]) -> Value:
        if self.recipe.kind is Kind.LEAF and values:
            return values[0]
        leaves = list(values)
        for position, value in self.fixed:
            leaves.insert(position, value)
        return model_values.unflatten(self.recipe, leaves)


@takes(CaptureError)
class StageModule(nn.Module):
    """A stage: its parameters and buffers under the names of the user's model, and its part of the graph.

    pipe.get_stage_module(0)(x)
    """

    inputs: tuple[Wire, ...]
    outputs: tuple[Wire, ...]
    _anchor: torch.Tensor  # has no elements; goes wherever the module goes

    def __init__(
        self, index: int, num_stages: int, *, piece: StagePiece, key: Key, source: Retracer | None, device: torch.device
    ) -> None:
        super().__init__()
        self.stage_index = index
        self.num_stages = num_stages
        self.inputs = piece.inputs
        self.outputs = piece.outputs
        self.bare = False  # whether a call returns one output as it is, and the model's outputs without their nest
        self.own_only = False  # whether it then leaves out those that it was given, and did not compute
        self.why_static = ""
        # Of each changing size of the arguments: those that are what it is, unless seen otherwise.
        self.partners: dict[str, frozenset[str]] = {}
        self.model_names: frozenset[str] = frozenset()  # every name of the whole model
        self.aliases: dict[str, tuple[str, ...]] = {}  # all names of a tensor that has several, in the model's order
        self._key = key
        self._source = source
        self._programs: dict[Key, OperatorGraph] = {}
        self._functions: dict[Key, Callable[..., Value]] = {}
        self._results: dict[Key, OutputRecipe] = {}
        self._places: dict[Key, Sequence[int]] = {}  # of the outputs that the last stage computes itself
        self._guards: dict[Key, tuple[Guard, ...]] = {}
        self._keys: dict[tuple[object, ...], Key] = {}  # which graph is for which sizes
        self._why_not: dict[Key, str] = {}
        self.register_buffer("_anchor", torch.empty(0, device=device), persistent=False)
        self._device = device
        self._learn(key, piece)
        mode = key[0]
        if mode is not None:
            self.training = mode

    def add_constants(self, constants: Mapping[str, torch.Tensor]) -> None:
        for name, value in constants.items():
            if name not in self._buffers:
                self.register_buffer(name, value.detach().to(self._device), persistent=False)

    def add_state(self, name: str, value: torch.Tensor, *, persistent: bool = True) -> None:
        """Hold a parameter or buffer under its name in the user's model."""
        *path, leaf = name.split(".")
        if not path and (leaf in self.__dict__ or hasattr(type(self), leaf)):
            raise CaptureError(
                f"the model has a parameter or buffer called {leaf!r}, a name that stages use; rename it"
            )
        owner = self._owner(path, make=True)
        if isinstance(value, nn.Parameter):
            owner._parameters[leaf] = value
        else:
            owner._buffers[leaf] = value
            if not persistent:
                owner._non_persistent_buffers_set.add(leaf)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    @property
    def graph(self) -> torch.fx.Graph:
        """The graph that runs in the present mode."""
        return self._programs[self._key].graph

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        """The inputs in the order of ``inputs``, or by name.

        Returns a tuple, in the order of ``outputs``; the last stage returns what the model returns.
        """
        values = args if not kwargs and len(args) == len(self.inputs) else self._bound(args, kwargs)
        key = self._key_of(values)
        results: tuple[Value, ...] = (self._functions.get(key) or self._function(key))(self, *values)
        if self.own_only and len(results) > 1:
            results = tuple(results[place] for place in self._places[key])
        if self.bare:
            return results[0] if len(results) == 1 else results
        return self._results[key].build(results) if self._results else results

    def model_output(self, values: Sequence[object]) -> Value:
        """What the model returns, out of the inputs of the last stage."""
        key = self._key_of(values)
        return self._results[key].build(self.run(values))

    def run(self, values: Sequence[object]) -> tuple[Value, ...]:
        """The outputs, in the order of ``outputs``."""
        key = self._key_of(values)
        return (self._functions.get(key) or self._function(key))(self, *values)  # type: ignore[no-any-return]

    def _key_of(self, values: Sequence[object]) -> Key:
        """Which graph is for these inputs: that of the present mode, or one of its own for sizes that need it."""
        if torch.compiler.is_compiling():
            usual = torch.compiler.is_exporting() or sizes_fit(
                self.inputs, values, self.partners, self._guards[self._key]
            )
            return self._key if usual else self._unusual_key(values)
        return self._known_key(values)

    def _unusual_key(self, values: Sequence[object]) -> Key:
        """Outside of what is compiled: another graph may have to be traced, or the sizes refused."""
        key: Key = torch.compiler.disable(self._known_key)(values)
        return key

    _unusual_key._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable would import all of torch._dynamo

    def _known_key(self, values: Sequence[object]) -> Key:
        seen = (self._key, *[value.shape if isinstance(value, torch.Tensor) else None for value in values])
        known = self._keys.get(seen)
        if known is None:
            sizes: dict[str, int] = {}
            check_sizes(self.inputs, values, why_static=self.why_static, symbols=sizes)
            known = self._keys[seen] = self._key_for(sizes)
        return known

    def _key_for(self, sizes: Mapping[str, int]) -> Key:
        """Export takes a size of 1 for a constant, and every branch on a size once: such sizes are traced on their own."""
        own = {name: size for name, size in sizes.items() if name in self.partners}
        wanted = {name for name, size in own.items() if size == 1}
        fixed: Fixed = frozenset()
        while True:
            for name in wanted:
                others = self.partners[name] - sizes.keys()  # in arguments that only other stages read
                fixed |= {(n, own[name]) for n in (name, *others)}
            key = (self._key[0], fixed) if fixed else self._key
            self._ensure(key)
            broken = [guard for guard in self._guards[key] if not guard.holds(sizes)]
            wanted = {name for guard in broken for name in guard.names & own.keys()} - {name for name, _ in fixed}
            if not broken:
                return key
            if not wanted:
                now = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                raise ShapeError(f"the model was captured for sizes with {broken[0].text}; this call has {now}")

    def build_output(self, values: Sequence[object]) -> Value:
        """What the model returns, out of the outputs of the last stage."""
        return self._results[self._key].build(values)

    def train(self, mode: bool = True) -> StageModule:
        """Switch to the graph of that mode, tracing it first if need be."""
        key: Key = (mode, frozenset())
        self._ensure(key)
        super().train(mode)
        self._key = key
        self.prepare()
        return self

    @property
    def mode(self) -> Key:
        """Which graph runs; it can be set to one of before, which `train` cannot if parts of the model are in different modes."""
        return self._key

    @mode.setter
    def mode(self, key: Key) -> None:
        self._key = key

    def prepare(self) -> None:
        """Have the function of the present mode ready, so that torch.compile does not come upon its making."""
        if self._key not in self._functions:
            self._function(self._key)

    def print_readable(self) -> str:
        """The stage as text: wires, parameters, code."""
        lines = [f"stage {self.stage_index} of {self.num_stages}"]
        lines += [f"  in   {wire}" for wire in self.inputs]
        lines += [f"  out  {wire}" for wire in self.outputs]
        count = sum(p.numel() for p in self.parameters())
        lines += [
            f"  {count:,} parameters in {len(list(self.parameters()))} tensors",
            "",
            self._programs[self._key].source(),
        ]
        return "\n".join(lines)

    def extra_repr(self) -> str:
        wires = ", ".join(str(w) for w in self.inputs)
        return f"stage {self.stage_index} of {self.num_stages}, inputs: {wires}"

    def _bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Value, ...]:
        names = [wire.name for wire in self.inputs]
        if len(args) > len(names):
            raise CaptureError(
                f"stage {self.stage_index} takes {len(names)} inputs ({', '.join(names)}), {len(args)} were given"
            )
        found = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name in found or name not in names:
                raise CaptureError(
                    f"stage {self.stage_index} got {name!r} twice or has no such input: {', '.join(names)}"
                )
            found[name] = value
        missing = [str(wire) for wire in self.inputs if wire.name not in found]
        if missing:
            raise CaptureError(f"stage {self.stage_index} is missing the input {', '.join(missing)}")
        return tuple(found[name] for name in names)

    def _ensure(self, key: Key) -> None:
        if key in self._programs:
            return
        if self._source is None:
            why = self._why_not.get(key, "it was saved without")
            if key[1]:
                raise ShapeError(
                    f"{where(self.inputs, key[1])}, for which the model is traced on its own, and this stage has no such graph: "
                    f"{why}. Run it once with that size before saving it"
                )
            raise CaptureError(
                f"stage {self.stage_index} has no graph for {'training' if key[0] else 'evaluation'}: {why}"
            )
        self._learn(key, self._source.piece(self.stage_index, key))

    def _learn(self, key: Key, piece: StagePiece) -> None:
        missing = [name for name in piece.states if self._programs and not self._holds(name)]
        if missing:
            raise CaptureError(
                f"in {'training' if key[0] else 'evaluation'} stage {self.stage_index} uses {', '.join(missing)}, "
                "which it does not hold; capture the model once in each mode instead"
            )
        self.add_constants(piece.constants)
        self._guards[key] = piece.guards
        if self.is_last:
            self._results[key] = OutputRecipe(piece.recipe, piece.fixed)
            self._places[key] = _computed(piece.graph)
        program = OperatorGraph(piece.graph, piece.bodies).moved(self._device, self._anchor.device)
        self._programs[key] = program

    def _holds(self, name: str) -> bool:
        *path, leaf = name.split(".")
        owner = self._owner(path)
        return leaf in owner._parameters or leaf in owner._buffers

    def _owner(self, path: Sequence[str], *, make: bool = False) -> nn.Module:
        """The submodule that holds a parameter of the user's model. Not by its attributes: some have names of ours."""
        owner: nn.Module = self
        for part in path:
            if make and part not in owner._modules:
                owner._modules[part] = nn.Module()
            owner = owner._modules.get(part) or nn.Module()
        return owner

    def _function(self, key: Key) -> Callable[..., Value]:
        """The graph as a function, made when it is first called. Tensors are taken out of the dicts of their modules, where
        wrappers that shard or replace them put others; that costs no call."""
        program = self._programs[key]
        mode = f"{key[0]}_{'_'.join(f'{name}_{size}' for name, size in sorted(key[1]))}"
        for name, body in program.bodies.items():
            object.__setattr__(self, f"_{mode}{name}", body.module())

        def written(name: str) -> str:
            if name in program.bodies:
                return f"self._{mode}{name}"
            *path, leaf = name.split(".")
            kind = "_parameters" if leaf in self._owner(path)._parameters else "_buffers"
            return f"self{''.join(f'._modules[{part!r}]' for part in path)}.{kind}[{leaf!r}]"

        made = self._functions[key] = program.function(written)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StageModule:
        old = self._anchor.device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        new = self._anchor.device
        if new != old:
            for key, program in list(self._programs.items()):
                self._programs[key] = program.moved(old, new)
            self._functions.clear()
            self.prepare()
        return self

    def __getstate__(self) -> dict[str, object]:
        if self._source is not None:
            for mode in (True, False):
                try:
                    self._ensure((mode, frozenset()))
                except CaptureError as error:
                    self._why_not[mode, frozenset()] = str(error)
        compiled = "_compiled_call_impl"  # for this object only, as of any module
        state = {k: v for k, v in self.__dict__.items() if not isinstance(v, torch.fx.GraphModule) and k != compiled}
        return state | {"_source": None, "_functions": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.prepare()

    def __deepcopy__(self, memo: dict[int, object]) -> StageModule:
        import copy

        made = type(self).__new__(type(self))
        memo[id(self)] = made
        skip = ("_source", "_functions", "_programs", "_compiled_call_impl")
        state = {k: v for k, v in self.__dict__.items() if k not in skip and not isinstance(v, torch.fx.GraphModule)}
        nn.Module.__setstate__(made, copy.deepcopy(state, memo))
        made._source = self._source
        made._programs = dict(self._programs)
        made._functions = {}
        made.prepare()
        return made


def _computed(graph: torch.fx.Graph) -> Sequence[int]:
    """The places of the outputs that are computed in this graph; all, if none is."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    values = output.args[0]
    assert isinstance(values, list | tuple)
    return [i for i, value in enumerate(values) if getattr(value, "op", "") != "placeholder"] or range(len(values))
