"""Names that programs take from a module because torch's own has them there, though they are at home somewhere else."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penstock.errors import UnknownNameError

TORCHS = "torch.distributed.pipelining"
_INSIDE = {
    name: instead
    for instead, names in {
        "penstock captures models in its own way, see penstock.pipeline": (
            "DetachExecutor _LinearNodeList _NodeReference _direct_serialization_deserialize _direct_serialization_reduce "
            "_find_loss_from_output_and_spec _find_loss_output _insert_stage_symbolic_backward _modify_graph_op_device "
            "_pipe_split _split_after_forward _split_before_forward aten_pipe_split_alias"
        ),
        "penstock walks graphs in its own way, see stage_backward_input": (
            "_autograd_grad_for_inputs _get_grad_fn_or_grad_acc construct_reverse_graph get_param_groups reverse_closure"
        ),
    }.items()
    for name in names.split()
}
"""What is inside torch's functions and of no use without them: it can be imported, and says so when it is used."""


def found_in(module: str, *rooms: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module: what it does not have itself is in one of these files of the package, there perhaps
    without the underscore, or where the module of that name in torch imports it from.

    >>> from penstock.compat.stage import flatten_args, nn
    >>> flatten_args.__module__, nn.__name__
    ('penstock.compat._utils', 'torch.nn')
    """
    short = module.rpartition(".")[2]

    def find(name: str) -> Any:
        if name == "logger":
            return importlib.import_module("logging").getLogger(module)
        if name in _INSIDE:
            return _refusal(f"{module}.{name}", _INSIDE[name])
        for room in () if name.startswith("__") else rooms:
            inside = vars(importlib.import_module(room, "penstock.compat"))
            for known in (name, name.removeprefix("_")):
                if known in inside:
                    return inside[known]
        if name.startswith("__") or name not in _imports(short):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, inner = _imports(short)[name]
        found = importlib.import_module(home)
        return found if inner is None else getattr(found, inner)

    return find


@cache
def _imports(short: str) -> dict[str, tuple[str, str | None]]:
    """What torch's module imports: by name the module that has it, and its name there; None for a module itself."""
    file = Path(torch.__file__).parent / "distributed" / "pipelining" / f"{short}.py"
    source = file.read_text(encoding="utf-8")
    found: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update({alias.asname or alias.name: (alias.name, None) for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            home = f"{TORCHS}.{node.module}" if node.level else str(node.module)
            home = home.replace(TORCHS, "penstock.compat")
            found.update({alias.asname or alias.name: (home, alias.name) for alias in node.names})
    return found


def _refusal(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise UnknownNameError(f"{name} is inside torch's own functions; {instead}")

    return refuse
