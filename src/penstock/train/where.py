"""On which device the ranks of a run compute, and whether it and the backend are there.

>>> where_of(TrainOptions(device="cpu"))
device(type='cpu')
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from penstock.errors import PenstockError
from penstock.train.train_options import TrainOptions


def where_of(options: TrainOptions) -> torch.device:
    """The device of this rank: of an accelerator, that with the number of the rank on its host."""
    kind = torch.device(options.device).type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def check_where(options: TrainOptions) -> None:
    """Say what is not there before any process is started."""
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise PenstockError(f"--device {options.device!r}: {str(error).partition(' device type at')[0]}") from error
    if device.index is not None:
        raise PenstockError(
            f"--device {options.device!r}; give the kind alone ({device.type}): each rank takes its own"
        )
    if options.backend is not None and not dist.is_backend_available(options.backend):
        known = sorted(
            n for n in dist.Backend.backend_list if n not in ("fake", "undefined") and dist.is_backend_available(n)
        )
        raise PenstockError(f"--backend {options.backend!r} is not in this torch; it has {', '.join(known)}")
    if device.type == "cpu":
        if options.backend in ("nccl", "xccl"):
            raise PenstockError(
                f"--backend {options.backend} has no messages for --device cpu; leave it out, or give gloo"
            )
        return
    try:
        count = int(torch.get_device_module(device).device_count())
    except (RuntimeError, AttributeError):
        count = 0
    if count < options.ranks * options.dp:
        raise PenstockError(
            f"--device {device.type}: {options.ranks * options.dp} ranks need a device each, and there are {count} here; give "
            "--device cpu, or fewer --ranks"
        )
