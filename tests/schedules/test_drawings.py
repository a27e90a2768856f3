"""Each schedule, drawn at a small size. The drawing also stands in the schedule's own docstring."""

from __future__ import annotations

import re
import sys
from textwrap import indent

import pytest

from penstock.plan import Op, Plan
from penstock.plan.actions import OP, parts, text
from penstock.schedules import all_schedules, get_schedule
from penstock.simulate import simulate

# One column a slot of one F; `-` goes on with a B, brackets hold an overlapped pair, `.` is idle.
DRAWINGS = """
forward: 2 ranks, 2 stages a rank, 4 microbatches
rank 0  0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3 .
rank 1  .   1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

gpipe: 3 ranks, 1 stages a rank, 4 microbatches
rank 0  F0 F1 F2 F3 .  .  .  . .  . B0 - B1 - B2 - B3 -
rank 1  .  F0 F1 F2 F3 .  .  . B0 - B1 - B2 - B3 - .  .
rank 2  .  .  F0 F1 F2 F3 B0 - B1 - B2 - B3 - .  . .  .

1f1b: 3 ranks, 1 stages a rank, 4 microbatches
rank 0  F0 F1 F2 .  . .  .  B0 -  F3 B1 -  .  B2 -  . B3 -
rank 1  .  F0 F1 .  . B0 -  F2 B1 -  F3 B2 -  .  B3 - .  .
rank 2  .  .  F0 B0 - F1 B1 -  F2 B2 -  F3 B3 -  .  . .  .

loopedbfs: 2 ranks, 2 stages a rank, 4 microbatches
rank 0  0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   . 2B3 - 2B2 - 2B1 - 2B0 - 0B3 - 0B2 - 0B1 - 0B0 -
rank 1  .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 - 3B2 - 3B1 - 3B0 - 1B3 - 1B2 - 1B1 - 1B0 - .   .

interleaved1f1b: 2 ranks, 2 stages a rank, 4 microbatches
rank 0  0F0 0F1 2F0 2F1 0F2 . 2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -   . 2B2 -   . 2B3 - 0B2 - 0B3 -
rank 1  .   1F0 1F1 3F0 3B0 - 3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 - 3F3 3B3 - 1B2 - 1B3 - .   .

interleavedzerobubble: 2 ranks, 2 stages a rank, 4 microbatches
rank 0  0F0 0F1 2F0 2F1 .   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
rank 1  .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

zbv: 2 ranks, 2 stages a rank, 4 microbatches
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

dualpipev: 2 ranks, 2 stages a rank, 4 microbatches
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3 3B1  -)  .  (3F2 0B0 -) 3B2  -   .  (3F3 0B1 -)  3B3 - 0I2 0W2 0I3 0W3
rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 -    (2F2 1B0 -) (1F3 2B1 -) (2F3 1B1 -) 2B2  -   1B2 -   . 2I3 1I3 2W3 1W3

zb-h1: 3 ranks, 1 stages a rank, 5 microbatches
rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

zb-h2: 3 ranks, 1 stages a rank, 6 microbatches
rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

v-half: 3 ranks, 2 stages a rank, 3 microbatches
rank 0  0F0 0F1 .   .   .   5F0 5I0 0F2 5W0 .   5F1 5I1 0I0 0W0 5W1 .   5F2 5I2 0I1 0W1 5W2 .   0I2 0W2
rank 1  .   1F0 .   .   4F0 1F1 .   4I0 4W0 4F1 1F2 1I0 1W0 4I1 4W1 4F2 1I1 1W1 4I2 4W2 .   1I2 1W2 .
rank 2  .   .   2F0 3F0 .   .   2F1 3F1 3I0 2I0 2W0 2F2 3W0 3F2 3I1 2I1 2W1 3W1 .   3I2 2I2 2W2 3W2 .

v-min: 3 ranks, 2 stages a rank, 3 microbatches
rank 0  0F0 0F1 .   .   .   5F0 5I0 5W0 0F2 .   .   5F1 5I1 0I0 0W0 5W1 .   5F2 5I2 0I1 0W1 5W2 .   .   0I2 0W2
rank 1  .   1F0 .   .   4F0 1F1 .   4I0 4W0 .   4F1 1F2 1I0 4I1 1W0 4W1 4F2 .   1I1 4I2 1W1 4W2 .   1I2 1W2 .
rank 2  .   .   2F0 3F0 .   .   2F1 .   3I0 3F1 3W0 2I0 2F2 2W0 3I1 3F2 3W1 2I1 2W1 .   3I2 3W2 2I2 2W2 .   .

gis: 3 ranks, 2 stages a rank, 3 microbatches
rank 0  0F0 0F1 .   3F0 3F1 0F2 .   .   3I0 3W0 .   3I1 3W1 3F2 0I0 0W0 .   0I1 0W1 3I2 3W2 .   0I2 0W2
rank 1  .   1F0 1F1 .   4F0 4F1 .   4I0 4W0 1F2 4I1 4W1 .   1I0 1W0 4F2 1I1 1W1 4I2 4W2 .   1I2 1W2 .
rank 2  .   .   2F0 2F1 .   5F0 5I0 5W0 5F1 5I1 5W1 2F2 2I0 2W0 2I1 2W1 5F2 5I2 5W2 .   2I2 2W2 .   .

zb-gis: 3 ranks, 2 stages a rank, 3 microbatches
rank 0  0F0 0F1 .   3F0 3F1 0F2 .   .   3I0 3W0 3I1 3W1 3F2 0I0 0W0 0I1 0W1 3I2 3W2 .   0I2 0W2
rank 1  .   1F0 1F1 .   4F0 4F1 .   4I0 1F2 4I1 4W0 1I0 4W1 4F2 1I1 1W0 4I2 1W1 4W2 1I2 1W2 .
rank 2  .   .   2F0 2F1 .   5F0 5I0 5F1 5I1 2F2 2I0 5W0 2I1 5W1 5F2 5I2 2W0 2W1 2I2 5W2 2W2 .
"""


def draw(plan: Plan) -> list[str]:
    """One line a rank, at unit costs, each action in the column of the slot in which it starts."""
    timeline = simulate(plan)
    slot = plan.num_ranks / plan.num_stages
    rows = []
    for rank, codes in enumerate(plan.codes):
        row = ["."] * round(timeline.makespan / slot)
        for code, start in zip(codes, timeline.starts[rank], strict=True):
            cells = [cell for part in parts(code) for cell in cells_of(part, plan)]
            if len(parts(code)) == 2:
                cells[0], cells[-1] = "(" + cells[0], cells[-1] + ")"
            column = round(start / slot)
            row[column : column + len(cells)] = cells
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"rank {rank}  " + " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for rank, row in enumerate(rows)
    ]


def cells_of(code: int, plan: Plan) -> list[str]:
    name = text(code)
    if plan.num_stages == plan.num_ranks:
        name = name.lstrip("0123456789")
    return [name, "-"] if code & OP == Op.B else [name]


CASES = {block.split(":")[0]: block.splitlines() for block in DRAWINGS.strip().split("\n\n")}


@pytest.mark.parametrize("name", CASES)
def test_drawing(name: str) -> None:
    title, *drawing = CASES[name]
    num_ranks, stages_per_rank, num_microbatches = map(int, re.findall(r"\d+", title.split(":")[1]))
    recipe = get_schedule(name)
    plan = recipe(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
    assert draw(plan) == drawing
    module = sys.modules[recipe.rank_actions.__module__]  # type: ignore[attr-defined]
    assert indent("\n".join(drawing), "    ") in (module.__doc__ or "")


def test_every_schedule_is_drawn() -> None:
    assert list(CASES) == [recipe.name for recipe in all_schedules()]
