"""The alias: `import torch.distributed.pipelining` yields `penstock.compat`, here and in the processes started from here.

In this process a finder stands first in `sys.meta_path`. A child process that is a fresh interpreter (spawned, or started
by a launcher) gets the same from a `sitecustomize` module, whose folder `install` puts first on PYTHONPATH and which acts
only while PENSTOCK_COMPAT is set. A forked child inherits everything. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

TORCH = "torch.distributed.pipelining"
OURS = "penstock.compat"
SWITCH = "PENSTOCK_COMPAT"
STARTUP = str(Path(__file__).resolve().parent / "startup")


class _Alias(MetaPathFinder, Loader):
    """Finds penstock's modules under torch's names, and puts them where the import system looks for its result."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not is_aliased(fullname) or importlib.util.find_spec(OURS + fullname.removeprefix(TORCH)) is None:
            return None
        return ModuleSpec(fullname, self, is_package=fullname == TORCH)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(OURS + module.__name__.removeprefix(TORCH))


_finder = _Alias()
_replaced: dict[str, ModuleType] = {}  # torch's own modules, if they had been imported


def is_aliased(name: str) -> bool:
    return name == TORCH or name.startswith(TORCH + ".")


def install() -> None:
    """From here on, `import torch.distributed.pipelining` yields penstock. Safe to call again, and after torch's own
    package was imported: a warning then names the modules that hold objects of it already.
    """
    if _finder in sys.meta_path:
        return
    holders = _holders()
    _replaced.update(_taken_out())
    sys.meta_path.insert(0, _finder)
    os.environ[SWITCH] = "1"
    _put_on_path(STARTUP)
    if _replaced:
        _bind(importlib.import_module(TORCH))
    if holders:
        warnings.warn(
            f"torch.distributed.pipelining had been imported before penstock.compat.install(), and is still what "
            f"{', '.join(holders)} use; call install() before importing them",
            stacklevel=2,
        )


def uninstall() -> None:
    """Take the alias back: later imports yield torch's own package. Safe to call again."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    _taken_out()
    sys.modules.update(_replaced)
    os.environ.pop(SWITCH, None)
    _put_on_path()
    _bind(_replaced.get(TORCH))
    _replaced.clear()


def _taken_out() -> dict[str, ModuleType]:
    """The modules that stand under torch's names, which the import system forgets."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if is_aliased(name)}


def _put_on_path(*first: str) -> None:
    """Let the processes that are started from here look in `first` before the rest, and else not in our folder."""
    rest = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
    if paths := [*first, *(path for path in rest if path and path != STARTUP)]:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _bind(package: ModuleType | None) -> None:
    """Make the attribute of torch.distributed say the same as the import."""
    parent = sys.modules.get("torch.distributed")
    if parent is not None:
        vars(parent).pop("pipelining", None)
        if package is not None:
            parent.pipelining = package  # type: ignore[attr-defined]


def _holders() -> list[str]:
    """The modules outside torch that hold objects of its package."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" or not isinstance(module, ModuleType):
            continue
        for value in list(vars(module).values()):
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str) and is_aliased(home):
                found.add(name)
    return sorted(found)
