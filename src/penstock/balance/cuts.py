"""The answer: which layers form which stage, as numbers and as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageCut:
    """One stage: the layers start..stop and what they add up to, for one microbatch.

    cut.stages[0].start, cut.stages[0].stop  # of balance(profile, 4)
    """

    stage: int
    rank: int
    start: int
    stop: int
    layers: tuple[str, ...]
    forward: float
    backward_input: float
    backward_weight: float
    activation_to_input: int
    activation_to_weight: int
    # Own and shared parameters of the stage.
    parameter_bytes: int
    # Bytes over the cut behind the stage; 0 for the last.
    output_bytes: int
    # Forward, both halves of backward, and the wires on both sides when a bandwidth was given.
    cost: float
    # Parameters, gradients, optimizer state, and activations of all microbatches in flight.
    memory: int


@dataclass(frozen=True)
class Cuts:
    """Cut points found by `balance`.

    >>> from penstock.balance import LayerCost, Profile, balance
    >>> layers = LayerCost("a", forward=3.0), LayerCost("b", forward=1.0), LayerCost("c", forward=2.0)
    >>> cuts = balance(Profile(layers), 2)
    >>> cuts.boundaries, cuts.names, cuts.slowest
    ((1,), ('b',), 3.0)
    >>> print(cuts.table())
    stage  rank  layers  parameters  cost  memory
        0     0  a              0 B     3     0 B
        1     1  b .. c         0 B     3     0 B
    """

    stages: tuple[StageCut, ...]
    # Bytes for each rank, all its stages together; what they share is counted once.
    rank_memory: tuple[int, ...]
    # The value that was made as small as possible: the cost of the slowest stage, or of the slowest rank.
    slowest: float
    objective: str
    # False where the stages of a rank had to be weighed together: then this cut is good and fits, but not proved the best.
    exact: bool = True

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The index of the first layer of each stage but the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the first layer of each stage but the first: where the marks go."""
        return tuple(stage.layers[0] for stage in self.stages[1:])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    def costs(self) -> dict[str, tuple[float, ...]]:
        """Plain numbers for each stage, under the names that the simulator knows: `Costs(**cuts.costs())`."""
        same = {name: name for name in ("forward", "backward_input", "backward_weight", "output_bytes")}
        known = {**same, "held_to_input": "activation_to_input", "held_to_weight": "activation_to_weight"}
        return {name: tuple(getattr(stage, ours) for stage in self.stages) for name, ours in known.items()}

    def table(self) -> str:
        """Plain text: stage, rank, layers, parameters, cost, memory."""
        rows = [["stage", "rank", "layers", "parameters", "cost", "memory"]]
        for s in self.stages:
            layers, bytes_ = " .. ".join(dict.fromkeys((s.layers[0], s.layers[-1]))), size_text(s.parameter_bytes)
            rows.append([str(s.stage), str(s.rank), layers, bytes_, f"{s.cost:.6g}", size_text(s.memory)])
        lines = aligned(rows)
        if not self.exact:
            lines.append("(found by local search: fits, but is not proved to be the best)")
        return "\n".join(lines)

    __str__ = table


def aligned(rows: list[list[str]]) -> list[str]:
    """A table. Numbers stand to the right in their columns, words to the left; the first row below the head tells which
    these are, and layers may have numbers in their names.
    """
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        words = column[0] == "layers" or not any(map(str.isdigit, column[1] if len(column) > 1 else ""))
        columns.append([cell.ljust(width) if words else cell.rjust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def size_text(size: int) -> str:
    """Bytes for people.

    >>> size_text(512), size_text(1536), size_text(3 << 30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    power = min((max(int(size), 1).bit_length() - 1) // 10, 4)
    return f"{size / 1024**power:.1f} {' KMGT'[power]}iB" if power else f"{size} B"
