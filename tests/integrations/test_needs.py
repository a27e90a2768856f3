"""An integration whose package is missing says what to install, and nothing else needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import MissingPackage
from penstock.integrations.needs import needed

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("transformers", "peft", "accelerate", "lightning", "torchmetrics", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import penstock, penstock.integrations, penstock.front, penstock.train
for name, extra in (("lightning", "lightning"), ("hf_trainer", "hf")):
    try:
        __import__(f"penstock.integrations.{name}")
    except penstock.errors.MissingPackage as error:
        assert f'pip install "penstock[{extra}]"' in str(error), error
    else:
        raise SystemExit(name)
"""


def test_the_error_says_what_to_install() -> None:
    with pytest.raises(MissingPackage, match=r'no_such_package.*pip install "penstock\[hf\]"'):
        needed("no_such_package", "hf")
    assert needed("json", "hf").loads("1") == 1


def test_penstock_needs_none_of_the_packages() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
