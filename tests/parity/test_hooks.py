"""Hooks fire as in a plain loop, once for each microbatch, whatever the schedule does with the backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.run import Schedule
from penstock.schedules import all_schedules, get_schedule
from tests.parity.cases import Checkpointed, block
from tests.parity.harness import WIDTH
from tests.run.pipes import batch, close, grads_of, loop_grads, on_ranks

TRAINING = [recipe.name for recipe in all_schedules() if recipe.name != "forward"]
MICROBATCHES = 5


def modules_for(name: str, num_ranks: int, make: Any = block) -> list[nn.Module]:
    torch.manual_seed(0)
    recipe = get_schedule(name)
    return [make().double() for _ in range(num_ranks * (recipe.stages_per_rank or recipe.default_stages_per_rank))]


def count_hooks(modules: list[nn.Module]) -> Counter[str]:
    """Hooks of every kind on parameters and modules; the counter fills as they fire."""
    fired: Counter[str] = Counter()

    def noting(name: str, result: Any = None) -> Any:
        def note(*args: Any) -> None:
            fired[name] += 1

        return note

    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(noting(f"{index}.{name} accumulated"))
            parameter.register_hook(noting(f"{index}.{name} gradient"))
        module.register_forward_hook(noting(f"{index} forward"))
        module.register_forward_pre_hook(noting(f"{index} before forward"))
        if index:  # torch warns where no input needs a gradient
            module.register_full_backward_hook(noting(f"{index} backward"))
    return fired


@pytest.mark.parametrize("name", TRAINING)
def test_hooks_fire_once_for_each_microbatch(name: str) -> None:
    modules = modules_for(name, 2)
    fired = count_hooks(modules)
    x, y = batch(2 * MICROBATCHES)
    steps = 2
    on_ranks(
        name,
        2,
        MICROBATCHES,
        lambda schedule, rank: [schedule.step(x, target=y) for _ in range(steps)],
        modules=modules,
    )
    assert fired == dict.fromkeys(fired, steps * MICROBATCHES)
    kinds = {name.rsplit(" ", 1)[-1] for name in fired}
    assert kinds == {"accumulated", "gradient", "forward", "backward"}
    assert len(fired) == len(modules) * (2 * 6 + 3) - 1


@pytest.mark.parametrize("name", TRAINING)
def test_a_checkpoint_recomputes_once_for_each_microbatch(name: str) -> None:
    modules = modules_for(name, 2, Checkpointed)
    x, y = batch(2 * MICROBATCHES)
    on_ranks(name, 2, MICROBATCHES, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    assert [module.runs for module in modules] == [2 * MICROBATCHES] * len(modules)


def test_hooks_on_received_activations_do_not_pile_up() -> None:
    """A hook that a stage puts on its input fires once for its microbatch: each microbatch has a leaf of its own."""
    fired: list[int] = []

    class Listening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda grad: fired.append(1))
            return self.linear(x)

    modules: list[nn.Module] = [Listening().double() for _ in range(3)]
    x, y = batch(2 * MICROBATCHES)
    for _ in range(3):
        fired.clear()
        on_ranks("1f1b", 3, MICROBATCHES, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
        assert len(fired) == 2 * MICROBATCHES


def test_an_optimizer_in_the_backward() -> None:
    """Parameters that are updated and freed by their hook, as one does to save memory."""
    modules = modules_for("1f1b", 2)
    grads: dict[int, list[Tensor]] = {}
    x, y = batch(2 * MICROBATCHES)
    want = loop_grads(modules, x, y, MICROBATCHES)

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grads.setdefault(id(parameter), []).append(parameter.grad)
        parameter.grad = None

    for module in modules:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(keep)
    on_ranks("1f1b", 2, MICROBATCHES, lambda schedule, rank: schedule.step(x, target=y), modules=modules)
    got = [torch.stack(grads[id(p)]).sum(0) for module in modules for p in module.parameters()]
    assert close(got, want)
    assert grads_of(modules) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_compiled_stages(name: str) -> None:
    """They work with every schedule, without a warning; hooks fire once where the backward comes in two parts, too."""
    modules = modules_for(name, 2)
    fired: Counter[str] = Counter()
    for index, module in enumerate(modules):
        for key, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, key=f"{index}.{key}": fired.update([key]))
    compiled: list[nn.Module] = [torch.compile(module, backend="aot_eager") for module in modules]  # type: ignore[misc]
    x, y = batch(4)

    def rank(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)
        schedule.step(x, target=y)

    on_ranks(name, 2, 2, rank, modules=compiled)
    assert fired == dict.fromkeys(fired, 4)  # once for each microbatch of two steps, before the loop below adds its own
    want = loop_grads(modules, x, y, 2)
    got = [grad / 2 for grad in grads_of(modules)]
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(got, want, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_hooks_of_every_kind_around_and_inside_compiled_stages() -> None:
    """Of parameters, of the stage's module, and of layers inside it: as often, and with the same effect, as eagerly."""
    x, y = batch(2 * MICROBATCHES)

    def run(options: dict[str, Any]) -> tuple[Counter[str], list[Tensor]]:
        modules = modules_for("zbv", 2)
        fired = count_hooks(modules)
        for index, module in enumerate(modules):
            inner = module.get_submodule("0")
            inner.register_forward_hook(lambda layer, args, output: output * 2)
            module.get_parameter("0.weight").register_hook(lambda grad: grad * 3)
            if index:
                inner.register_full_backward_hook(lambda *_, key=f"{index} inside": fired.update([key]))
            if options:
                module.compile(**options)
        on_ranks(
            "zbv", 2, MICROBATCHES, lambda schedule, rank: [schedule.step(x, target=y) for _ in "ab"], modules=modules
        )
        return fired, grads_of(modules)

    (fired, grads), (want_fired, want) = run({"backend": "aot_eager"}), run({})
    assert fired == want_fired
    assert set(fired.values()) == {2 * MICROBATCHES}
    assert close(grads, want)
