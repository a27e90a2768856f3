"""The state of random number generators: of the host, and of the devices that a forward may draw from."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def accelerators(device: torch.device, tensors: Iterable[Tensor]) -> set[torch.device]:
    """The devices whose random state a forward may draw from: the stage's, whether or not it has tensors, and its tensors'.

    >>> accelerators(torch.device("cpu"), [torch.ones(1), torch.ones(1, device="meta")])
    set()
    """
    return {one for one in (device, *(tensor.device for tensor in tensors)) if one.type not in ("cpu", "meta")}


class RandomState:
    """The random state of the host and of some devices, as it was when this was made."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.host = torch.get_rng_state()
        self.devices = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def set(self) -> None:
        torch.set_rng_state(self.host)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)
