"""What one rank does with a case: builds its pipeline, and plays the actions one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.backward.offload_targets import Folder, HostMemory
from tests.fuzz.cases import Case
from tests.fuzz.models import LOSSES, Batch, make_model, make_part, ties_of
from tests.fuzz.oracle import SCALE, Counts, InBackward, Left, grad_of, make_optimizer

PASSED_ON = ("rng", "seed", "dynamic", "few_rows", "collect_every", "share_loss", "replan")
RECEIVES = {"early": penstock.lower.Early, "ahead": penstock.lower.Ahead, "late": penstock.lower.JustInTime}


def plan_of(case: Case) -> penstock.Plan:
    """The plan of a named schedule, or one that is searched for random costs and, maybe, a placement of any kind."""
    if case.schedule != "searched":
        recipe = penstock.get_schedule(case.schedule)
        return recipe(case.ranks, case.microbatches, stages_per_rank=case.num_stages // case.ranks)
    from penstock.search import search

    dice = Random(case.seed)
    times = [tuple(dice.uniform(0.5, 2.0) for _ in range(case.num_stages)) for _ in range(3)]
    where = penstock.Placement.of(case.placement) if case.placement else None
    costs = penstock.Costs.per_stage(*times)
    return search(case.ranks, case.microbatches, costs, placement=where, tries=4, seed=case.seed).plan


class Rank:
    """A rank with its pipeline. `group` is its transport or process group, `mesh` the one of replicas if there are such."""

    def __init__(self, case: Case, *, group: Any, folder: Path, mesh: Any = None, rank: int | None = None) -> None:
        self.case, self.group, self.folder, self.mesh = case, group, folder, mesh
        self.rank = group.rank if rank is None else rank
        self.replica = mesh["dp"].get_local_rank() if case.replicas > 1 else 0
        self.built = False
        self.saved = False
        self.saving: Any = None
        self.unscaled = False

    def run(self) -> list[Left]:
        self.build(self.case)
        self.built = True
        lefts = [self.act(number, action) for number, action in enumerate(self.case.actions)]
        if self.saving is not None:
            self.saving.wait()
        return lefts

    # -- building

    def build(self, case: Case) -> None:
        self.scaler = None
        if case.options.get("loss_scale"):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
        options = self.options(case)
        if case.captured and case.options.get("memory_limit"):
            options["memory_limit"] = self.binding_limit(case, options)
        self.pipe = self.make(case, options)
        trained = [p for p in self.pipe.parameters() if p.requires_grad]
        in_backward = case.optimizer == "backward"
        self.in_backward = InBackward(case, trained) if in_backward else None
        self.optimizer = make_optimizer(case, trained) if trained else None
        self.counts = Counts(list(self.pipe.named_parameters())) if case.options.get("count_hooks") else None

    def make(self, case: Case, options: dict[str, Any]) -> penstock.Pipeline:
        return self.capture(case, options) if case.captured else self.by_hand(case, options)

    def by_hand(self, case: Case, options: dict[str, Any]) -> penstock.Pipeline:
        plan, model = plan_of(case), make_model(case)
        own = plan.placement.stages_of(self.rank)
        ties = [penstock.tie(holders) for holders in ties_of(case)]
        stages = [
            penstock.PipelineStage(make_part(model, case, k), k, case.num_stages, "cpu", group=self.group) for k in own
        ]
        return penstock.Pipeline(stages=stages, schedule=plan, loss_fn=LOSSES[case.loss], ties=ties, **options)

    def capture(self, case: Case, options: dict[str, Any]) -> penstock.Pipeline:
        first = next(action for action in case.actions if action["do"] == "train")
        batch = self.batch({**first, "rows": max(2, first["rows"])}, 0)  # one row would stay one row
        if case.marked:
            options["split_spec"] = {f"blocks.{cut}": penstock.SplitPoint.BEGINNING for cut in case.cuts}
        elif case.schedule not in ("auto", "search"):
            options["stages"] = case.num_stages
        if case.has_own_loss:
            options["output_loss_value_spec"] = True
        else:
            options["loss_fn"] = LOSSES[case.loss]
        named = case.schedule in ("auto", "search")
        where = {"mesh": self.mesh} if self.mesh is not None else {"group": self.group}
        return penstock.Pipeline(
            make_model(case),
            (batch.x,),
            schedule=case.schedule if named else plan_of(case),
            example_kwargs=batch.kwargs,
            **where,
            **options,
        )

    def options(self, case: Case) -> dict[str, Any]:
        """The options of Pipeline, out of those of the case."""
        given = case.options
        found = {name: given[name] for name in PASSED_ON if name in given}
        found |= {name: sparing(given[name]) for name in ("recompute", "offload") if name in given}
        if "offload_to" in given:
            threshold = given["offload_to"]["threshold"]
            disk = given["offload_to"]["to"] == "disk"
            found["offload_to"] = Folder(self.folder, threshold=threshold) if disk else HostMemory(threshold=threshold)
        if given.get("group_rows"):
            found["group_rows"] = lengths
        if "receives" in given:
            found["receives"] = RECEIVES[given["receives"]]()
        if "compile" in given:
            found["compile"] = {"backend": given["compile"]}
        if case.captured and not given.get("profile"):
            found["profile"] = False
        if case.loss == "sum":
            found["scale_grads"] = False
        if self.scaler is not None:
            found["loss_scale"] = self.scaler
        return {"microbatches": case.microbatches, **found}

    def binding_limit(self, case: Case, options: dict[str, Any]) -> int:
        """A limit a little above the least that the error about one that is too small names."""
        try:
            self.make(case, {**options, "memory_limit": 1})
        except penstock.errors.BalanceError as error:
            numbers = [int(word) for word in str(error).replace(",", "").split() if word.isdigit()]
            return int(max(numbers) * float(case.options["memory_limit"]))
        raise AssertionError("a limit of one byte was taken")

    # -- actions

    def act(self, number: int, action: Mapping[str, Any]) -> Left:
        left = Left(f"action {number}, {action['do']}")
        getattr(self, action["do"])(left, action, number)
        left.grads = {name: whole(grad_of(p)) for name, p in self.pipe.named_parameters()}
        left.state = {name: whole(value).clone() for name, value in self.pipe.state_dict().items()}
        if self.counts is not None:
            left.fired = dict(self.counts.fired)
        return left

    def batch(self, action: Mapping[str, Any], number: int) -> Batch:
        length = action.get("length", 3)
        return Batch(self.case, action["rows"], number=number, replica=self.replica, length=length)

    def call(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        batch, case = self.batch(action, number), self.case
        own = case.captured and case.has_own_loss
        target = None if own else batch.target
        where = None if case.has_own_loss else action.get("outputs")
        do = self.pipe.evaluate if action["do"] == "evaluate" else self.pipe.step
        result = do(batch.x, target=target, outputs=where, **batch.kwargs)
        if case.options.get("share_loss", True) or self.is_last:
            left.loss = float(result.loss)
        left.outputs = None if result.outputs is None else result.outputs.detach()

    @property
    def is_last(self) -> bool:
        return self.pipe.plan.placement.ranks[-1] == self.pipe.rank

    def train(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        if action.get("zero", True):
            self.pipe.zero_grad()
        self.call(left, action, number)

    def evaluate(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        self.call(left, action, number)

    def unsynced(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        with unsynced([stage.submod for stage in self.pipe.stages]):
            self.call(left, action, number)

    def clip(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        if self.scaler is not None and self.optimizer is not None and self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        left.norm = self.pipe.clip_grad_norm_(action["max"], action["norm"])

    def optimize(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        if self.optimizer is not None:
            if self.scaler is None:
                self.optimizer.step()
            elif any(
                parameter.grad is not None for parameter in self.pipe.parameters()
            ):  # else it says that it has no scale
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self.pipe.zero_grad()

    def save(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        wait = not action.get("beside", False)
        self.saving = self.pipe.save(self.folder / "checkpoint", optimizer=self.optimizer, wait=wait)
        self.saved = True

    def load(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        if self.saved:
            self.pipe.load(self.folder / "checkpoint", optimizer=self.optimizer)

    def rebuild(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        """Save, make another pipeline of the same model, and load."""
        self.pipe.save(self.folder / "moved", optimizer=self.optimizer)
        changes = {name: tuple(value) if isinstance(value, list) else value for name, value in action["to"].items()}
        self.build(replace(self.case, **changes))
        self.pipe.load(self.folder / "moved", optimizer=self.optimizer)

    def replan(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        plan = plan_of(replace(self.case, schedule=action["schedule"])) if "schedule" in action else self.pipe.plan
        self.pipe.run_plan(penstock.recompute(plan) if action.get("recompute") else plan)

    def calibrate(self, left: Left, action: Mapping[str, Any], number: int) -> None:
        batch = self.batch(action, number)
        target = None if self.case.has_own_loss else batch.target
        self.pipe.calibrate(batch.x, target=target, rounds=2, **batch.kwargs)


def sparing(given: Any) -> Any:
    """True, a list of stages, or stages with microbatches, whose numbers JSON has made words."""
    return {int(stage): list(some) for stage, some in given.items()} if isinstance(given, Mapping) else given


def lengths(x: Tensor, **kwargs: Tensor) -> list[int]:
    """How long the rows are said to be: a number that follows from the row."""
    return [1 + int(abs(float(row.flatten()[0])) * 7) % 9 for row in x]


def whole(value: Any) -> Any:
    """A tensor that several ranks hold parts of, on each of them."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@contextmanager
def unsynced(modules: list[nn.Module]) -> Iterator[None]:
    """As users write it: under DDP's no_sync() of every stage."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield
