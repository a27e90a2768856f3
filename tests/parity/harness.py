"""One model in two ways: through a schedule over ranks as threads, and through a plain loop in this thread.

    compare(get_schedule("zbv"), Sizes(2, 2, 5), plain)

A `Case` is made twice by the same function: once for the pipeline, once for the loop. Gradients, losses, outputs and
buffers must be the same; after each step nothing may be left in the executor, and no activation may be alive, with the
garbage collector switched off.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.batch import Microbatches
from penstock.batch.batch import NO_BATCH
from penstock.comm import LocalTransport, LocalWorld
from penstock.plan import Op, Plan
from penstock.plan.actions import parts, unpack
from penstock.run import Schedule, microbatch_rng
from penstock.run.program import Program
from penstock.schedules import Recipe
from penstock.stage.pipeline_stage import PipelineStage

WIDTH = 4
SEED = 7


class Sizes(NamedTuple):
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank


@dataclass
class Step:
    """One call of `step` or `eval`."""

    args: tuple[Any, ...]
    target: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    train: bool = True
    zero: bool = True  # drop the gradients of the steps before


@dataclass
class Case:
    """Stages and what is done with them."""

    modules: list[nn.Module]
    steps: list[Step]
    loss_fn: Callable[..., Tensor] = nn.functional.mse_loss
    options: dict[str, Any] = field(default_factory=dict)  # of the schedule
    stage_options: Callable[[int, nn.Module], dict[str, Any]] = lambda index, module: {}
    weights: str = "share"  # of a microbatch's loss: its "share" of the batch, or "one"
    rng: bool = False
    cut: Callable[[Any, int], list[Any]] | None = None  # how the loop cuts its positional arguments
    watched: bool = True  # look for activations that outlive their step (hooks get in the way of torch.compile)


MakeCase = Callable[[Sizes], Case]


@dataclass
class Result:
    """What a step left: losses and outputs on the last stage, and all gradients after it."""

    losses: list[Tensor]
    output: Any
    grads: dict[str, Tensor | None]


def compare(recipe: Recipe, sizes: Sizes, make: MakeCase, **world: Any) -> None:
    """Raises if the pipeline and the plain loop differ, or if a step leaves something behind."""
    plan = recipe(sizes.num_ranks, sizes.num_microbatches, stages_per_rank=sizes.stages_per_rank)
    with without_collector():
        mine, reference = make(sizes), make(sizes)
        got = run_pipeline(plan, mine, LocalWorld(sizes.num_ranks, **world))
    want = run_loop(reference, sizes)
    exact = same_order(plan)
    for number, (step, theirs, ours) in enumerate(zip(mine.steps, want, got, strict=True)):
        where = f"step {number} of {recipe.name} with {sizes}"
        assert_same(ours.losses, theirs.losses, f"losses of {where}", exact=True)
        assert_same(ours.output, theirs.output, f"output of {where}", exact=True)
        if step.train:
            assert_same(ours.grads, theirs.grads, f"gradients of {where}", exact=exact)
    buffers = [dict(module.named_buffers()) for module in mine.modules]
    expected = [dict(module.named_buffers()) for module in reference.modules]
    assert_same(buffers, expected, "buffers", exact=True)


# -- the pipeline


def run_pipeline(plan: Plan, case: Case, world: LocalWorld) -> list[Result]:
    """All steps on all ranks; the results of the rank of the last stage, with everybody's gradients."""
    gradients: list[dict[str, Tensor | None]] = [{} for _ in case.steps]
    meeting = [0] * len(case.steps)

    def rank(transport: LocalTransport) -> list[Result]:
        own = plan.placement.stages_of(transport.rank)
        stages = [
            PipelineStage(
                case.modules[i],
                i,
                plan.num_stages,
                "cpu",
                group=transport,
                **case.stage_options(i, case.modules[i]),
            )
            for i in own
        ]
        schedule = Schedule.from_plan(plan, stages, loss_fn=case.loss_fn, **case.options)
        results = []
        with watching([case.modules[i] for i in own] if case.watched else []) as alive:
            for number, step in enumerate(case.steps):
                if step.zero:
                    for index in own:
                        case.modules[index].zero_grad()
                results.append(call(schedule, step))
                assert_nothing_left(schedule)
                assert alive() == [], f"alive after step {number} on rank {transport.rank}"
                for index in own:
                    gradients[number] |= named_grads(index, case.modules[index])
                meeting[number] += 1
        return results

    ranks = world.run(rank)
    assert meeting == [plan.num_ranks] * len(case.steps)
    last = plan.placement.rank_of(plan.num_stages - 1)
    for other, results in enumerate(ranks):
        if other != last:
            assert all(result.output is None and not result.losses for result in results)
    return [
        Result(r.losses, r.output, dict(sorted(found.items()))) for r, found in zip(ranks[last], gradients, strict=True)
    ]


def call(schedule: Schedule, step: Step) -> Result:
    losses: list[Tensor] = []
    do = schedule.step if step.train else schedule.eval
    output = do(*step.args, target=step.target, losses=losses, loss_kwargs=step.loss_kwargs, **step.kwargs)
    return Result(losses, pytree.tree_map_only(Tensor, torch.clone, output), {})


def named_grads(index: int, module: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{index}.{name}": None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()
    }


def assert_nothing_left(schedule: Schedule) -> None:
    """The executor is as before the step."""
    for program in schedule._programs.bound.values():
        assert left_in(program) == []


def left_in(program: Program) -> list[str]:
    found = program.left_over()
    for inbox in program.inboxes.values():
        found += [f"inbox {inbox.producer}"] if any(map(_held, (inbox.arrived, inbox.values, inbox.works))) else []
        found += ["reads"] if any(inbox.reads) else []
    for (stage, rank), box in program.outboxes.items():
        held = any(map(_held, (box.tensors, box.specs, box.arrived, box.works)))
        found += [f"outbox {stage} to {rank}"] if held else []
    for index, run in program.runs.items():
        last = [] if run.last is None else [run.last.shapes, run.last.reported, run.last.outputs]
        held = any(map(_held, (run.passes, *last)))
        found += [f"run {index}"] if held or run.inputs is not NO_BATCH else []
    for peer, channel in program.channels.items():
        found += [f"channel {peer}"] if channel.sent or channel.incoming or channel.lost else []
    return found


def _held(values: list[Any]) -> bool:
    return any(value is not None for value in values)


@contextmanager
def without_collector() -> Iterator[None]:
    """What only the garbage collector would find counts as alive.

    The first checkpoint of a process imports torch._dynamo. Activations of the step in which that happens are then left for the
    collector, so it is imported before: a test must not need another one before it.
    """
    importlib.import_module("torch._dynamo")
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def watching(modules: list[nn.Module]) -> Iterator[Callable[[], list[str]]]:
    """Notes every tensor that goes into or comes out of a module; the function names those that are still there."""
    seen: list[tuple[str, weakref.ref[Tensor]]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        for kind, value in (("input", args), ("output", output)):
            name = f"{kind} of {type(module).__name__}"
            tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            seen.extend((name, weakref.ref(tensor)) for tensor in tensors if not isinstance(tensor, nn.Parameter))

    def alive() -> list[str]:
        found = [name for name, tensor in seen if tensor() is not None and not _given(tensor())]
        seen.clear()
        return found

    handles = [part.register_forward_hook(note) for module in modules for part in module.modules()]
    try:
        yield alive
    finally:
        for handle in handles:
            handle.remove()


_inputs: weakref.WeakSet[Tensor] = weakref.WeakSet()


def given(tensor: Tensor) -> Tensor:
    """Mark a tensor as the user's own: it may outlive a step, whole."""
    _inputs.add(tensor)
    return tensor


def _given(tensor: Tensor | None) -> bool:
    return any(tensor is other for other in _inputs)


# -- the plain loop


def run_loop(case: Case, sizes: Sizes) -> list[Result]:
    results: list[Result] = []
    trained = 0
    for step in case.steps:
        if step.zero:
            for module in case.modules:
                module.zero_grad()
        with torch.set_grad_enabled(step.train):
            results.append(loop_step(case, step, sizes.num_microbatches, trained))
        trained += step.train
        for index, module in enumerate(case.modules):
            results[-1].grads |= named_grads(index, module)
        results[-1].grads = dict(sorted(results[-1].grads.items()))
    return results


def loop_step(case: Case, step: Step, num_microbatches: int, number: int) -> Result:
    args = (case.cut or cut)(step.args, num_microbatches)
    kwargs = cut(step.kwargs, num_microbatches)
    targets = cut(step.target, num_microbatches)
    rows = [_rows(target if target is not None else a) for target, a in zip(targets, args, strict=True)]
    losses, outputs = [], []
    for microbatch in range(num_microbatches):
        value: Any = args[microbatch]
        for index, module in enumerate(case.modules):
            value = value if isinstance(value, (tuple, list)) and not hasattr(value, "_fields") else (value,)
            own = accepted(module, kwargs[microbatch])
            rng = (
                microbatch_rng(seed=SEED, stage=index, microbatch=microbatch, step=number)
                if case.rng
                else nullcontext()
            )
            with rng:
                value = module(*value, **own)
        outputs.append(pytree.tree_map_only(Tensor, torch.detach, value))
        if case.loss_fn is not None and step.target is not None:
            loss = case.loss_fn(value, targets[microbatch], **step.loss_kwargs)
            losses.append(loss.detach())
            if step.train and loss.requires_grad:
                share = rows[microbatch] / sum(rows) if len(set(rows)) > 1 else 1 / num_microbatches
                weight = share if case.weights == "share" else 1.0
                loss.backward(torch.full_like(loss, weight))
    return Result(losses, merge(outputs), {})


def accepted(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = getattr(module, "keywords", ())
    return {name: value for name, value in kwargs.items() if name in names}


def cut(value: Any, num_microbatches: int) -> list[Any]:
    """Each tensor along its rows, everything else as it is."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda leaf: isinstance(leaf, Microbatches))
    pieces = [_pieces(leaf, num_microbatches) for leaf in leaves]
    return [pytree.tree_unflatten([piece[m] for piece in pieces], spec) for m in range(num_microbatches)]


def _pieces(leaf: Any, num_microbatches: int) -> list[Any]:
    if isinstance(leaf, Microbatches):
        return list(leaf)
    if isinstance(leaf, Tensor):
        return list(leaf.tensor_split(num_microbatches))
    return [leaf] * num_microbatches


def _rows(value: Any) -> int:
    return next(leaf.shape[0] for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def merge(outputs: list[Any]) -> Any:
    """Tensors along their rows; what is no tensor is the same for all."""
    spec = pytree.tree_structure(outputs[0])
    columns = zip(*(pytree.tree_leaves(output) for output in outputs), strict=True)
    return pytree.tree_unflatten([torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns], spec)


# -- comparing


def same_order(plan: Plan) -> bool:
    """Whether every stage adds up its gradients in the order of the microbatches, in one piece: as the loop does."""
    for rank in range(plan.num_ranks):
        last: dict[int, int] = {}
        for code in plan.codes[rank]:
            for action in map(unpack, parts(code)):
                if action.op in (Op.I, Op.W):
                    return False
                if action.op is Op.B and action.microbatch < last.get(action.stage, -1):
                    return False
                last[action.stage] = action.microbatch if action.op is Op.B else last.get(action.stage, -1)
    return True


def assert_same(got: Any, want: Any, what: str, *, exact: bool) -> None:
    ours, spec = pytree.tree_flatten(got)
    theirs, expected = pytree.tree_flatten(want)
    assert spec == expected, f"{what}: {spec} instead of {expected}"
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(other, Tensor):
            assert mine == other, f"{what}, value {place}: {mine} instead of {other}"
            continue
        assert mine.dtype is other.dtype, f"{what}, value {place}"
        assert mine.shape == other.shape, f"{what}, value {place}"
        if exact or not other.is_floating_point():
            assert torch.equal(mine, other), f"{what}, value {place}: off by {(mine - other).abs().max()}"
        else:
            limit = 1e-12 * max(1.0, float(other.abs().max())) if other.numel() else 0.0
            off = float((mine - other).abs().max()) if other.numel() else 0.0
            assert off <= limit, f"{what}, value {place}: off by {off}"
