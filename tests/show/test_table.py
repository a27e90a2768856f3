"""The table in the terminal, and the figures under it."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.lower import lower
from penstock.plan import Op, Plan
from penstock.plan.actions import OP, parts, stage_of
from penstock.schedules import all_schedules, get_schedule
from penstock.show import coloured_table, listing, show_table, summary, summary_text, to_table
from penstock.show.colors import paint, shades
from penstock.show.time_grid import cut
from penstock.simulate import Costs, Timeline, simulate


def test_one_row_a_rank_one_column_a_slot() -> None:
    assert to_table(get_schedule("1f1b")(3, 4), width=120).splitlines() == [
        "        0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17",
        "rank 0 │F0 F1 F2 ·  ·  ·  ·  B0 ─  F3 B1 ─  ·  B2 ─  ·  B3 ─",
        "rank 1 │·  F0 F1 ·  ·  B0 ─  F2 B1 ─  F3 B2 ─  ·  B3 ─  ·  ·",
        "rank 2 │·  ·  F0 B0 ─  F1 B1 ─  F2 B2 ─  F3 B3 ─  ·  ·  ·  ·",
        "F forward, B backward; one column is 1",
    ]


def test_several_stages_a_rank_show_their_stage() -> None:
    table = to_table(get_schedule("zbv")(2, 2), width=200)
    assert "0F0" in table
    assert "3F0" in table
    assert "one column is 0.5" in table


def test_overlapped_pairs_share_their_columns(overlapped: Plan) -> None:
    row = to_table(overlapped, width=200).splitlines()[1]
    assert row.startswith("rank 0 │0F0 ·   ·   3F0 0F1+3B0 ─   ·")


def test_copies_have_rows_of_their_own(copied: Plan) -> None:
    assert to_table(copied).splitlines() == [
        "        0  1  2  3  4  5  6  7  8  9  10 11 12",
        "rank 0 │F0 F1 F2 ·  ·  B0 ─  ·  B1 ─  ·  B2 ─",
        "copies │·  O0 O1 L0 ·  ·  ·  L1 ·  ·  ·  ·  ·",
        "rank 1 │·  F0 R0 B0 ─  F1 B1 ─  F2 B2 ─  ·  ·",
        "copies │·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·",
        "F forward, B backward, R recompute, O offload, L load; one column is 1",
    ]
    assert coloured_table(copied).plain.count("copies") == 2


@pytest.mark.parametrize("width", [30, 47, 80, 1000])
def test_folds_when_wider_than_the_screen(width: int) -> None:
    plan = get_schedule("1f1b")(4, 16)
    table = to_table(plan, width=width)
    lines = table.splitlines()
    assert max(map(len, lines[:-1])) <= width
    whole = to_table(plan, width=1000).splitlines()
    for rank in range(4):
        head = f"rank {rank} │"
        cells = "".join(line.removeprefix(head).ljust((width - 8) // 4 * 4) for line in lines if line.startswith(head))
        assert cells.split() == whole[1 + rank].removeprefix(head).split()


def test_a_pipe_that_takes_only_ascii_gets_ascii() -> None:
    assert to_table(get_schedule("zbv")(2, 4), ascii_only=True).isascii()


@given(recipe=st.sampled_from(all_schedules()), num_ranks=st.integers(1, 5), num_microbatches=st.integers(1, 6))
def test_every_action_of_every_schedule_is_in_its_row(recipe, num_ranks: int, num_microbatches: int) -> None:
    timeline = simulate(recipe(num_ranks, num_microbatches))
    grid = cut(timeline)
    assert grid.exact
    for rank, row in enumerate(grid.rows):
        assert [slot.code for slot in row] == list(timeline.plan.codes[rank])
        for slot, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            assert slot.column * grid.unit == pytest.approx(start)
            assert (slot.column + slot.width) * grid.unit == pytest.approx(end)


@pytest.mark.parametrize(
    ("forward", "backward_input", "backward_weight", "unit"),
    [
        (1.0, 1.0, 1.0, 1.0),
        (2.0, 4.0, 4.0, 2.0),
        (0.1, 0.2, 0.1, 0.1),
        (3.0, 2.0, 5.0, 1.0),
        (1e-3, 1.5e-3, 0.5e-3, 5e-4),
    ],
)
def test_the_column_is_the_longest_that_fits(
    forward: float, backward_input: float, backward_weight: float, unit: float
) -> None:
    costs = Costs.per_rank(
        num_stages=4, forward=forward, backward_input=backward_input, backward_weight=backward_weight
    )
    grid = cut(simulate(get_schedule("zb-h1")(4, 8), costs))
    assert grid.exact
    assert grid.unit == pytest.approx(unit)


def test_measured_times_are_rounded_and_no_action_is_lost() -> None:
    plan = get_schedule("1f1b")(4, 8)
    uneven = Costs.per_stage([1.0132, 0.973, 1.1717, 0.9], [1.31, 1.2234, 1.091, 1.17], [0.9331, 1.0, 1.013, 1.0007])
    timeline = simulate(plan, uneven)
    grid = cut(timeline)
    assert not grid.exact
    for rank, row in enumerate(grid.rows):
        assert [slot.code for slot in row] == list(plan.codes[rank])
        assert all(a.column + a.width <= b.column for a, b in itertools.pairwise(row))
    assert "one column is about" in to_table(timeline)


def test_actions_that_take_no_time_do_not_break_the_table() -> None:
    plan = get_schedule("zb-h1")(2, 3)
    free = simulate(plan, Costs.per_rank(num_stages=2, backward_weight=0.0))
    assert "W" not in to_table(free)
    nothing = simulate(plan, Costs.per_rank(num_stages=2, forward=0.0, backward_input=0.0, backward_weight=0.0))
    assert "W2" in to_table(nothing)


def test_lowered_plans_show_the_same_slots_and_list_their_messages() -> None:
    plan = get_schedule("1f1b")(3, 4)
    lowered = lower(plan, shards=True, reduce=True)
    assert to_table(lowered) == to_table(plan)
    text = listing(lowered, width=60)
    assert max(map(len, text.splitlines())) <= 60
    listed = {rank: [] for rank in range(3)}
    rank = 0
    for line in text.splitlines():
        head, _, words = line.partition("│")
        rank = int(head.split()[1]) if head.strip() else rank
        listed[rank] += words.split()
    assert listed == {rank: list(map(str, lowered.actions(rank))) for rank in range(3)}


def test_care_of_parameters_has_slots_when_it_takes_time() -> None:
    plan = lower(get_schedule("1f1b")(2, 2), reduce=True)
    table = to_table(simulate(plan, replace(Costs.unit(plan), reduce_grad=1.0)))
    assert "G0" in table
    assert "G reduce gradients" in table


def test_colours_tell_the_kind_and_shades_the_stage() -> None:
    plan = get_schedule("zbv")(2, 3)
    text = coloured_table(plan, width=200)
    used = {str(span.style).rpartition(" on ")[2] for span in text.spans if " on " in str(span.style)}
    shade = shades(plan)
    wanted = {paint(Op(code & OP), *shade[stage_of(code)]).fill for row in plan.codes for c in row for code in parts(c)}
    assert wanted <= used
    assert len({paint(op, k, 2) for op in (Op.F, Op.I, Op.W, Op.B) for k in (0, 1)}) == 8
    rows = [line.split("│")[1].split() for line in text.plain.splitlines() if line.startswith("rank")]
    assert {int(cell) for row in rows for cell in row if cell != "·"} == {0, 1, 2}


def test_a_terminal_gets_colour_and_a_file_gets_text() -> None:
    plan = get_schedule("1f1b")(2, 3)
    terminal = io.StringIO()
    show_table(plan, Console(file=terminal, force_terminal=True, color_system="truecolor", width=40))
    assert "\x1b[" in terminal.getvalue()
    file = io.StringIO()
    show_table(plan, Console(file=file, width=40))
    assert file.getvalue() == to_table(plan, width=40)
    actions = io.StringIO()
    show_table(plan, Console(file=actions, width=40), actions=True)
    assert actions.getvalue() == listing(plan, width=40)
    painted = io.StringIO()
    show_table(plan, Console(file=painted, force_terminal=True, color_system="256", width=40), actions=True)
    assert "\x1b[" in painted.getvalue()


def test_text_and_fill_can_be_told_apart() -> None:
    def luminance(colour: str) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (b / 255 for b in bytes.fromhex(colour[1:]))
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for op in Op:
        for shade in range(4):
            fill, ink = map(luminance, paint(op, shade, 4))
            assert (max(fill, ink) + 0.05) / (min(fill, ink) + 0.05) > 4, (op, shade)


def test_summary_is_json_with_the_figures() -> None:
    figures = json.loads(json.dumps(summary(simulate(get_schedule("1f1b")(4, 8)))))
    assert figures["schedule"] == "1f1b"
    assert (figures["ranks"], figures["stages"], figures["microbatches"], figures["actions"]) == (4, 4, 8, 64)
    assert figures["makespan"] == 33
    assert figures["bubble"]["makespan"] == pytest.approx(9 / 33)
    assert figures["bubble"]["longest_rank"] == pytest.approx(9 / 33)
    assert figures["peak_activations"] == [4, 3, 2, 1]
    assert sum(figures["idle"].values()) == pytest.approx(4 * 9)
    assert [sum(idle.values()) for idle in figures["idle_per_rank"]] == pytest.approx([9] * 4)


def test_summary_text_speaks_of_every_rank_and_stands_without_idle_or_memory(lowered: Timeline) -> None:
    text = summary_text(lowered)
    assert "bubble" in text
    assert "peak memory 4" in text
    assert len(text.splitlines()) == 3 + 4
    bare = Timeline(lowered.plan, lowered.starts, lowered.ends, unit="s")
    assert "peak memory -" in summary_text(bare)
