"""Runs at the start of every Python process started from one where `penstock.compat.install()` was called."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def _continue_with_the_next() -> None:
    """Another sitecustomize may stand behind this one; its turn has come."""
    here = Path(__file__).resolve().parent
    for folder in sys.path:
        candidate = Path(folder or ".") / "sitecustomize.py"
        if candidate.is_file() and candidate.resolve().parent != here:
            spec = importlib.util.spec_from_file_location("sitecustomize", candidate)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


if os.environ.get("PENSTOCK_COMPAT"):
    if importlib.util.find_spec("penstock") is None:
        sys.path.append(str(Path(__file__).resolve().parents[3]))
    from penstock.compat._alias import install

    install()
_continue_with_the_next()
