"""Packages that only an integration needs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from penstock.errors import MissingPackage


def needed(package: str, extra: str) -> ModuleType:
    """The package, or an error that says what to install.

    transformers = needed("transformers", "hf")
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
            raise  # it is there, and lacks something of its own
        raise MissingPackage(
            f'this integration needs the package {package}, which is not installed: pip install "penstock[{extra}]"'
        ) from error
