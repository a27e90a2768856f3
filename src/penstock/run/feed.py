"""Feed: brings a batch that is in host memory to the device, microbatch by microbatch, while the device computes.

    feed = Feed(device, stream)
    feed.start(second)        # a copy begins, on the feed's own stream
    feed.take(first)          # the same nest on the device; the current stream waits for its copies, and no host does

Memory of the host that is not pinned is copied to pinned memory first, by the host; where a device has none, the host waits
for the copy. Tensors that are on a device already are left alone, and one that several microbatches share is copied once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.backward.offload_targets import PendingLoad
from penstock.nest import Value, map_tensors


class Feed:
    """The copies of one step. The stream is the caller's, and the same for all steps."""

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device, self._stream = device, stream
        # By the id of a tensor: the tensor, its pinned copy, and that on the device. All are kept for the step.
        self._begun: dict[int, tuple[Tensor, Tensor, PendingLoad]] = {}

    def of(self, values: Sequence[Value], microbatch: int) -> Value:
        """The value of a microbatch, on the device; the copy of the next one begins."""
        taken = self.take(values[microbatch])
        self.start(values[microbatch + 1 : microbatch + 2])
        return taken

    def start(self, value: object) -> None:
        """Begin to copy what is in host memory."""
        map_tensors(self._begin, value)

    def take(self, value: object) -> Value:
        """The value with all its tensors on the device."""
        return map_tensors(self._take, value)

    def _begin(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.requires_grad and id(tensor) not in self._begun:
            source = pinned(tensor)
            with self._stream, torch.no_grad():
                there = source.to(self._device, non_blocking=True)
            self._begun[id(tensor)] = tensor, source, PendingLoad(there, self._stream.record_event())
        return tensor

    def _take(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if tensor.requires_grad:  # its copy is a part of the graph
            return tensor.to(self._device)
        self._begin(tensor)
        return self._begun[id(tensor)][2].wait()


def pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory, from which a device copies without a wait of the host; as it is where there is none."""
    try:
        return tensor if tensor.is_pinned() else tensor.pin_memory()
    except (RuntimeError, NotImplementedError):  # a device without pinned memory
        return tensor
