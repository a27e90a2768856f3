"""Forwards that are run again though they do more than compute: they change buffers and inputs, and hooks take part in them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import penstock
from penstock.backward.offload import saving
from penstock.backward.offload_targets import Folder, HostMemory
from penstock.backward.recompute import recomputing
from penstock.errors import StageError
from penstock.stage import buffers
from penstock.stage.buffers import remember
from tests.parity.test_holding_less import state, train

WIDTH = 4


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.dropout(self.first(x)))) + self.mean


class Replaces(Plain):
    """Puts other buffers into the places of its buffers."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x)


class NowAndThen(Plain):
    """Changes a buffer in every third call, and its input in every fourth."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        if self.calls % 4 == 0:
            x = x.clone() if x.requires_grad else x
            x.mul_(2)
        return super().forward(x)


class SparseMask(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.mask, super().forward(x).t()).t()


def after(hook: Callable[[Tensor], Any]) -> Callable[[Plain], Any]:
    """A hook on the first layer that returns nothing."""

    def on_output(module: nn.Module, args: Any, output: Tensor) -> None:
        hook(output)

    return lambda stage: stage.first.register_forward_hook(on_output)


def average(stage: Plain) -> None:
    """A hook before the forward that changes what the forward reads."""

    def update(module: nn.Module, args: Any) -> None:
        module.mean.add_(args[0].detach().mean(0))  # type: ignore[operator,union-attr]

    stage.register_forward_pre_hook(update)


KINDS: dict[str, tuple[type[Plain], Callable[[Plain], Any]]] = {
    "buffers that are replaced": (Replaces, lambda stage: None),
    "buffers and inputs that change now and then": (NowAndThen, lambda stage: None),
    "a sparse buffer": (SparseMask, lambda stage: None),
    "a hook that listens to a gradient": (Plain, after(lambda output: output.register_hook(lambda grad: 3 * grad))),
    "a hook that changes in place": (Plain, after(lambda output: output.mul_(2))),
    "a hook that draws": (Plain, after(lambda output: torch.rand(3))),
    "a hook that changes a buffer": (Plain, average),
    "weight norm by hooks": (Plain, lambda stage: nn.utils.weight_norm(stage.first)),
    "spectral norm by hooks": (Plain, lambda stage: nn.utils.spectral_norm(stage.first)),
    "spectral norm": (Plain, lambda stage: nn.utils.parametrizations.spectral_norm(stage.first)),
    "pruned": (Plain, lambda stage: prune.l1_unstructured(stage.first, "weight", 0.3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_to_the_bit(kind: str, schedule: str) -> None:
    def run(**options: Any) -> list[Tensor]:
        make, change = KINDS[kind]
        torch.manual_seed(0)
        modules: list[nn.Module] = []
        for _ in range(2 if schedule == "gpipe" else 4):
            stage = make()
            change(stage)
            modules.append(stage)
        x = torch.randn(8, WIDTH)
        losses = train(modules, x, schedule=schedule, **options)
        tensors = losses + [tensor.to_dense() for tensor in state(modules)]
        return [tensor for tensor in tensors if tensor is not None]

    expected = run()
    for options in ({"recompute": True}, {"offload": True, "offload_to": HostMemory(threshold=0)}):
        torch.testing.assert_close(run(**options), expected, rtol=0, atol=0)


def test_a_large_buffer_that_is_changed_after_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_SMALL", 0)
    with pytest.raises(Exception, match="mean has changed since, which forwards had left alone"):
        train([NowAndThen(), Plain()], torch.randn(8, WIDTH), schedule="gpipe", recompute=[0])


def test_hooks_are_called_in_both_runs_and_can_tell_them_apart() -> None:
    seen: list[bool] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(recomputing()) if isinstance(module, Plain) else None
    )
    try:
        train([Plain(), Plain()], torch.randn(8, WIDTH), schedule="gpipe", steps=1, recompute=True)
    finally:
        handle.remove()
    assert (seen.count(False), seen.count(True)) == (2 * 4, 2 * 4)


def test_a_loss_that_is_a_module_counts_once() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.scale.mul_(0.9).add_(0.1 * output.detach().abs().mean())
            return nn.functional.mse_loss(output, target) / self.scale.clone()

    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        modules: list[nn.Module] = [Plain(), Plain()]
        loss = Loss()
        losses = train(modules, torch.randn(8, WIDTH), schedule="gpipe", loss_fn=loss, **options)
        return [*losses, *state([*modules, loss])]

    torch.testing.assert_close(run(recompute=True), run(), rtol=0, atol=0)


def test_a_loss_can_tell_its_second_run() -> None:
    seen: list[bool] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(penstock.recomputing())
        return nn.functional.mse_loss(output, target)

    train([Plain(), Plain()], torch.randn(8, WIDTH), schedule="gpipe", loss_fn=loss_fn, recompute=True)
    assert seen == 2 * [False, False, False, False, True, True, True, True]
    assert not penstock.recomputing()


def test_rewinding_brings_replaced_buffers_back() -> None:
    module = Replaces()
    before = dict(module.named_buffers())
    rewind = remember(module, ())
    module(torch.randn(2, WIDTH))
    assert module.calls is not before["calls"]
    rewind()
    assert all(buffer is before[name] for name, buffer in module.named_buffers())


# -- what is moved away


def moved(function: Callable[[Tensor], Tensor], x: Tensor, place: Any) -> Tensor:
    """The gradient of x, with what was saved away in between."""
    with saving(nn.Module(), [], threshold=0) as saved:
        output = function(x)
    saved.offload(place)
    saved.load()
    (grad,) = torch.autograd.grad(output, x)
    return grad


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.fft.fft(x).conj() ** 2).imag.sum(),
        lambda x: (torch.view_as_complex(x.exp()).conj().imag ** 2).sum(),
        lambda x: (x.exp().t()[:, ::2] ** 3).sum(),
    ],
    ids=["conjugated", "negated", "views"],
)
def test_a_saved_tensor_comes_back_as_it_was(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    x = torch.randn(6, 2, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x), x)
    for place in (HostMemory(threshold=0), Folder(tmp_path, threshold=0)):
        torch.testing.assert_close(moved(function, x, place), expected, rtol=0, atol=0)


@pytest.mark.parametrize("away", [True, False])
def test_what_was_changed_in_place_after_it_was_saved_is_refused(away: bool) -> None:
    """As autograd does without hooks."""
    x = torch.randn(4, requires_grad=True)
    with saving(nn.Module(), [], threshold=0 if away else 1 << 20) as saved:
        y = x.exp()
        output = y.sum()
        y.mul_(2)
    saved.offload(HostMemory(threshold=0))
    saved.load()
    with pytest.raises(StageError, match=r"of shape \[4\] that a forward saved for its backward was changed in place"):
        output.backward()


def test_parameters_that_are_gathered_and_freed_on_the_way_stay() -> None:
    """As FSDP's are, of layers that are freed after their forward: there is nothing in them when the rest moves."""
    x, values = torch.randn(2, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH)
    with saving(nn.Module(), [x], threshold=0) as saved:
        weight = nn.Parameter(values.clone())
        output = nn.functional.linear(x, weight)
    storage = weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    saved.offload(HostMemory(threshold=0))
    saved.load()
    storage.resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(values)
    output.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, values.sum(0).expand(2, WIDTH))


def test_casts_of_parameters_stay_where_autocast_keeps_them() -> None:
    module, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    sizes = []
    for enabled in (True, False):
        with (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=enabled),
            saving(module, [x], threshold=0) as saved,
        ):
            module(x)
        sizes.append(sum(block.flat.numel() for block in saved.blocks.values() if block.flat is not None))
    kept, own = sizes
    assert (own, kept) == (2 * (8 * 8 + 4 * 8), 0)  # autocast keeps that of any leaf, of the input too


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_folder_has_one_file_without_a_name_which_is_empty_when_nothing_is_away(tmp_path: Path) -> None:
    folder = Folder(tmp_path, threshold=0)
    flats = [torch.full((size,), size, dtype=torch.uint8) for size in (100, 200, 100)]
    before = descriptors()
    away = [folder.put(flat) for flat in flats]
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before + 1
    assert folder.file is not None
    assert os.fstat(folder.file).st_size == 400
    assert torch.equal(away.pop(0).back(), flats[0])
    away.append(folder.put(flats[2] + 1))  # into the place of the first
    assert os.fstat(folder.file).st_size == 400
    assert [int(one.back()[0]) for one in (away[0], away[2])] == [200, 101]
    away.clear()  # one was never read back: a step that failed
    assert os.fstat(folder.file).st_size == 0
    del folder
    gc.collect()
    assert descriptors() == before


def test_a_folder_that_takes_nothing_is_told(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(StageError, match="100 bytes could not be written"):
        folder.put(torch.zeros(100, dtype=torch.uint8))
