"""Every error that penstock raises on purpose.

PenstockError
├── PlanError                 a plan, schedule or placement that cannot be right
│   ├── ParseError            text that is no action, no plan file; also a RuntimeError
│   ├── IncompleteError       an action is missing, doubled or on the wrong rank; also an AssertionError
│   ├── OrderError            an action stands before something that it needs; also an AssertionError
│   └── DeadlockError         ranks would wait for one another for ever
├── UnknownNameError          no schedule (or other named thing) of that name; also a ValueError
├── SplitError                a batch cannot be cut into microbatches; also a ValueError
│   └── MergeError            what came out of the microbatches cannot be put together; also an AssertionError
├── CaptureError              a model cannot be captured or cut; also a RuntimeError
├── BalanceError              no cut of the layers fits; also a ValueError
├── StageError                a stage was built or used wrongly; also a RuntimeError
│   ├── PlaceError            a stage outside its pipeline; also a ValueError
│   └── ShapeError            tensors that are not what the neighbour expects
└── RunError                  a step went wrong; also a RuntimeError
    ├── PeerFailed            another rank raised: rank, stage, action, microbatch, cause
    ├── ReplicaFailed         another data-parallel replica of a stage failed in this step
    ├── RanksDisagree         ranks are about to run different things
    ├── StepTimeout           a bounded wait ran out
    └── TransportError        messages cannot be sent or received, and it is no other rank's failure

UnevenCut, a warning: the stages that penstock cut are far from even.
"""

from __future__ import annotations


class PenstockError(Exception):
    """The root: `except penstock.PenstockError` catches everything that penstock raises on purpose."""


class PlanError(PenstockError, ValueError):
    """A plan, schedule or placement that cannot be right."""


class ParseError(PlanError, RuntimeError):
    """Text that is no action, or no plan file."""


class IncompleteError(PlanError, AssertionError):
    """An action is missing, doubled or on the wrong rank."""


class OrderError(PlanError, AssertionError):
    """An action stands before something that it needs."""


class DeadlockError(PlanError):
    """Ranks would wait for one another for ever; the text shows the cycle."""


class UnknownNameError(PenstockError, ValueError):
    """There is no schedule (or other named thing) of that name."""


class SplitError(PenstockError, ValueError):
    """A batch cannot be cut into microbatches as asked."""


class MergeError(SplitError, AssertionError):
    """What came out of the microbatches cannot be put together as asked."""


class CaptureError(PenstockError, RuntimeError):
    """A model cannot be captured or cut as asked."""


class BalanceError(PenstockError, ValueError):
    """No cut of the layers satisfies what was asked."""


class StageError(PenstockError, RuntimeError):
    """A stage was built or used wrongly."""


class PlaceError(StageError, ValueError):
    """A stage has an index that its pipeline does not have."""


class ShapeError(StageError):
    """Tensors at a stage boundary are not what the neighbour expects."""


class RunError(PenstockError, RuntimeError):
    """A step went wrong."""


class PeerFailed(RunError):
    """Another rank raised an exception during the step.

    ``rank``, ``stage``, ``action``, ``microbatch`` say where, ``cause`` is the text of the exception there.
    """

    def __init__(self, rank: int, stage: int | None, action: str | None, microbatch: int | None, cause: str) -> None:
        self.rank = rank
        self.stage = stage
        self.action = action
        self.microbatch = microbatch
        self.cause = cause
        where = "" if action is None else f" in action {action}"
        if stage is not None:
            where += f" (stage {stage}" + ("" if microbatch is None else f", microbatch {microbatch}") + ")"
        super().__init__(f"rank {rank} failed{where}: {cause}")


class ReplicaFailed(RunError):
    """Another data-parallel replica of a stage failed in this step, so there are no gradients to average."""


class RanksDisagree(RunError):
    """The ranks are about to run different things; the text is a table of the differences."""


class StepTimeout(RunError):
    """A bounded wait ran out; the text says who waited for what from whom."""


class TransportError(RunError):
    """Messages cannot be sent or received, for a reason that is not another rank's failure."""


class UnevenCut(UserWarning):
    """A warning, no error: one stage takes more than 1.5 times the mean of all, so that the others wait for it.

    warnings.filterwarnings("ignore", category=penstock.UnevenCut)
    """
