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
├── MissingPackage            an integration needs a package that is not installed; also an ImportError
├── StageError                a stage was built or used wrongly; also a RuntimeError
│   ├── PlaceError            a stage outside its pipeline; also a ValueError
│   └── ShapeError            tensors that are not what the neighbour expects
└── RunError                  a step went wrong; also a RuntimeError
    ├── PeerFailed            another rank raised: rank, stage, action, microbatch, cause
    ├── ReplicaFailed         another data-parallel replica of a stage failed in this step
    ├── OutOfMemory           a rank had no memory left for an action: rank, action, remedy
    ├── DeviceFailed          the device of this rank reports an error: rank, step, action if that is known, cause
    ├── RanksDisagree         ranks are about to run different things
    ├── StepTimeout           a bounded wait ran out
    └── TransportError        messages cannot be sent or received, and it is no other rank's failure

UnevenCut, a warning: the stages that penstock cut are far from even.
UnverifiedSplit, a warning: stages made of submodules were not compared with the model.
NotDeferred, a warning: linear layers whose weight work a split backward cannot put off.
NotCompiled, a warning: a stage that should be compiled runs eagerly.
OverLimit, a warning: a step held more than its memory_limit.
LabelsNotCounted, a warning: a target has labels that losses ignore, and microbatches count by their rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.plan import Plan


class PenstockError(Exception):
    """The root: `except penstock.errors.PenstockError` catches everything that penstock raises on purpose.

    try:
        pipe.step(batch, target=labels)
    except penstock.errors.PenstockError as error:
        print(error)
    """


class PlanError(PenstockError, ValueError):
    """A plan, schedule or placement that cannot be right.

    penstock.get_schedule("1f1b")(0, 8)  # no ranks
    """


class ParseError(PlanError, RuntimeError):
    """Text that is no action, or no plan file.

    penstock.plan.loads("0F0,0B0garbage")
    """


class IncompleteError(PlanError, AssertionError):
    """An action is missing, doubled or on the wrong rank.

    check(Plan.of([["0F0"]]))  # its backward is missing, or 0F0 stands there twice
    """


class OrderError(PlanError, AssertionError):
    """An action stands before something that it needs.

    check(Plan.of([["0B0", "0F0"]]))
    """


class DeadlockError(PlanError):
    """Ranks would wait for one another for ever; the text shows the cycle.

    check(Plan.of([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]))
    """


class UnknownNameError(PenstockError, ValueError):
    """There is no schedule (or other named thing) of that name.

    penstock.get_schedule("1f2b")
    """


class SplitError(PenstockError, ValueError):
    """A batch cannot be cut into microbatches as asked.

    pipe.step(torch.randn(3, 8))  # three rows for four microbatches
    """


class MergeError(SplitError, AssertionError):
    """What came out of the microbatches cannot be put together as asked.

    merge_chunks([torch.ones(2), "text"])
    """


class CaptureError(PenstockError, RuntimeError):
    """A model cannot be captured or cut as asked.

    penstock.Pipeline(model_with_a_branch_on_its_data, (x,))
    """

    modules: tuple[str, ...] = ()  # of a model that cannot be traced: submodules to make stages of


class BalanceError(PenstockError, ValueError):
    """No cut of the layers satisfies what was asked.

    penstock.Pipeline(model, (x,), memory_limit=1000)  # bytes: no cut is small enough
    """


class MissingPackage(PenstockError, ImportError):
    """An integration needs a package that is not installed; the text says what to install.

    penstock.integrations.needs.needed("lightning", "lightning")  # where it is not installed
    """


class StageError(PenstockError, RuntimeError):
    """A stage was built or used wrongly.

    penstock.PipelineStage(module, 0, 2, "cpu", group=None).submod  # without a process group
    """


class PlaceError(StageError, ValueError):
    """A stage has an index that its pipeline does not have.

    penstock.PipelineStage(module, 4, 4, "cpu")  # stages count from 0
    """


class ShapeError(StageError):
    """Tensors at a stage boundary are not what the neighbour expects.

    schedule.step(x)  # a stage gives other shapes than in the step before, for inputs of the same shape
    """


class RunError(PenstockError, RuntimeError):
    """A step went wrong.

    pipe.load("no/such/checkpoint")
    """


class PeerFailed(RunError):
    """Another rank raised an exception during the step.

        try:
            pipe.step(batch, target=labels)
        except penstock.errors.PeerFailed as failed:
            print(failed.rank, failed.action)

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
    """Another data-parallel replica of a stage failed in this step, so there are no gradients to average.

    try:
        pipe.step(batch, target=labels)
    except penstock.errors.ReplicaFailed:
        optimizer.zero_grad()  # the next step works
    """


class OutOfMemory(RunError):
    """A rank had no memory left in the middle of a step. Every rank raises it, and the next step works.

        try:
            pipe.step(batch, target=labels)
        except penstock.errors.OutOfMemory as error:
            if error.remedy is None:
                raise
            pipe.zero_grad()  # the failed step may have left a part of its gradients
            pipe.run_plan(error.remedy)

    ``rank`` and ``action`` say where, ``cause`` what was asked for there and what was held. ``remedy`` is a plan that holds less,
    the same on every rank: the stages of that rank are recomputed (all stages, if they are already); None: nothing is left to
    recompute.
    """

    remedy: Plan | None = None

    def __init__(self, rank: int, action: str | None, cause: str) -> None:
        self.rank = rank
        self.action = action
        self.cause = cause
        where = "" if action is None else f" in action {action}"
        super().__init__(
            f"rank {rank} ran out of memory{where}: {cause}. Call pipe.run_plan(error.remedy), set recompute=True (or a list of "
            "stages) or memory_limit=, or cut the batch into more microbatches"
        )


class DeviceFailed(RunError):
    """The device of this rank reports an error of something that it was told before.

        try:
            print(result.loss)
        except penstock.errors.DeviceFailed as failed:
            print(failed.rank, failed.step, failed.action)

    A device does later what it was told, so the action is known (`action` is not None) only if each waits for the device, as with
    ``PENSTOCK_BLOCKING=1`` in the environment. ``cause`` is what the device says.
    """

    def __init__(self, rank: int, step: int, cause: str, *, action: str | None = None, before: str = "") -> None:
        self.rank = rank
        self.step = step
        self.action = action
        self.cause = cause
        where = f"in action {action} of step {step}" if action is not None else f"in step {step} or before"
        if before and action is None:
            where = f"in step {step} before the device came to {before}, or in a step before"
        more = "" if action is not None else "; with PENSTOCK_BLOCKING=1 in the environment the action is named"
        super().__init__(f"the device of rank {rank} failed {where}: {cause}{more}")


class RanksDisagree(RunError):
    """The ranks are about to run different things; the text is a table of the differences.

    penstock.Pipeline(model, (x,), microbatches=4 + rank)  # every rank must ask for the same
    """


class StepTimeout(RunError):
    """A bounded wait ran out; the text says who waited for what from whom.

    schedule.step(x)  # while another rank is stopped in a debugger
    """


class TransportError(RunError):
    """Messages cannot be sent or received, for a reason that is not another rank's failure.

    penstock.LocalWorld(2).run(function)  # in which one rank sends to a rank that is not there
    """


class UnevenCut(UserWarning):
    """A warning, no error: one stage takes more than 1.5 times the mean of all, so that the others wait for it.

    warnings.filterwarnings("ignore", category=penstock.errors.UnevenCut)
    """


class UnverifiedSplit(UserWarning):
    """A warning, no error: `split_modules` was given no example, so nobody has compared its stages with the model.

    warnings.filterwarnings("ignore", category=penstock.errors.UnverifiedSplit)
    """


class NotDeferred(UserWarning):
    """A warning, no error: some linear layers do all weight work in I, so that a schedule with W gains less from them.

    warnings.filterwarnings("ignore", category=penstock.errors.NotDeferred)
    """


class NotCompiled(UserWarning):
    """A warning, no error: torch.compile could not compile a stage, or part of one, which runs eagerly instead.

    warnings.filterwarnings("ignore", category=penstock.errors.NotCompiled)
    """


class OverLimit(UserWarning):
    """A warning, no error: a step held more on this rank than `memory_limit` allows.

    warnings.filterwarnings("error", category=penstock.errors.OverLimit)  # stop there
    """


class LabelsNotCounted(UserWarning):
    """A warning, no error: a target has labels that losses ignore (-100), and nothing says how microbatches count by the others.

    pipe = penstock.Pipeline(model, (x,), loss_fn=own, loss_weight=lambda target: (target != -100).sum())
    """
