"""Packages that one test each needs, too large for everybody's environment: `make others` puts them into a folder."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "others"


def installed_beside(package: str) -> str:
    """What belongs on PYTHONPATH for it; the test is skipped where it is neither there nor in the environment."""
    if (FOLDER / package).is_dir():
        return str(FOLDER)
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (tests/examples/others.txt, 1.6 GB): make others")
    return os.environ.get("PYTHONPATH", "")
