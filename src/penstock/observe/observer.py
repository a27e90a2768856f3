"""StepObserver: sees the actions of a step on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.batch.batch import Batch
from penstock.plan import AnyAction, Plan


class StepView(Protocol):
    """The step that an observer sees."""

    @property
    def plan(self) -> Plan:
        """The plan that is run, with its messages."""
        ...

    @property
    def actions(self) -> Sequence[AnyAction]:
        """The actions of this rank, in their order."""
        ...

    @property
    def number(self) -> int:
        """The number of training steps done before."""
        ...

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters of this rank, in a training step."""
        ...

    def buffered_bytes(self) -> int:
        """Return the bytes in buffers of messages."""
        ...


class StepObserver:
    """Base class of observers; its methods do nothing.

        with schedule.observe(MyObserver()) as observer:
            schedule.step(x, target=y)

    An observer is local to its rank and sends nothing. An exception that it raises fails the step on all ranks.
    """

    def before_step(self, step: StepView, batch: Batch) -> bool:
        """Return True to observe the actions of this step. Called when all ranks are about to run it."""
        return False

    def before_action(self, at: int) -> None:
        """Called before the action `step.actions[at]`."""

    def waited(self) -> None:
        """Called each time a wait for a message has ended inside an action."""

    def after_action(self, at: int, *, failed: bool) -> None:
        """Called after the action; `failed`: it has raised."""

    def after_step(self, step: StepView) -> None:
        """Called when all actions have run, before the ranks agree that the step succeeded."""
