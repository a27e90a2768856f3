"""Its folder is put on PYTHONPATH, so that child processes run `sitecustomize` at their start."""

from __future__ import annotations
