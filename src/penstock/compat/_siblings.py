"""Names that programs take from a module because torch's own has them there, though they are at home somewhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from penstock.errors import UnknownNameError

_ELSEWHERE = {
    name: home
    for home, names in {
        "abc": "ABC abstractmethod",
        "collections": "Counter defaultdict",
        "collections.abc": "Callable Iterator Sequence",
        "dataclasses": "dataclass field",
        "enum": "Enum",
        "functools": "lru_cache",
        "inspect": "Signature signature",
        "types": "MethodType",
        "typing": "Literal NamedTuple Protocol TYPE_CHECKING TypeAlias cast overload",
        "torch._dynamo.eval_frame": "OptimizedModule",
        "torch._subclasses.fake_tensor": "FakeTensor",
        "torch.autograd.profiler": "record_function",
        "torch.distributed": "ProcessGroup",
        "torch.distributed._composable.replicate_with_fsdp": "ReplicateModule replicate",
        "torch.distributed._mesh_layout": "_MeshLayout",
        "torch.distributed.fsdp": "FSDPModule UnshardHandle fully_shard",
        "torch.distributed.tensor": "DTensor",
        "torch.export.exported_program": "ExportedProgram",
        "torch.export.unflatten": "InterpreterModule _AttrKind _SubmoduleEntry _assign_attr _sink_params",
        "torch.fx.node": "Argument map_aggregate",
        "torch.fx.passes.split_module": "split_module",
        "torch.nn": "Parameter",
        "torch.nn.attention.flex_attention": "BlockMask",
        "torch.nn.modules.loss": "_Loss",
        "torch.nn.parallel": "DistributedDataParallel",
        "torch.utils._pytree": "tree_flatten tree_map tree_unflatten",
    }.items()
    for name in names.split()
} | {"_IR.Parameter": "inspect"}
_MODULES = {
    **{
        name: name
        for name in ["collections", "copy", "csv", "itertools", "logging", "operator", "re", "torch", "warnings"]
    },
    "fx": "torch.fx",
    "mock": "unittest.mock",
    "nn": "torch.nn",
}
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
        "penstock cuts batches in its own way, see split_args_kwargs_into_chunks": (
            "_debug_mask_minibatches _shard_dict_of_args"
        ),
    }.items()
    for name in names.split()
}
"""What is inside torch's functions and of no use without them: it can be imported, and says so when it is used."""


def found_in(module: str, *siblings: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module: what it does not have itself stands in one of its siblings, or where torch has it from.

    >>> from penstock.compat.stage import flatten_args, nn
    >>> flatten_args.__module__, nn.__name__
    ('penstock.compat._utils', 'torch.nn')
    """

    def find(name: str) -> Any:
        for sibling in siblings if not name.startswith("__") else ():
            names = vars(importlib.import_module(f"penstock.compat.{sibling}"))
            if name in names:
                return names[name]
        if name == "logger":
            return importlib.import_module("logging").getLogger(module)
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        home = _ELSEWHERE.get(f"{module.rpartition('.')[2]}.{name}") or _ELSEWHERE.get(name)
        if home is not None:
            return getattr(importlib.import_module(home), name)
        if name in _INSIDE:
            return _refusal(f"{module}.{name}", _INSIDE[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def _refusal(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise UnknownNameError(f"{name} is inside torch's own functions; {instead}")

    return refuse
