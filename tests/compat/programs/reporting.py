"""What a program found, for the test to compare: one JSON file a rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed.pipelining


def report(folder: str, numbers: dict[str, Any]) -> None:
    found = {"package": torch.distributed.pipelining.__name__, "numbers": numbers}
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def checksum(module: torch.nn.Module) -> dict[str, float]:
    return {name: float((p.detach() * p.detach().cos()).sum()) for name, p in module.named_parameters()}
