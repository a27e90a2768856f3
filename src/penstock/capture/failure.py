"""What to say when a model cannot be traced: the reason, the user's line, and the two ways out."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch
from torch import nn

from penstock.errors import CaptureError

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def reason(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] if lines else text


def explained(model: nn.Module, error: Exception) -> CaptureError:
    where = place_of(model, error)
    return CaptureError(
        f"torch.export cannot trace {type(model).__name__}: {type(error).__name__}: {reason(error)}{where}\n"
        "Two ways out:\n"
        f"  1. change {'that line' if where else 'the model'}: {_change(error)}, and capture again;\n"
        "  2. build the stages from the model's modules, without a trace: "
        f"penstock.split_modules(model, [{_parts(model)}], num_stages)"
    )


def place_of(model: nn.Module, error: BaseException) -> str:
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
    (
        "guard on data-dependent",
    ): "torch.where(condition, a, b), or torch.cond, in place of a branch that tensors decide",
    ("specialized integer", "specialized float", ".item()", "unbacked"): (
        "a number that comes out of a tensor must be an argument or a constant of the model instead (no .item(), int() or "
        "float() of a tensor)"
    ),
    ("numpy",): "stay in torch: no .numpy() and no numpy functions on tensors",
    ("mutat", "in-place", "inplace"): "make a new tensor instead of writing to this one, or register it as a buffer",
}
_ANY_CHANGE = "it must not depend on the values of tensors (torch.where for a branch, torch.cond, a fixed size)"


def _change(error: BaseException) -> str:
    text = str(error).lower()
    return next((what for signs, what in _CHANGES.items() if any(sign in text for sign in signs)), _ANY_CHANGE)


def _parts(model: nn.Module) -> str:
    """The names of the submodules from which stages could be made, as they would be written."""
    names = _names(model, "")
    shown = [f'"{name}"' for name in names]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])


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
