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

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock.capture.cutter import StagePiece
from penstock.capture.model_values import model_values
from penstock.capture.retrace import Retracer
from penstock.capture.stage_state import StateNames, owner_of
from penstock.capture.wires import Fixed, Key, Wire, misfit, where
from penstock.checks import check_types
from penstock.errors import CaptureError, ShapeError
from penstock.nest import Kind, Value


def run_stages(stages: Iterable[StageModule], values: dict[str, Value]) -> tuple[Value, ...]:
    """Run stages one after the other on values by the names of their wires, to which theirs are added; what the last one gave."""
    results: tuple[Value, ...] = ()
    for stage in stages:
        results = stage.run([values[wire.name] for wire in stage.inputs])
        values.update(zip([wire.name for wire in stage.outputs], results, strict=False))
    return results


class StageModule(nn.Module):
    """A stage: its parameters and buffers under the names of the user's model, and its part of the graph.

    pipe.get_stage_module(0)(x)
    """

    inputs: tuple[Wire, ...]
    outputs: tuple[Wire, ...]
    _anchor: torch.Tensor  # has no elements; goes wherever the module goes

    def __init__(self, index: int, num_stages: int, *, piece: StagePiece, source: Retracer, again: bool = True) -> None:
        check_types("StageModule", CaptureError, piece=(piece, StagePiece), source=(source, Retracer))
        super().__init__()
        self.stage_index = index
        self.num_stages = num_stages
        self.inputs = piece.inputs
        self.outputs = piece.outputs
        self.bare = False  # whether a call returns one output as it is, and the model's outputs without their nest
        self.own_only = False  # whether it then leaves out those that it was given, and did not compute
        self.why_static = source.why_static
        of_leaves = zip(source.example.table.names, source.example.dims, strict=True)
        self.asked = frozenset((name, dim) for name, dims in of_leaves for dim in dims or ())  # what was to stay open
        # Of each changing size of the arguments: those that are what it is, unless seen otherwise.
        self.partners = source.partners()
        self.model_names: frozenset[str] = frozenset()  # every name of the whole model
        self.aliases: dict[str, tuple[str, ...]] = {}  # all names of a tensor that has several, in the model's order
        self.mode = source.key  # which graph runs
        self._source = source if again else None  # traces the model in other modes and sizes
        self._pieces: dict[Key, StagePiece] = {}
        self._functions: dict[Key, Callable[..., Value]] = {}
        self._keys: dict[tuple[object, ...], Key] = {}  # which graph is for which sizes
        self._why_not: dict[Key, str] = {}
        self._device = source.example.device
        self.register_buffer("_anchor", torch.empty(0, device=self._device), persistent=False)
        self._made_as = self._anchor.dtype  # another since: so are all tensors of the module that are no whole numbers
        self._learn(self.mode, piece)
        if self.mode[0] is not None:
            self.training = self.mode[0]

    def hold_state(self, state: Mapping[str, torch.Tensor], names: StateNames) -> None:
        """Hold the user's own tensors under their names in the model: nothing is copied, what is shared stays one object."""
        self.model_names = frozenset(names.first)
        for name, value in state.items():
            if name in self.__dict__ or hasattr(type(self), name):
                raise CaptureError(
                    f"the model has a parameter or buffer called {name!r}, a name that stages use; rename it"
                )
            owner, leaf = owner_of(self, name, make=True)
            entries: dict[str, Value] = owner._parameters if isinstance(value, nn.Parameter) else owner._buffers
            entries[leaf] = value
            if name in names.transient:
                owner._non_persistent_buffers_set.add(leaf)
            if len(group := names.groups[names.first[name]]) > 1:
                self.aliases[name] = group
        self.prepare()

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    @property
    def graph(self) -> torch.fx.Graph:
        """The graph that runs in the present mode."""
        return self._pieces[self.mode].program.graph

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        """The inputs in the order of ``inputs``, or by name.

        Returns a tuple, in the order of ``outputs``; the last stage returns what the model returns.
        """
        values = args if not kwargs and len(args) == len(self.inputs) else self._bound(args, kwargs)
        key = self._key_of(values)
        results: tuple[Value, ...] = (self._functions.get(key) or self._function(key))(self, *values)
        if self.own_only and len(results) > 1:
            results = tuple(results[place] for place in self._pieces[key].computed)
        if self.bare:
            return results[0] if len(results) == 1 else results
        if self.stage_index < self.num_stages - 1:
            return results
        recipe = self._pieces[key].recipe
        return results[0] if recipe.kind is Kind.LEAF else model_values.unflatten(recipe, results)

    def model_output(self, values: Sequence[object], results: Sequence[object]) -> Value:
        """What the model returns, out of what the last stage was given and gave."""
        return model_values.unflatten(self._pieces[self._key_of(values)].recipe, results)

    def run(self, values: Sequence[object]) -> tuple[Value, ...]:
        """The outputs, in the order of ``outputs``."""
        key = self._key_of(values)
        return (self._functions.get(key) or self._function(key))(self, *values)  # type: ignore[no-any-return]

    def _key_of(self, values: Sequence[object]) -> Key:
        """Which graph is for these inputs: that of the present mode, or one of its own for sizes that need it."""
        if torch.compiler.is_dynamo_compiling():
            return self.mode if self._has_usual_sizes(values) else self._unusual_key(values)
        if torch.compiler.is_exporting() and any(isinstance(v, Tensor) and type(v) is not Tensor for v in values):
            return self.mode  # plain tensors: it is another thread that exports
        return self._known_key(values)

    def _has_usual_sizes(self, values: Sequence[object]) -> bool:
        """Whether values are as captured: no size that changes is 1, and no guard is broken.

        torch.compile can look through it, and then guards what it asks.
        """
        sizes: dict[str, int] = {}
        if misfit(self.inputs, values, sizes) or any(sizes.get(name) == 1 for name in self.partners):
            return False
        return all(guard.holds(sizes) for guard in self._pieces[self.mode].guards)

    def _unusual_key(self, values: Sequence[object]) -> Key:
        """Outside of what is compiled: another graph may have to be traced, or the sizes refused."""
        key: Key = torch.compiler.disable(self._known_key)(values)
        return key

    _unusual_key._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable would import all of torch._dynamo

    def _known_key(self, values: Sequence[object]) -> Key:
        seen = (self.mode, *[value.shape if isinstance(value, torch.Tensor) else None for value in values])
        known = self._keys.get(seen)
        if known is None:
            sizes: dict[str, int] = {}
            if wrong := misfit(self.inputs, values, sizes, self.why_static, self.asked):
                raise ShapeError(wrong)
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
            key = (self.mode[0], fixed) if fixed else self.mode
            self._ensure(key)
            broken = [guard for guard in self._pieces[key].guards if not guard.holds(sizes)]
            wanted = {name for guard in broken for name in guard.names if name in own} - {name for name, _ in fixed}
            if not broken:
                return key
            if not wanted:
                now = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                raise ShapeError(f"the model was captured for sizes with {broken[0].text}; this call has {now}")

    def train(self, mode: bool = True) -> StageModule:
        """Switch to the graph of that mode, tracing it first if need be."""
        key: Key = (mode, frozenset())
        self._ensure(key)
        super().train(mode)
        self.mode = key
        self.prepare()
        return self

    def prepare(self) -> None:
        """Have the function of the present mode ready, so that torch.compile does not come upon its making."""
        if self.mode not in self._functions:
            self._function(self.mode)

    def print_readable(self) -> str:
        """The stage as text: wires, parameters, code."""
        lines = [f"stage {self.stage_index} of {self.num_stages}"]
        lines += [f"  in   {wire}" for wire in self.inputs]
        lines += [f"  out  {wire}" for wire in self.outputs]
        sizes = [p.numel() for p in self.parameters()]
        code = self.graph.python_code("self").src.strip()
        return "\n".join([*lines, f"  {sum(sizes):,} parameters in {len(sizes)} tensors", "", code])

    def extra_repr(self) -> str:
        return f"stage {self.stage_index} of {self.num_stages}, inputs: {', '.join(map(str, self.inputs))}"

    def _bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Value, ...]:
        names = [wire.name for wire in self.inputs]
        if len(args) + len(kwargs) > len(names):
            raise CaptureError(
                f"stage {self.stage_index} takes {len(names)} inputs ({', '.join(names)}), {len(args) + len(kwargs)} were given"
            )
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        if missing := [str(wire) for wire in self.inputs if wire.name not in found]:
            given = ", ".join(found) or "nothing"
            raise CaptureError(f"stage {self.stage_index} is missing the input {', '.join(missing)}; given: {given}")
        return tuple(found[name] for name in names)

    def _ensure(self, key: Key) -> None:
        if key in self._pieces:
            return
        if self._source is None:
            why = self._why_not.get(key, "it was saved without")
            if key[1]:
                sizes = where(((wire.name, wire.shape) for wire in self.inputs), key[1], "is")
                raise ShapeError(
                    f"{sizes}, for which the model is traced on its own, and this stage has no such graph: {why}. Run it once "
                    "with that size before saving it"
                )
            raise CaptureError(
                f"stage {self.stage_index} has no graph for {'training' if key[0] else 'evaluation'}: {why}"
            )
        self._learn(key, self._source.piece(self.stage_index, key))

    def _learn(self, key: Key, piece: StagePiece) -> None:
        missing = [name for name in piece.states if self._pieces and self.tensor_named(name) is None]
        if missing:
            raise CaptureError(
                f"in {'training' if key[0] else 'evaluation'} stage {self.stage_index} uses {', '.join(missing)}, "
                "which it does not hold; capture the model once in each mode instead"
            )
        changed = None if self._anchor.dtype is self._made_as else self._anchor.dtype
        for name, value in piece.constants.items():  # one of another graph may have the same name, and other values
            made = value.detach().to(self._anchor.device, changed if value.is_floating_point() else None)
            others = (self._buffers.get(_of_graph(other, name)) for other in self._pieces)
            made = next((o for o in others if o is not None and o.dtype is made.dtype and torch.equal(o, made)), made)
            self.register_buffer(_of_graph(key, name), made, persistent=False)
        program = piece.program.moved(self._device, self._anchor.device)
        self._pieces[key] = replace(piece, program=program, constants={})

    def tensor_named(self, name: str) -> torch.Tensor | None:
        """The parameter or buffer of that name; None if it has none."""
        owner, leaf = owner_of(self, name)
        constant = self._buffers.get(_of_graph(self.mode, name))
        return owner._parameters.get(leaf, owner._buffers.get(leaf, constant))

    def _function(self, key: Key) -> Callable[..., Value]:
        """The graph as a function, made when it is first called. Tensors are taken out of the dicts of their modules, where
        wrappers that shard or replace them put others; that costs no call."""
        program = self._pieces[key].program
        for name, body in program.bodies.items():
            object.__setattr__(self, _of_graph(key, name), body.module())

        def written(name: str) -> str:
            own = _of_graph(key, name)
            if name in program.bodies or own in self._buffers:
                return f"self.{own}" if name in program.bodies else f"self._buffers[{own!r}]"
            *path, leaf = name.split(".")
            kind = "_parameters" if leaf in owner_of(self, name)[0]._parameters else "_buffers"
            return f"self{''.join(f'._modules[{part!r}]' for part in path)}.{kind}[{leaf!r}]"

        made = self._functions[key] = program.function(written)
        return made

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StageModule:
        old = self._anchor.device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        new = self._anchor.device
        if new != old:
            for key, piece in self._pieces.items():
                self._pieces[key] = replace(piece, program=piece.program.moved(old, new))
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
        return self._own_state() | {"_source": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.prepare()

    def __deepcopy__(self, memo: dict[int, object]) -> StageModule:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self._own_state(), memo))
        return made

    def _own_state(self) -> dict[str, object]:
        """All but what is made for this object only: functions, the bodies of regions, and what torch.compile made of it."""
        made = ("_functions", "_compiled_call_impl")
        kept = {k: v for k, v in self.__dict__.items() if k not in made and not isinstance(v, torch.fx.GraphModule)}
        return kept | {"_functions": {}}


def _of_graph(key: Key, name: str) -> str:
    """The attribute of a stage for what one of its graphs has under a name: a constant, or the body of a region."""
    return f"_{key[0]}_{'_'.join(f'{size}_{now}' for size, now in sorted(key[1]))}{name}"
