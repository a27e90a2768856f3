"""The options of `compile=`: True, or options of torch.compile, and `memory_budget`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from penstock.errors import StageError, UnknownNameError
from penstock.nest import Value

CompileOptions = bool | Mapping[str, Value]

_NAMES = ("backend", "mode", "options", "dynamic", "fullgraph", "memory_budget")


def check_compile_options(given: object) -> None:
    """Refuse options that `compile=` does not know.

    >>> check_compile_options({"backened": "inductor"})
    Traceback (most recent call last):
        ...
    penstock.errors.UnknownNameError: compile has no option 'backened'; did you mean 'backend'?
    """
    if isinstance(given, bool):
        return
    if not isinstance(given, Mapping):
        raise StageError(f'compile={given!r}; expected True, or options of torch.compile: {{"backend": "inductor"}}')
    for name in given:
        if name not in _NAMES:
            near = difflib.get_close_matches(str(name), _NAMES, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(_NAMES)}"
            raise UnknownNameError(f"compile has no option {name!r}; {meant}")
    budget = given.get("memory_budget")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1):
        raise StageError(f"memory_budget={budget!r}; expected a share from 0 (recompute all) to 1 (as torch does)")
