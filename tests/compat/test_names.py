"""Every name that torch's package and its modules have can be imported from penstock's, and none is torch's own."""

from __future__ import annotations

import importlib
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.pipelining as theirs

import penstock
from penstock.errors import UnknownNameError

PACKAGE = theirs.__name__
MODULES = ["", *(module.name for module in pkgutil.iter_modules(theirs.__path__))]


def home(value: Any) -> str:
    """The module in which something was made, as far as it can be told."""
    return value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", None))


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_torchs_modules_is_there(module: str) -> None:
    suffix = f".{module}" if module else ""
    torchs = importlib.import_module(PACKAGE + suffix)
    ours = importlib.import_module("penstock.compat" + suffix)
    missing, strangers, different = [], [], []
    for name, value in vars(torchs).items():
        if name.startswith("__"):
            continue
        if not hasattr(ours, name):
            missing.append(name)
            continue
        found = getattr(ours, name)
        if home(found).startswith(PACKAGE):
            strangers.append(name)
        elif not home(value).startswith((PACKAGE, "logging", "None")) and isinstance(value, (type, types.ModuleType)):
            different += [] if found is value or home(found).startswith("penstock") else [name]
    assert not missing, f"penstock.compat{suffix} lacks {missing}: a program that imports one of them does not start"
    assert not strangers, f"penstock.compat{suffix} hands out torch's own {strangers}"
    assert not different, f"penstock.compat{suffix} has something else under {different}"


INSIDE = {
    "penstock.pipeline": (
        "DetachExecutor _LinearNodeList _NodeReference _direct_serialization_deserialize _direct_serialization_reduce "
        "_find_loss_from_output_and_spec _find_loss_output _insert_stage_symbolic_backward _modify_graph_op_device "
        "_split_after_forward _split_before_forward aten_pipe_split_alias"
    ),
    "stage_backward_input": (
        "_autograd_grad_for_inputs _get_grad_fn_or_grad_acc construct_reverse_graph get_param_groups reverse_closure"
    ),
    "penstock.show": "OpKey _ComputationTypeVisual action_type_to_color_mapping",
}


def test_what_is_inside_torchs_functions_says_so_when_it_is_used() -> None:
    """And nothing else does: whatever torch adds must be offered, or be named above."""
    refused: dict[str, set[str]] = {}
    for module in filter(None, MODULES):
        ours = importlib.import_module(f"penstock.compat.{module}")
        for name in vars(importlib.import_module(f"{PACKAGE}.{module}")):
            found = getattr(ours, name)
            if getattr(found, "__qualname__", "").startswith("_refusal."):
                with pytest.raises(UnknownNameError, match=re.escape(name)) as caught:
                    found(None)
                refused.setdefault(str(caught.value).rpartition("see ")[2], set()).add(name)
    assert refused == {instead: set(names.split()) for instead, names in INSIDE.items()}


def private_names() -> set[str]:
    """The private names of torch's package: of its modules, and of the classes in them."""
    found: set[str] = set()
    for module in MODULES:
        for name, value in vars(importlib.import_module(f"{PACKAGE}.{module}".rstrip("."))).items():
            if home(value).startswith(PACKAGE) and not isinstance(value, types.ModuleType):
                found |= {name, *(vars(value) if isinstance(value, type) else ())}
    tuples = {"_asdict", "_fields", "_make", "_replace"}  # what every NamedTuple has
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - tuples


def test_no_file_but_those_of_compat_knows_torchs_private_names() -> None:
    """Nor the methods by which programs drive torch's stages."""
    known = private_names()
    assert "_PipelineStageBase" in known
    assert "_prepare_forward_infra" in known
    driving = re.compile(r"\w+_one_chunk|\w+_maybe_with_nosync|get_[fb]wd_(?:send|recv)_ops|\w+_(?:send|recv)_info")
    root = Path(penstock.__file__).parent
    wrong = {}
    for path in root.rglob("*.py"):
        if path.is_relative_to(root / "compat"):
            continue
        words = set(re.findall(r"\b[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
        if mentioned := sorted(word for word in words if word in known or driving.fullmatch(word)):
            wrong[str(path.relative_to(root))] = mentioned
    assert wrong == {}
