"""One stage: its module and its wires; forward; backward: full, input, weight."""

from __future__ import annotations
