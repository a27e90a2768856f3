"""Every op reaches everything that must know of it: the table is total, and so is each that asks it.

`everything()` is a plan that holds every op. Each test walks all of them through one consumer, so an op that is added to
the table and forgotten somewhere fails here, under the name of the place that forgot it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import penstock
from penstock.compat._orders import ComputationType, of_action, to_action
from penstock.errors import PlanError
from penstock.lower import lower
from penstock.plan import Action, Op, Plan, check, dumps, loads, ops, pack, parse, unpack
from penstock.plan.actions import MICROBATCH_SHIFT, OP, partner_of, parts, text, with_op
from penstock.run.handlers import HANDLERS
from penstock.schedules import get_schedule
from penstock.show import listing, to_html, to_svg, to_table, to_trace
from penstock.show.page_data import timeline_data
from penstock.simulate import Costs, Timeline, simulate

EVERY = pytest.mark.parametrize("op", Op, ids=lambda op: op.name)
NOT_IN_TORCH = frozenset({"R", "O", "L", "PRETEND"})  # ops that torch's package has no word for


SINGLE = [op for op in Op if op.row.choice and op.row.partner is None]
PAIRED = [op for op in Op if op.row.choice and op.row.partner is not None]
WAYS = [*([op] for op in SINGLE), PAIRED]  # a microbatch is given one of these


@cache
def everything() -> Plan:
    """A lowered plan with every op: split and whole backwards, pairs, messages, care of parameters, and each choice."""
    plan = lower(get_schedule("dualpipev")(2, 4), shards=True, reduce=True)
    return plan.with_codes(map(_with_choices, plan.codes))


def _with_choices(codes: tuple[int, ...]) -> list[int]:
    """Actions that a plan may do without, right after the forward of their microbatch."""
    made: list[int] = []
    for code in codes:
        made.append(code)
        for part in parts(code):
            ways = WAYS if part & OP == Op.F else [[]]
            made += [with_op(part, op) for op in ways[(part >> MICROBATCH_SHIFT) % len(ways)]]
    return made


def example(op: Op) -> Action:
    """An action of this kind that is in the plan."""
    found = next(part for codes in everything().codes for code in codes for part in parts(code) if part & OP == op)
    action = unpack(found)
    assert isinstance(action, Action)
    return action


@cache
def timeline() -> Timeline:
    plan = everything()
    return simulate(plan, replace(Costs.unit(plan), unshard=0.5, reshard=0.25, reduce_grad=1.0))


def test_the_table_has_a_row_for_each_op_and_room_for_more() -> None:
    assert [*Op] == [*range(len(Op))]  # rows are found by number
    assert len(ops.ROWS) == len(Op) < ops.OVERLAP <= OP
    assert len({row.word for row in ops.ROWS}) == len(Op)
    letters = [op.row.letter if not op.has_microbatch else op.name for op in Op]
    assert all(letters)
    assert len(set(letters)) == len(Op)


@EVERY
def test_a_row_fits_its_kind(op: Op) -> None:
    row = op.row
    assert (row.partner is not None and row.peer != 0) == op.is_message
    if row.partner is not None:
        assert row.partner.row.partner is op
        if op.is_message:
            assert row.partner.row.sends != row.sends
            assert row.partner.row.peer == -row.peer
            assert row.partner.row.training == row.training
    assert all(half.row.kind is row.kind and not half.row.halves for half in row.halves)
    assert re.fullmatch(r"#[0-9a-f]{6}", row.colour)


@EVERY
def test_text_and_packed_form(op: Op) -> None:
    action = example(op)
    assert parse(str(action)) == action == unpack(pack(action))
    assert text(pack(action)) == str(action)
    if op.is_message:
        assert partner_of(partner_of(action.code)) == action.code
    assert loads(dumps(everything())) == replace(everything(), name="")


@EVERY
def test_precedence_is_ruled(op: Op) -> None:
    """What it needs is in the plan, by itself or as a half."""
    plan, action = everything(), example(op)
    here = {part for code in chain.from_iterable(plan.codes) for part in parts(code)}
    here |= {with_op(part, half) for part in here for half in ops.ROWS[part & OP].halves}
    for need in plan.rules.requires(action) if action.microbatch is not None else ():
        assert need.code in here or need.op.row.choice, str(need)


@EVERY
def test_the_check_misses_it(op: Op) -> None:
    """The plan is right with it. Without one of its actions something is missing, unless it is a choice."""
    plan, gone = everything(), example(op).code
    check(plan)
    spoilt = plan.with_codes([[code for code in codes if gone not in parts(code)] for codes in plan.codes])
    if op.row.choice and op.row.partner is None:
        check(spoilt)
    else:
        with pytest.raises(PlanError):
            check(spoilt)


@EVERY
def test_evaluation_leaves_it_out_or_keeps_it(op: Op) -> None:
    kept = {part & OP for codes in everything().forward_only().codes for part in codes}
    assert (op in kept) != op.row.training


@EVERY
def test_the_simulator_knows_what_it_costs(op: Op) -> None:
    plan, row = everything(), op.row
    field = getattr(Costs.unit(plan), row.cost)
    more = tuple(5.0 for _ in range(plan.num_stages)) if isinstance(field, tuple) or row.halves else 5.0
    costs = replace(Costs.unit(plan), **{row.cost: more})
    assert costs.time(op, example(op).stage) == 5.0
    dearer = simulate(plan, costs)
    assert dearer.makespan > simulate(plan).makespan


@EVERY
def test_the_timeline_has_it(op: Op) -> None:
    spans = [span for rank in range(2) for span in timeline().spans(rank)]
    assert sum(op in [part & OP for part in parts(span.action.code)] for span in spans) > 0
    assert all(span.end >= span.start >= 0 for span in spans)
    assert all(curve[-1][1] == pytest.approx(0) for curve in timeline().memory)  # whatever is taken is given back


@EVERY
def test_each_drawing_names_it(op: Op) -> None:
    drawn, word = {"table": to_table(timeline(), width=10_000), "svg": to_svg(timeline(), width=20_000)}, op.row.word
    named = [name for name, picture in drawn.items() if word in picture]
    assert named == ([] if op.is_message else ["table", "svg"])
    assert str(example(op)) in listing(everything(), width=10_000)
    assert (f"{op.name} {word}</span>" in to_html(timeline())) != op.is_message
    assert word in {key["word"] for key in timeline_data("all", timeline())["keys"]}
    assert word in {event["cat"] for event in to_trace(timeline())["traceEvents"] if event["ph"] == "X"}


@EVERY
def test_torchs_words(op: Op) -> None:
    action = example(op)
    if op.name in NOT_IN_TORCH:
        with pytest.raises(PlanError, match="torch has no word"):
            of_action(action)
    else:
        assert to_action(of_action(action)) == action
        assert of_action(action).computation_type is ComputationType(op.name)


@EVERY
def test_the_run_has_a_handler(op: Op) -> None:
    assert op in HANDLERS


ROW = 'OpKind.COMPUTE, "pretend", "#123456", "forward", choice=True, training=True'
PRETEND = {
    "plan/ops.py": [
        ("\n    @property\n    def row(", "    PRETEND = {number}\n\n    @property\n    def row("),
        ("}  # fmt: skip\n", f"    Op.PRETEND: Row({ROW}),\n}}  # fmt: skip\n"),
    ],
    "plan/dependencies.py": [("            case Op.R | ", "            case Op.PRETEND | Op.R | ")],
    "run/handlers.py": [("HANDLERS: Handlers = {\n", 'HANDLERS: Handlers = {\n    Op.PRETEND: _of_run("forward"),\n')],
}


def test_an_op_that_computes_is_added_in_three_files(tmp_path: Path) -> None:
    """A pretend op, put into a copy of the sources: the tests above pass there, with every op, and the new one."""
    copy = tmp_path / "src" / "penstock"
    shutil.copytree(Path(penstock.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, changes in PRETEND.items():
        source = (copy / file).read_text(encoding="utf-8")
        for old, new in changes:
            assert source.count(old) == 1, f"{file}: {old}"
            source = source.replace(old, new.replace("{number}", str(len(Op))))
        (copy / file).write_text(source, encoding="utf-8")
    shutil.copy(__file__, tmp_path / "test_ops.py")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "-k", "not three_files"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{10 * (len(Op) + 1) + 1} passed, 1 deselected" in done.stdout
