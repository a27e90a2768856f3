"""The report in a real browser, and its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from penstock.balance import LayerCost, Profile
from penstock.cli.main import main
from penstock.front import Choice, choose
from penstock.front.candidates import Wishes
from penstock.lower import lower
from penstock.simulate import load_costs, simulate
from penstock.stage.held import Held
from penstock.train import run_report
from penstock.train.report_page import loss_curve
from tests.show.conftest import NASTY, browser, open_page  # noqa: F401 - fixtures
from tests.simulate.test_measured import recorded


def made_choice(unit: str = "s", held: int = 40_000) -> Choice:
    sizes = {"activation_to_input": held, "parameter_bytes": 80_000, "output_bytes": 9_000 if held else 0}
    layers = tuple(LayerCost(f"layers.{i}", 1e-3, 1e-3, 1e-3, **sizes) for i in range(8))
    return choose(Profile(layers, metadata={"unit": unit}), Wishes(2, 6, "1f1b"))


def made_data(title: str = "a run", unit: str = "s") -> dict[str, Any]:
    choice = made_choice(unit)
    measured = recorded(simulate(lower(choice.plan), replace(choice.costs, latency=1e-3)))
    return {
        "format": 1,
        "title": title,
        "choice": choice.dumps(),
        "losses": [5.5, 4.0, float("nan"), 3.0, 2.9],
        "validation": [[2, 4.2], [4, 3.1]],
        "seconds": [0.1] * 5,
        "rows": 512,
        "unit": "tokens",
        "checked": {"steps": 3, "difference": 0.0, "seconds": 0.2, "against": "the model itself"},
        "measured": run_report._timeline_to_json(measured),
        "memory": [100_000, 200_000],
        "saving": [0.2, 0.4, 0.3],
        "held": [{"actions": ["0F0", "0B0"], "planned": [900, 0], "measured": [950, 0], "kinds": {"activations": 900}}]
        * 2,
    }


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_page_shows_everything_and_fetches_nothing(
    tmp_path: Path,
    open_page: Callable[..., Any],  # noqa: F811 - a fixture
    width: int,
    scheme: str,
) -> None:
    text = run_report.write(tmp_path, made_data(NASTY)).read_text()
    page = open_page(text, width=width, scheme=scheme)
    assert page.title() == NASTY
    words = page.inner_text("main")
    for expected in ("planned", "measured", "Loss", "Speed", "Idle time by cause", "Memory of each rank", "Stages"):
        assert expected in words
    for expected in ("a checkpoint keeps steps waiting (median of 3)", "300 ms"):
        assert expected in words
    for expected in ("one process, unpipelined, training", "layers.0 .. layers.3", "97.7 KiB", "largest difference 0"):
        assert expected in words
    assert page.locator("canvas.ps-rows").count() == 2
    assert page.locator(".pr-curve polyline").count() == 2 + 2 * 2, "two losses, and two curves of memory for each rank"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out to the right"
    drawn = page.locator("canvas.ps-rows").first.bounding_box()
    cut = "(cards) => cards.filter((card) => card.scrollWidth > card.clientWidth).map((card) => card.innerText)"
    assert page.locator(":is(.pr-grid, .pr-tables) .pr-scroll").evaluate_all(cut) == [], (
        "figures are seen without scrolling"
    )
    assert drawn["width"] > 150
    assert drawn["height"] > 20


def test_a_plan_that_rests_on_estimates_is_drawn_in_the_measured_time(tmp_path: Path) -> None:
    """Without a profile a plan has no seconds; beside the measured timeline it is as long as the same work takes."""
    data = made_data(unit="")
    text = run_report.write(tmp_path, data).read_text()
    assert "Nothing was measured before training" in text
    assert "predicted, without the optimizer" not in text
    assert "estimated before training" in text
    measured = run_report._timeline_from_json(data["measured"])
    scaled = run_report._scaled(made_choice("").costs, measured)
    assert sum(simulate(measured.plan, scaled).busy) == pytest.approx(sum(measured.busy))
    assert "Nothing was measured" not in run_report.write(tmp_path, made_data()).read_text()


def test_the_memory_of_each_rank_is_drawn_planned_over_counted(tmp_path: Path) -> None:
    text = run_report.write(tmp_path, made_data()).read_text()
    assert text.count("what a step holds") == 2
    assert "at the peak of the plan: activations 900 B" in text
    assert 'aria-label="memory over 2 actions, at most 950 B"' in text


def test_memory_of_which_nothing_is_known_is_not_drawn_as_nothing(tmp_path: Path) -> None:
    """A run without a profile showed flat lines at 0, a peak of 0, and schedules that hold 0.00 times as much."""
    data = made_data(unit="")
    data["choice"] = made_choice("", held=0).dumps()
    data["held"] = [{**one, "planned": [0, 0], "kinds": {}} for one in data["held"]]
    text = run_report.write(tmp_path, data).read_text()
    assert 'class="ps-memory"' not in text
    assert "<dt>peak memory</dt><dd>-</dd>" in text
    assert "times the activations" not in text
    assert text.count('class="pr-valid" points=""') == 2  # what was counted is still there
    known = run_report.write(tmp_path, made_data()).read_text()
    assert 'class="ps-memory"' in known
    assert "times the activations" in known


def test_held_counts_what_lives() -> None:
    x = torch.ones(1000, requires_grad=True)
    with Held() as held:
        y = (x * 2).exp()
        z = y.view(10, 100)
        loss = z.sum()
        before = held.now
        loss.backward()
    assert before >= 4000
    assert held.most >= before
    del y, z, loss
    assert held.now <= 4004, "the gradient is left"


def test_a_curve_of_nothing_and_of_one_step() -> None:
    assert "no losses" in loss_curve([float("nan")], [])
    assert "<polyline" in loss_curve([3.0], [])


def test_the_report_says_where_the_time_goes(tmp_path: Path) -> None:
    page = run_report.write(tmp_path, made_data()).read_text()
    assert "Predicted and measured" in page
    assert "sends and receives" in page
    said = run_report.explain(tmp_path)
    assert "messages: if they cost nothing" in said
    assert "zb-h1 for the same stages" in said
    assert "What was off first of all" in said


def test_nothing_is_compared_with_what_was_not_measured(tmp_path: Path) -> None:
    page = run_report.write(tmp_path, made_data(unit="")).read_text()
    assert "Predicted and measured" not in page
    assert "Nothing was measured before training" in run_report.explain(tmp_path)


def test_the_command_that_explains(tmp_path: Path) -> None:
    run_report.write(tmp_path / "run", made_data())
    said = CliRunner().invoke(main, ["explain", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    assert "Where the time goes" in said.output
    assert "twice as many ranks" in said.output
    refused = CliRunner().invoke(main, ["explain", str(tmp_path)])
    assert refused.exit_code == 1
    assert "has no report.json" in refused.output


def test_a_report_becomes_a_file_of_costs(tmp_path: Path) -> None:
    run_report.write(tmp_path / "run", made_data())
    file = tmp_path / "costs.json"
    done = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--costs", str(file)])
    assert done.exit_code == 0, done.output
    costs, measured = load_costs(file), run_report._timeline_from_json(run_report.read(tmp_path / "run")["measured"])
    assert simulate(measured.plan, costs).makespan == pytest.approx(measured.makespan, rel=0.05)
    plan = measured.plan
    sizes = ["-p", str(plan.num_ranks), "-m", str(plan.num_microbatches), "--costs", str(file), "--json"]
    shown = CliRunner().invoke(main, ["compare", *sizes])
    assert shown.exit_code == 0, shown.output
    assert {one["stages"] for one in json.loads(shown.output)} == {plan.num_stages}
    searched = CliRunner().invoke(main, ["search", *sizes, "--tries", "5"])
    assert searched.exit_code == 0, searched.output
