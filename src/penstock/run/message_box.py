"""MessageBox: one end of the messages between two stages, and what is under way to it, microbatch by microbatch.

Values go one way and their gradients the other. Each message has a cold form, which describes itself, and a warm form, which
relies on the layout that the cold step left (see `penstock.run.layout`).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.comm.framing import Receiving
from penstock.comm.messages import Work
from penstock.run.channel import Channel
from penstock.run.layout import GradLayout, Layout

Here = TypeVar("Here")  # what has arrived: leaves, or gradients where there are some
Incoming = TypeVar("Incoming", Layout, GradLayout)
Outgoing = TypeVar("Outgoing", Layout, GradLayout)


class MessageBox(Generic[Here, Incoming, Outgoing]):
    """What an inbox and an outbox have in common: receiving, waiting, and getting out of the way of a failed step."""

    def __init__(self, num_microbatches: int, channel: Channel | None, *, grad: bool) -> None:
        self.channel: Channel = channel  # type: ignore[assignment]  # None: both stages sit here; only messages use it
        self.grad = grad  # whether gradients go back
        self.arrived: list[list[Here] | None] = [None] * num_microbatches  # what arrives here, or is here
        self.works: list[list[Work] | None] = [None] * num_microbatches  # while they are under way
        self.incoming: list[Incoming | None] = [None] * num_microbatches  # what is known of what arrives
        self.outgoing: list[Outgoing | None] = [None] * num_microbatches  # and of what is sent

    def post(self, microbatch: int) -> None:
        """A receive of a warm step."""
        channel, layout = self.channel, self.incoming[microbatch]
        assert layout is not None, "a warm step knows what comes"
        buffers: list[Tensor | None] = [  # None: a value that has no gradient
            None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=channel.device)
            for tensor in layout.tensors
        ]
        try:
            works = [channel.recv([buffer]) for buffer in buffers if buffer is not None]
        except RuntimeError as error:
            channel.fail(error)
        self.arrived[microbatch] = buffers  # type: ignore[assignment]  # as many, and of which kind, the layout says
        self.works[microbatch] = works

    def queue(self, microbatch: int) -> None:
        """A receive of a cold step: its turn comes when somebody needs it, or something behind it."""
        self.channel.incoming.append(self.pull(microbatch))

    def pull(self, microbatch: int) -> Receiving[None]:
        """Receive a message of a cold step, and what it says of itself."""
        raise NotImplementedError

    def wait_for(self, microbatch: int) -> list[Here]:
        """What has arrived, as soon as it is there."""
        works = self.works[microbatch]
        if works is not None:
            wait = self.channel.wait
            self.channel.transport.awaited = self.channel.peer
            try:
                while works:  # taken out before it is waited for: a wait that Ctrl-C breaks off is over all the same
                    wait(works.pop())
            except RuntimeError as error:
                self.channel.fail(error)
            self.works[microbatch] = None
        elif self.arrived[microbatch] is None and self.channel is not None:
            self.channel.pull_until(lambda: self.arrived[microbatch] is not None)
        return self.arrived[microbatch] or []

    # -- failure

    def drain_receive(self, microbatch: int, *, cold: bool) -> None:
        """Receive a message that a failed step does not need."""
        self.queue(microbatch) if cold else self.post(microbatch)

    def drain_send(self, microbatch: int, *, cold: bool) -> None:
        """Send something in the place of a message that a failed step will not have."""
        layout, channel = self.outgoing[microbatch], self.channel
        if cold:
            self.outgoing[microbatch] = None
            channel.post_poison()
            return
        for tensor in layout.tensors if layout else ():
            if tensor is not None:
                channel.post(tensor.zeros(channel.device))

    def left_over(self) -> list[int]:
        """The microbatches of which something is still here."""
        return [m for m, tensors in enumerate(self.arrived) if tensors is not None or self.works[m] is not None]

    def pending(self) -> list[Work]:
        """What was posted and not waited for."""
        return [work for works in self.works if works is not None for work in works]

    def clear(self) -> None:
        size = len(self.works)
        self.arrived[:] = [None] * size
        self.works[:] = [None] * size
