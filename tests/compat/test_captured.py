"""Captured models through penstock.compat behave as through torch.distributed.pipelining, which is asked in each test."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as theirs
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

import penstock
import penstock.compat as ours
from penstock.comm.local import LocalWorld
from penstock.compat import microbatch
from penstock.errors import CaptureError

X, Y, Z = torch.ones(2, 4), torch.full((2, 4), 2.0), torch.full((2, 4), 3.0)


class Model(nn.Module):
    """Two layers; the caller says what becomes of the output."""

    def __init__(self, output: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.output = nn.Linear(4, 4), nn.Linear(4, 4), output

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
        h = self.first(x)
        h = h if y is None else h + y
        h = h if z is None else h * z
        return self.output(self.second(h))


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda h: h,
    "a tuple of one": lambda h: (h,),
    "a tuple of two": lambda h: (h, h + 1),
    "a dict of one": lambda h: {"logits": h},
    "a dict of two": lambda h: {"logits": h, "again": 2 * h},
    "an output with a loss": lambda h: CausalLMOutput(loss=h.sum(), logits=h),  # type: ignore[arg-type]
    "an output without": lambda h: CausalLMOutput(logits=h),  # type: ignore[arg-type]
    "constants beside it": lambda h: (h, 3, None),
}


def both(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The model captured by torch and by penstock, cut in the middle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        other = theirs.pipeline(copy.deepcopy(model), args, kwargs, split_spec={"second": theirs.SplitPoint.BEGINNING})
    return other, ours.pipeline(model, args, kwargs, split_spec={"second": ours.SplitPoint.BEGINNING})


def same(one: Any, other: Any) -> None:
    """Equal tensors in equal containers."""
    assert type(one) is type(other)
    leaves, shape = pytree.tree_flatten(one)
    others, other_shape = pytree.tree_flatten(other)
    assert shape == other_shape
    for a, b in zip(leaves, others, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_stage_modules_compose_and_return_what_torchs_return(output: Callable[[Tensor], Any]) -> None:
    """One tensor over a cut was a tuple, so that `m1(m0(x))` raised; the last stage returned the model's own class."""
    other, pipe = both(Model(output), X)
    first, second = (pipe.get_stage_module(k) for k in (0, 1))
    same(second(first(X)), other.get_stage_module(1)(other.get_stage_module(0)(X)))
    same(pipe(X), other(X))


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_a_loss_function_and_a_step_get_what_the_last_stage_module_returns(output: Callable[[Tensor], Any]) -> None:
    """A traced model that returned a dict gave it to loss_fn, where programs for torch expect its tensors."""
    other, pipe = both(Model(output), X[:1])
    expected = other.get_stage_module(1)(other.get_stage_module(0)(X))
    seen: list[Any] = []

    def loss_fn(value: Any, target: Tensor) -> Tensor:
        seen.append(value)
        tensor = value if isinstance(value, Tensor) else value[-1]
        return (tensor - target).square().mean()

    def work(transport: Any) -> Any:
        stage = pipe.build_stage(transport.rank, "cpu", transport)
        return ours.ScheduleGPipe(stage, 2, loss_fn=loss_fn).step(*([X] if stage.is_first else []), target=X)

    merged = LocalWorld(2).run(work)[1]
    assert {type(value) for value in seen} == {type(expected)}
    assert pytree.tree_structure(merged) == pytree.tree_structure(expected)
    rows = [v for v in pytree.tree_leaves(merged) if v.shape == X.shape]
    for value, whole in zip(rows, [v for v in pytree.tree_leaves(expected) if v.shape == X.shape], strict=True):
        torch.testing.assert_close(value, whole, check_stride=False)


class Deep(Model):
    """Returns beside its own result what an earlier stage computed."""

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
        h = self.first(x)
        return {"hidden": h, "logits": self.second(h)}


def test_the_last_stage_returns_what_it_computes_itself() -> None:
    """A loss function that was written for one tensor got a tuple, with what earlier stages had computed."""
    other, pipe = both(Deep(), X)
    first, second = (pipe.get_stage_module(k) for k in (0, 1))
    same(second(first(X)), other.get_stage_module(1)(other.get_stage_module(0)(X)))
    same(pipe(X), other(X))
    assert isinstance(penstock.pipeline(Deep(), (X,), split_spec={"second": penstock.SplitPoint.BEGINNING})(X), dict)


class Prepares(Model):
    """A first stage without parameters."""

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
        large, places = x > 0, x.argmax(-1)
        ours.pipe_split()
        h = self.second(self.first(x)) * large
        ours.pipe_split()
        return h + places.unsqueeze(-1) + x.sum()


def test_a_stage_may_compute_from_arguments_only() -> None:
    """What needs no parameter was computed where it was used, and the stage in which it stood was said to be empty."""
    model = Prepares()
    x = torch.randn(2, 4)
    pipe = ours.pipeline(model, (x,))
    assert pipe.num_stages == 3
    torch.testing.assert_close(
        pipe(x)[0], model.second(model.first(x)) * (x > 0) + x.argmax(-1).unsqueeze(-1) + x.sum()
    )
    assert [any(True for _ in pipe.get_stage_module(k).parameters()) for k in range(3)] == [False, True, False]


def test_an_exported_program_becomes_a_pipe() -> None:
    """Programs export first, look at the program, and then make the pipe of it."""
    from penstock.compat._IR import Pipe

    class Marked(Model):
        def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
            h = self.first(x)
            ours.pipe_split()
            return {"logits": self.second(h)}

    model = Marked()
    pipe = Pipe._from_traced(model, Pipe._trace_with_export(model, (X,)))
    assert type(pipe) is Pipe
    assert pipe.num_stages == 2
    same(pipe(X), (model(X)["logits"],))


def test_penstocks_own_door_keeps_the_class() -> None:
    pipe = penstock.pipeline(
        Model(OUTPUTS["an output with a loss"]), (X,), split_spec={"second": penstock.SplitPoint.END}
    )
    assert type(pipe(X)) is CausalLMOutput
    assert isinstance(pipe.get_stage_module(0)(X), tuple)


@pytest.mark.parametrize("given", [{"y": Y}, {"z": Z}, {"z": Z, "y": Y}], ids=str)
def test_what_was_traced_by_name_can_be_given_by_position(given: dict[str, Tensor]) -> None:
    """Programs trace with mb_kwargs and step with positions: `step(x, z)`, also past parameters that were left out."""
    other, pipe = both(Model(), X, **given)
    in_order = list(given.values())
    same(pipe(X, *in_order), other(X, *in_order))
    same(pipe(X, **given), other(X, **given))
    whole = [torch.cat([value, 5 * value]) for value in (X, *in_order)]

    def work(transport: Any) -> Any:
        stage = pipe.build_stage(transport.rank, "cpu", transport)
        return ours.ScheduleGPipe(stage, 2).step(*(whole if stage.is_first else []))

    (expected,) = other(*whole)
    torch.testing.assert_close(LocalWorld(2).run(work)[1], expected)
    with pytest.raises(CaptureError, match="by position"):
        pipe(X, *in_order, X)
    with pytest.raises(CaptureError, match="multiple values"):
        pipe(X, in_order[0], **given)


def test_penstocks_own_door_counts_the_parameters_of_the_signature() -> None:
    pipe = penstock.pipeline(Model(), (X,), {"z": Z}, split_spec={"second": penstock.SplitPoint.BEGINNING})
    with pytest.raises(CaptureError, match="'z' is missing"):
        pipe(X, Z)


def test_the_parts_of_a_block_mask_have_one_form() -> None:
    """Programs read the free variables of a part's mask_mod, and replay the graph of one microbatch on another."""
    from torch.distributed.pipelining.microbatch import _split_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k + b, 4, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    assert isinstance(mask, microbatch.BlockMask)
    for part, other in zip(microbatch._split_block_mask(mask, 2), _split_block_mask(mask, 2), strict=True):
        names = part.mask_mod.__code__.co_freevars
        assert names == other.mask_mod.__code__.co_freevars == ("block_mask", "idx")
        values = dict(zip(names, [cell.cell_contents for cell in part.mask_mod.__closure__], strict=True))
        others = dict(zip(names, [cell.cell_contents for cell in other.mask_mod.__closure__], strict=True))
        assert values == others
    (_,), (whole,) = microbatch.split_args_kwargs_into_chunks((X,), {"mask": mask}, 1)
    assert whole["mask"].mask_mod.__code__.co_freevars == ("block_mask", "idx"), "one microbatch is no exception"
    (_, _), parts = microbatch.split_args_kwargs_into_chunks((X,), {"mask": mask}, 2)
    assert [part["mask"].kv_num_blocks.size(0) for part in parts] == [2, 2], "whatever the size of the other arguments"
