"""The model of a case, its stages by hand, its loss and its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from tests.fuzz.blocks import KINDS, WIDTH, WORDS
from tests.fuzz.cases import Case

IGNORED = -100


def weight_of(kind: str) -> str | None:
    """The name of the weight by which a block of this kind can be tied, in the block."""
    names = [name for name, _ in KINDS[kind].make().named_parameters()]
    return next((name for name in ("table.weight", "linear.weight") if name in names), None)


class Model(nn.Module):
    """All blocks, one after another, with skips; it may return its own loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.skips, self.loss, self.reads = case.skips, case.loss, [reads(kind) for kind in case.blocks]
        self.blocks = nn.ModuleList(KINDS[kind].make() for kind in case.blocks)
        for one, other in case.ties:
            source, name = self.blocks[one], weight_of(case.blocks[one])
            assert name is not None
            layer = "table" if hasattr(self.blocks[other], "table") else "linear"
            getattr(self.blocks[other], layer).weight = source.get_parameter(name)
        for index in case.frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, x: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> Any:
        kept: dict[int, Tensor] = {}
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            for source, user in self.skips:
                if user == index:
                    x = x + 0.5 * kept[source]
            if index == last and self.loss == "chunked":
                return penstock.chunked_loss(x, labels, block.linear, rows=3)  # one operator, which a capture keeps
            x = block(x, scale) if self.reads[index] else block(x)
            if any(source == index for source, _ in self.skips):
                kept[index] = x * 1.0
        if self.loss == "own":
            return functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return x


class Part(nn.Module):
    """Some blocks of the model as a stage made by hand: the value, and what later stages need of skips, in a nest."""

    def __init__(self, model: Model, case: Case, stage: int) -> None:
        super().__init__()
        self.first, self.stop = case.bounds[stage]
        self.skips, self.loss, self.nest = case.skips, case.loss, case.nest
        self.is_last = stage == case.num_stages - 1
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(self.first, self.stop)})
        self.reads = model.reads

    def run(self, given: tuple[Any, ...], scale: Tensor | None = None, labels: Tensor | None = None) -> Any:
        if self.first and self.nest == "dict":
            x, kept = given[0]["x"], {int(name): value for name, value in given[0].items() if name != "x"}
        else:
            x, kept = given[0], dict(zip(self.crossing(self.first), given[1:], strict=True))
        for index in range(self.first, self.stop):
            block = self.blocks[str(index)]
            for source, user in self.skips:
                if user == index:
                    x = x + 0.5 * kept[source]
            if self.is_last and index == self.stop - 1 and self.loss == "chunked":
                return penstock.chunked_loss(x, labels, block, rows=3)  # slice by slice: penstock sees any module
            x = block(x, scale) if self.reads[index] else block(x)
            if any(source == index for source, _ in self.skips):
                kept[index] = x * 1.0
        if self.is_last:
            return functional.cross_entropy(x.flatten(0, 1), labels.flatten()) if self.loss == "own" else x
        over = {index: kept[index] for index in self.crossing(self.stop)}
        if self.nest == "dict":
            return {"x": x, **{str(index): value for index, value in over.items()}}
        return (x, *over.values()) if over else x

    def crossing(self, place: int) -> list[int]:
        """The blocks before this place of which something is needed after it."""
        return sorted({source for source, user in self.skips if source < place <= user})

    def forward(self, *given: Any) -> Any:
        return self.run(given)


class PartWithScale(Part):
    def forward(self, *given: Any, scale: Tensor) -> Any:
        return self.run(given, scale)


class PartWithLabels(Part):
    def forward(self, *given: Any, labels: Tensor) -> Any:
        return self.run(given, labels=labels)


class PartWithBoth(Part):
    def forward(self, *given: Any, scale: Tensor, labels: Tensor) -> Any:
        return self.run(given, scale, labels)


def reads(kind: str) -> bool:
    return "reads" in KINDS[kind].traits


def make_model(case: Case) -> Model:
    """The same numbers each time."""
    torch.manual_seed(case.seed)
    return Model(case).double()


def make_part(model: Model, case: Case, stage: int) -> Part:
    """Stage number `stage`, with the model's own blocks."""
    first, stop = case.bounds[stage]
    scaled = any(model.reads[first:stop])
    labelled = case.has_own_loss and stage == case.num_stages - 1
    kind = {
        (False, False): Part,
        (True, False): PartWithScale,
        (False, True): PartWithLabels,
        (True, True): PartWithBoth,
    }[scaled, labelled]
    return kind(model, case, stage)


def ties_of(case: Case) -> list[list[tuple[int, str]]]:
    """What stages made by hand hold together: for each parameter (stage, name)."""
    model = make_model(case)
    holders: dict[int, list[tuple[int, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append((case.stage_of(int(name.split(".")[1])), name))
    return [found for found in holders.values() if len({stage for stage, _ in found}) > 1]


# -- loss and data


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def output_is_loss(output: Tensor, target: Tensor) -> Tensor:
    return output


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": mean_of_squares,
    "sum": sum_of_squares,
    "cross": cross_entropy,
    "padded": cross_entropy,
    "own": output_is_loss,
    "chunked": output_is_loss,
}


class Batch:
    """The rows of an action, for one replica; the same numbers each time."""

    def __init__(self, case: Case, rows: int, *, number: int, replica: int = 0, length: int = 3) -> None:
        dice = torch.Generator().manual_seed(1000 * case.seed + 10 * number + replica)

        def floats(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=dice, dtype=torch.float64)

        def words(*shape: int) -> Tensor:
            return torch.randint(0, WORDS, shape, generator=dice)

        tokens = "tokens" in KINDS[case.blocks[0]].traits
        self.x = words(rows, length) if tokens else floats(rows, length, WIDTH)
        self.target = words(rows, length) if "head" in KINDS[case.blocks[-1]].traits else floats(rows, length, WIDTH)
        if case.loss == "padded":
            self.target[torch.rand(rows, length, generator=dice) < 0.3] = IGNORED
            self.target[:, 0] = 1
        self.kwargs: dict[str, Tensor] = {}
        if "reads" in case.traits:
            self.kwargs["scale"] = floats(rows)
        if case.has_own_loss:
            self.kwargs["labels"] = self.target

    def cut(self, sizes: list[int]) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """The microbatches: arguments, target and keyword arguments of each."""
        named = {name: value.split(sizes) for name, value in self.kwargs.items()}
        return [
            (x, target, {name: values[m] for name, values in named.items()})
            for m, (x, target) in enumerate(zip(self.x.split(sizes), self.target.split(sizes), strict=True))
        ]


def sizes_of(rows: int, microbatches: int) -> list[int]:
    """Rows of each microbatch: they differ by one at the most, larger ones first."""
    small, more = divmod(rows, microbatches)
    return [small + (m < more) for m in range(microbatches)]
