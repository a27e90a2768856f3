"""The model as one flat graph, by torch.export.

    example = Example(table, leaves, batch_dims(leaves)[0], device)
    traced = trace(skeleton_of(model, device), example, training=True, points={}, fall_back=True)
    traced.graph                     # aten operators, with the marks in their places

The graph keeps in-place updates of buffers, random operators and regions of another grad or autocast mode as the model
has them. What a placeholder stands for is in ``traced.origins``. When a model cannot be traced, the error has the reason,
the user's line, and the two ways out.
"""

from __future__ import annotations

import copy
import gc
import io
import linecache
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from penstock.capture.arguments import Dims, InputTable
from penstock.capture.marks import Mark, Points, keep_functions, refuse_backward_hooks, watching, watching_calls
from penstock.capture.model_values import model_values
from penstock.capture.wires import Guard, guards_of
from penstock.errors import CaptureError
from penstock.nest import LEAF, Kind, Nest, Value
from penstock.stage.intercept import undeferred

_PREFIX = "model."


def skeleton_of(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the user's model that holds no data: same classes, same attributes; parameters and buffers are fake tensors.

    The user's module is only read. Tracing the copy in another mode later does not need it any more, nor its memory.
    """
    lazy = [name for name, value in model.named_parameters() if is_lazy(value)]
    if lazy:
        raise CaptureError(
            f"{lazy[0]} has no shape yet: its module is a lazy one; run the model once with the example before the capture"
        )
    fake = fake_mode()
    memo: dict[int, object] = {id(constant): constant for constant in _plain_tensors(model)}
    memo |= {id(v): _fake(fake, v, device) for v in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be deep-copied ({error}), and capture traces a copy so that yours "
            "stays as it is. Give the attribute that cannot be copied a __deepcopy__, or create it in forward; or "
            "build the stages by hand: penstock.split_modules(model, [...], num_stages)"
        ) from error


def has_no_data(tensor: torch.Tensor) -> bool:
    """On the meta device, or made under fake tensors."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have sizes and no data, fit for torch.export."""
    return FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)


def without_values(tensor: torch.Tensor, device: torch.device | str = "meta") -> torch.Tensor:
    """A plain tensor of the same form on a device."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _fake(mode: FakeTensorMode, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    made: torch.Tensor = FakeTensor(mode, without_values(value), device if value.is_meta else value.device)
    return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where a model is; one without data will be on the CPU."""
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _plain_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that are plain attributes: small constants, kept as they are."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                inside = value.values() if isinstance(value, dict) else value
                items = inside if isinstance(value, dict | list | tuple) else (value,)
                yield from (item for item in items if isinstance(item, torch.Tensor))


class FromInput(NamedTuple):
    """A placeholder that is a leaf of the model's arguments, by its name."""

    name: str


class FromState(NamedTuple):
    """A placeholder that is a parameter or buffer, by its name in the user's model."""

    name: str
    parameter: bool


class FromConstant(NamedTuple):
    """A placeholder that is a tensor made while tracing, or a plain attribute of a module."""

    name: str
    value: torch.Tensor


Origin = FromInput | FromState | FromConstant


@dataclass(frozen=True)
class Traced:
    """What torch.export saw; once it is made flat, as a list of nodes with marks."""

    graph: fx.Graph
    root: fx.GraphModule  # holds the bodies of regions
    origins: dict[fx.Node, Origin]
    outputs: list[fx.Node]  # the leaves of the output
    recipe: Nest  # puts the output leaves back into what the model returns
    why_static: str  # why the batch dimension could not be kept dynamic, or ""
    guards: tuple[Guard, ...]  # what must be true of the sizes
    nodes: list[fx.Node] = field(default_factory=list)  # operators in order
    marks: tuple[Mark, ...] = ()
    index: dict[fx.Node, int] = field(init=False)  # of each node in that list

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {node: i for i, node in enumerate(self.nodes)})

    @property
    def inputs(self) -> list[fx.Node]:
        """The placeholders of the model's arguments, leaf by leaf."""
        return [node for node, origin in self.origins.items() if isinstance(origin, FromInput)]

    @property
    def parameters(self) -> dict[fx.Node, str]:
        """The placeholders that are parameters, with their names."""
        origins = self.origins.items()
        return {node: origin.name for node, origin in origins if isinstance(origin, FromState) and origin.parameter}

    def copied(self) -> Traced:
        """The same in a graph of its own: placing and cutting it leaves this one as it is."""
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.graph, values)
        origins = {values[node]: origin for node, origin in self.origins.items()}
        outputs, nodes = [values[node] for node in self.outputs], [values[node] for node in self.nodes]
        return replace(self, graph=graph, origins=origins, outputs=outputs, nodes=nodes)


class _Root(nn.Module):
    """Takes and returns flat tensors, so that export never meets a container that it does not know."""

    recipe: Nest = LEAF  # puts the tensors that were returned back into what the model returns

    def __init__(self, model: nn.Module, table: InputTable) -> None:
        super().__init__()
        self.model = model
        self.table = table
        self.training = model.training

    def forward(self, *leaves: torch.Tensor) -> tuple[Value, ...]:
        values, self.recipe = model_values.flatten(self.table.call(self.model, leaves), "the output")
        return tuple(values)


_MORE = {torch.Tensor.gt, torch.gt, torch.Tensor.__gt__}
_COMPARED = {torch.Tensor.lt, torch.lt, torch.Tensor.__lt__, *_MORE}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # data is a property of C's


class Answers(TorchFunctionMode):
    """Answers what export cannot.

    ``torch.rand([]) < 0``: never, and ``> 0``: always. Models with a layer-drop rate of zero ask this before every layer, and
    adapters with such a rate. ``weight.data`` is ``weight.detach()``: export takes the first for a constant, and knows no longer
    of what.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> object:
        if func == _DATA:
            return args[0].detach()
        if func in _COMPARED and len(args) == 2:
            if isinstance(args[1], int | float) and args[1] <= 0 and any(args[0] is draw for draw in self.draws):
                return func in _MORE
        result = func(*args, **(kwargs or {}))
        if func is torch.rand:
            self.draws.append(result)
        return result


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """What export would log, warn and print goes into our own error instead.

    Casts belong to a step, not to the graph, and so does whether there are gradients: a stage that is traced in the middle of a
    step is as it would be before it.
    """
    logger = logging.getLogger("torch")
    level, collecting = logger.level, gc.isenabled()
    logger.setLevel(logging.CRITICAL)
    gc.disable()  # a trace makes many small objects and drops few; collecting in between only takes time
    printed, graph = io.StringIO(), ""
    try:
        with warnings.catch_warnings(), redirect_stderr(printed), torch.enable_grad(), ExitStack() as casts:
            warnings.simplefilter("ignore")
            for kind in filter(torch.amp.is_autocast_available, {"cpu", device.type}):
                casts.enter_context(torch.autocast(kind, enabled=False))
            yield
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))  # export prints pages of it, whoever catches the error
        raise
    finally:
        sys.stderr.write(printed.getvalue().replace(f"{graph}\n", "") if graph else printed.getvalue())
        logger.setLevel(level)
        if collecting:
            gc.enable()


class Example(NamedTuple):
    """What a model is traced with."""

    table: InputTable
    leaves: Sequence[torch.Tensor]
    dims: Dims  # of each leaf: the dimensions whose size stays open
    device: torch.device  # on which fake tensors pretend to be


_one_trace = threading.RLock()  # torch.export and `watching_calls` replace functions and flags of the whole process


def trace(model: nn.Module, example: Example, *, training: bool | None, points: Points, fall_back: bool) -> Traced:
    """Trace a skeleton in the given mode (None: the mode of each submodule as it is).

    With `fall_back`, a model that cannot be traced with dynamic dimensions is traced with fixed ones. Threads trace one after
    the other.
    """
    with _one_trace:
        return _trace_alone(model, example, training=training, points=points, fall_back=fall_back)


def _trace_alone(
    model: nn.Module, example: Example, *, training: bool | None, points: Points, fall_back: bool
) -> Traced:
    why, dims = "", example.dims
    refuse_backward_hooks(model)
    if training is not None and any(part.training is not training for part in model.modules()):
        model.train(training)
    while True:
        mode = fake_mode()
        fakes = tuple(_fake(mode, leaf, example.device) for leaf in example.leaves)
        open_dims = (dims,) if any(dims) else None
        root = _Root(model, example.table)
        try:
            with (
                watching(model, points) as called,
                watching_calls(),
                undeferred(),
                _undisturbed(example.device),
                Answers(),
            ):
                program = torch.export.export(root, fakes, dynamic_shapes=open_dims, strict=False)
            break
        except CaptureError as error:
            raise CaptureError(f"{error}{_place_of(model, error)}") from error
        except Exception as error:
            if isinstance(error, GuardOnDataDependentSymNode) or not (fall_back and any(dims)):
                raise _explained(model, error) from error
            why, dims = _reason(error), tuple(None for _ in dims)
    _check_called(model, points, called)
    for inner in program.graph_module.modules():
        if isinstance(inner, fx.GraphModule):
            keep_functions(inner.graph)
    return _traced(program, iter(example.table.names), root.recipe, why)


def _traced(program: torch.export.ExportedProgram, inputs: Iterator[str], recipe: Nest, why: str) -> Traced:
    graph = program.graph
    origins: dict[fx.Node, Origin] = {}
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        match spec.kind:
            case InputKind.USER_INPUT:
                origins[node] = FromInput(next(inputs))
            case InputKind.PARAMETER | InputKind.BUFFER:
                name = str(spec.target).removeprefix(_PREFIX)
                origins[node] = FromState(name, spec.kind is InputKind.PARAMETER)
            case InputKind.CONSTANT_TENSOR:
                origins[node] = FromConstant(str(spec.target), program.constants[str(spec.target)])
            case _:
                raise CaptureError(
                    f"the model uses {spec.target}, a {spec.kind.name.lower()} that cannot be put into a stage"
                )
    returned: Value = graph.output_node().args[0]
    outputs = [value for value in returned if isinstance(value, fx.Node)]
    recipe = _settled(recipe, iter(returned))
    return Traced(graph, program.graph_module, origins, outputs, recipe, why, guards_of(program))


def _settled(recipe: Nest, leaves: Iterator[object]) -> Nest:
    """What puts the output together, without the leaves that the trace found to be constant: sizes that cannot change."""
    if recipe.kind is Kind.LEAF:
        leaf = next(leaves)
        return recipe if isinstance(leaf, fx.Node) else Nest(Kind.CONSTANT, leaf)
    return replace(recipe, children=tuple(_settled(child, leaves) for child in recipe.children))


def _check_called(model: nn.Module, points: Points, called: set[str]) -> None:
    for name in (name for name in points if name not in called):
        child = model.get_submodule(name)
        inside = [f"{name}.{n}" for n, _ in child.named_children()]
        hint = f"; the modules inside it are called {', '.join(inside[:4])}" if inside else ""
        raise CaptureError(
            f"{name!r} ({type(child).__name__}) is named in split_spec, and the model never calls it with these "
            f"arguments{hint}"
        )


_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _explained(model: nn.Module, error: Exception) -> CaptureError:
    where, text = _place_of(model, error), str(error).lower()
    change = next((what for signs, what in _CHANGES.items() if re.search(signs, text)), _ANY_CHANGE)
    explained = CaptureError(
        f"torch.export cannot trace {type(model).__name__}: {type(error).__name__}: {_reason(error)}{where}\n"
        "Two ways out:\n"
        f"  1. change {'that line' if where else 'the model'}: {change}, and capture again;"
    )
    explained.modules = tuple(_names(model, ""))
    return explained


def with_second_way(error: CaptureError, wrong: str) -> CaptureError:
    """The error of a model that cannot be traced, with the way out that needs no trace.

    `wrong` says why the model's modules, called in order, are not the model.
    """
    names = [f'"{name}"' for name in error.modules]
    listed = ", ".join(names if len(names) <= 8 else [*names[:3], "...", names[-1]])
    call = f"penstock.split_modules(model, [{listed}], num_stages, example=(x,))"
    if wrong:
        call += (
            f". As they stand these are not the model: {wrong}. Say with calls= how each is called, or name larger ones"
        )
    return CaptureError(f"{error}\n  2. build the stages from the model's modules, without a trace: {call}")


def _place_of(model: nn.Module, error: BaseException) -> str:
    """The last line of the user's code that ran, and the submodule in whose forward it stands."""
    names = {id(module): name for name, module in model.named_modules()}
    found, inside = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            inside = f"\n  in {names[id(module)]} ({type(module).__name__})"
        path = frame.f_code.co_filename
        if not path.startswith(_NOT_THE_USERS):
            code = linecache.getline(path, line).strip()
            found = f"{inside}\n  at {path}:{line} in {frame.f_code.co_name}\n      {code}"
    return found


_CHANGES = {  # what a reason says: what to do
    "guard on data-dependent": "torch.where(condition, a, b), or torch.cond, in place of a branch that tensors decide",
    r"specialized integer|specialized float|\.item\(\)|unbacked": (
        "a number that comes out of a tensor must be an argument or a constant of the model instead (no .item(), int() or "
        "float() of a tensor)"
    ),
    "numpy": "stay in torch: no .numpy() and no numpy functions on tensors",
    "mutat|in-place|inplace": "make a new tensor instead of writing to this one, or register it as a buffer",
}
_ANY_CHANGE = "it must not depend on the values of tensors (torch.where for a branch, torch.cond, a fixed size)"


def _names(module: nn.Module, prefix: str) -> list[str]:
    """Submodules as small as the entries of lists."""
    found: list[str] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            found += [f"{prefix}{name}.{inner}" for inner, _ in child.named_children()]
        elif any(isinstance(inner, nn.ModuleList) for inner in child.modules()):
            found += _names(child, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found
