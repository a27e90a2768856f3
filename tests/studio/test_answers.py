"""What the planner page is told: the figures of the planning half, for every question that it can ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.plan import loads
from penstock.schedules import all_schedules, get_schedule
from penstock.simulate import simulate
from penstock.studio import Question, answer
from penstock.studio.answers import answer_json


@pytest.mark.parametrize("recipe", all_schedules(), ids=lambda recipe: recipe.name)
def test_a_timeline_is_that_of_the_simulation(recipe: Any) -> None:
    made = answer(Question(recipe.name, ranks=4, microbatches=8), "show")
    expected = simulate(recipe(4, 8))
    assert made["figures"]["makespan"] == f"{expected.makespan:g}"
    assert "<canvas" in made["html"]


def test_a_comparison_puts_what_fits_first_and_the_fastest_before_the_others() -> None:
    rows = answer(Question(ranks=4, microbatches=8, memory=3.0), "compare")["rows"]
    fits = [row["peak"] <= 3.0 for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert any(fits)
    assert not all(fits)
    ours = [row["makespan"] for row in rows if row["fits"]]
    assert ours == sorted(ours)
    assert {row["schedule"] for row in rows} == {recipe.name for recipe in all_schedules()} - {"forward"}


def test_links_and_slow_ranks_take_their_time() -> None:
    def makespan(**asked: Any) -> float:
        return float(answer(Question("1f1b", ranks=4, microbatches=8, **asked), "show")["figures"]["makespan"])

    assert makespan() == 33.0
    assert makespan(latency=0.5) > 33.0
    assert makespan(transfer=0.5) > 33.0
    assert makespan(speeds=(1.0, 1.0, 2.0, 1.0)) > 50.0
    assert 33.0 < makespan(links=("2>3=4",)) < makespan(links=("2-3=4",)) < makespan(latency=4)
    assert makespan(links=("2-3=4",), transfer=0.5) > max(makespan(links=("2-3=4",)), makespan(transfer=0.5))


def test_a_link_that_is_written_wrong_is_said_and_one_that_is_right_is_in_the_command() -> None:
    assert answer(Question("1f1b", ranks=4, links=("2-3=4",)), "show")["command"].endswith("--link 2-3=4")
    for wrong, said in (("2-3", "expected A-B=T"), ("2-9=1", "expected ranks from 0 to 3"), ("2-2=1", "two ranks")):
        with pytest.raises(PlanError, match=said):
            answer(Question("1f1b", ranks=4, links=(wrong,)), "show")


def test_memory_between_the_two_halves_of_a_backward_counts() -> None:
    rows = {
        share: answer(Question(ranks=4, microbatches=8, kept_for_weights=share), "compare")["rows"]
        for share in (1.0, 2.0)
    }
    peaks = {share: {row["schedule"]: row["peak"] for row in found} for share, found in rows.items()}
    assert sum(peaks[1.0].values()) < sum(peaks[2.0].values())
    assert peaks[1.0]["1f1b"] == peaks[2.0]["1f1b"]


def test_files_are_those_of_the_command_line() -> None:
    question = Question("zbv", ranks=2, microbatches=4)
    assert list(loads(answer(question, "csv")["text"]).lines()) == list(get_schedule("zbv")(2, 4).lines())
    assert answer(question, "svg")["text"].startswith("<svg")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("not json", "Expecting value"),
        ("[]", "expected a question"),
        ('{"kind": "steal", "question": {}}', "one of show, compare, svg, csv"),
        ('{"kind": "show", "question": {"ranks": "many"}}', "many"),
        ('{"kind": "show", "question": {"ranks": 1e999}}', "infinity"),
        ('{"kind": "show", "question": {"rank": 3}}', "'rank'"),
        ('{"kind": "show", "question": {"schedule": "nosuch"}}', "nosuch"),
        ('{"kind": "show", "question": {"ranks": 4000}}', "penstock plan --html"),
        ('{"kind": "show", "question": {"forward": -1}}', "forward"),
        ('{"kind": "show", "question": {"speeds": [1]}}', "1 speeds for 4 ranks"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_breaks(asked: str, said: str) -> None:
    assert said in json.loads(answer_json(asked))["error"]


def test_a_question_that_is_too_large_is_refused_before_it_is_planned() -> None:
    with pytest.raises(PlanError, match="actions"):
        Question(ranks=64, microbatches=256)
