"""The front: more memory never takes longer, no known schedule lies below it, and it is printed and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.plan import Placement, check
from penstock.schedules import all_schedules
from penstock.search import front
from penstock.show.pareto_chart import Dot, front_page, front_svg
from penstock.simulate import Costs, simulate

COSTS = Costs.per_rank(num_stages=6, stages_per_rank=2, forward=1.2, backward_weight=0.7, latency=0.1)


def test_no_known_schedule_lies_below_the_front() -> None:
    found = front(3, 6, COSTS, tries=30)
    memories = [point.memory for point in found.searched]
    times = [point.makespan for point in found.searched]
    assert memories == sorted(set(memories))
    assert times == sorted(set(times), reverse=True)
    assert memories[0] == 1.0
    assert {known.name for known in found.known} == {recipe.name for recipe in all_schedules()} - {"forward"}
    for known in found.known:
        if known.memory <= 6.0:
            best = min(point.makespan for point in found.searched if point.memory <= known.memory * (1 + 1e-9))
            assert best <= known.makespan * (1 + 1e-9), known.name
    for point in found.searched:
        check(point.plan)
        assert point.floor is not None
        assert point.floor <= point.makespan * (1 + 1e-9)


def test_fewer_stages_may_be_on_the_front() -> None:
    """Where messages take long, one stage a rank sends fewer of them: 1F1B joins two stages, and is on the front."""
    costs = Costs.per_rank(num_stages=4, stages_per_rank=2, latency=6.0)
    found = front(2, 3, costs, limits=(1.0, 2.0, 3.0), tries=10)
    joined = next(point for point in found.known if point.name == "1f1b")
    assert joined.plan.num_stages == 2
    assert joined.makespan == simulate(joined.plan, Costs.per_rank(num_stages=2, latency=6.0)).makespan
    for point in found.known:
        assert any(one.memory <= point.memory and one.makespan <= point.makespan for one in found.searched), point.name
    assert any(one.plan.num_stages == 2 and one.gap is None for one in found.searched)


def test_limits_and_a_placement_of_ones_own() -> None:
    costs = Costs.per_stage([1.0] * 3, [1.0] * 3, [1.0] * 3)
    told = []
    found = front(2, 3, costs, limits=(4.0, 2.0), placement=Placement.of([0, 1, 0]), tries=10, progress=told.append)
    assert found.searched
    assert all(point.memory <= limit for point, limit in zip(found.searched, (2.0, 4.0), strict=False))
    assert list(found.searched) == told
    assert found.known == ()


def test_work_that_takes_no_time_has_no_gap() -> None:
    found = front(2, 2, Costs.per_rank(num_stages=2, forward=0.0, backward_input=0.0, backward_weight=0.0), tries=2)
    assert [point.gap for point in found.searched] == [0.0]
    assert {point.gap for point in found.known} == {None}


def test_the_chart_escapes_its_texts_and_marks_every_point() -> None:
    marks = [Dot(1.0, 3.0, "<b>", False), Dot(2.0, 2.0, "searched", True), Dot(3.0, 1.0, "searched", True)]
    root = ET.fromstring(front_svg(marks, title="a & b"))
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert [circle.get("class") for circle in circles] == ["theirs", "ours", "ours"]
    lefts = [float(circle.get("cx", "0")) for circle in circles]
    heights = [float(circle.get("cy", "0")) for circle in circles]
    assert lefts == sorted(lefts)
    assert heights == sorted(heights)
    assert "<b>" not in front_page(marks, title="a & b")


@pytest.mark.parametrize("marks", [[], [Dot(1.0, 1.0, "one", True)], [Dot(0.0, 0.0, "nothing", False)]])
def test_a_chart_of_little_or_nothing(marks: list[Dot]) -> None:
    ET.fromstring(front_svg(marks, title="few"))


def test_the_command(tmp_path: Path) -> None:
    sizes = ["search", "-p", "3", "-m", "4", "-v", "2", "--front", "--tries", "10"]
    svg, page = tmp_path / "front.svg", tmp_path / "front.html"
    shown = CliRunner().invoke(main, [*sizes, "--svg", str(svg), "--html", str(page)])
    assert shown.exit_code == 0
    assert "v-min" in shown.output
    assert "* on the Pareto front" in shown.output
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert "v-min" in page.read_text(encoding="utf-8")
    found = json.loads(CliRunner().invoke(main, [*sizes, "--json"]).output)
    assert {point["name"] for point in found["known"]} >= {"v-min", "zbv", "gis", "1f1b"}
    far = CliRunner().invoke(
        main, ["search", "-p", "2", "-m", "3", "-v", "2", "--latency", "6", "--front", "--tries", "2"]
    )
    assert [line.split()[-2:] for line in far.output.splitlines() if "zb-h2" in line] == [["zb-h2", "*"]], "once"
    refused = CliRunner().invoke(main, [*sizes, "--memory", "3"])
    assert refused.exit_code == 2
    assert "leave out --memory" in refused.output
