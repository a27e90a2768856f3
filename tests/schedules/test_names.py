"""Schedules are found under their usual names, in any spelling."""

from __future__ import annotations

import pytest

from penstock.errors import PlanError, UnknownNameError
from penstock.schedules import Recipe, all_schedules, get_schedule, register

SPELLINGS = {
    "forward": ["forward", "Forward", "ForwardOnly", "forward_only", "_ScheduleForwardOnly"],
    "gpipe": ["gpipe", "GPipe", "ScheduleGPipe"],
    "1f1b": ["1f1b", "1F1B", "Schedule1F1B", "schedule_1f1b"],
    "loopedbfs": ["loopedbfs", "LoopedBFS", "looped-bfs", "ScheduleLoopedBFS"],
    "interleaved1f1b": ["interleaved1f1b", "Interleaved1F1B", "interleaved-1f1b", "ScheduleInterleaved1F1B"],
    "interleavedzerobubble": [
        "interleavedzerobubble",
        "Interleaved_Zero_Bubble",
        "InterleavedZeroBubble",
        "ScheduleInterleavedZeroBubble",
    ],
    "zbv": ["zbv", "ZB-V", "ZBVZeroBubble", "ScheduleZBVZeroBubble", "v-zb", "VZB", "v_zb"],
    "dualpipev": ["dualpipev", "DualPipeV", "dual_pipe_v", "ScheduleDualPipeV"],
    "zb-h1": ["zb-h1", "ZBH1", "zb_h1"],
    "zb-h2": ["zb-h2", "ZBH2", "ScheduleZBH2"],
    "v-half": ["v-half", "VHalf", "V_HALF"],
    "v-min": ["v-min", "VMin", "vmin"],
    "gis": ["gis", "GIS", "Generalised-Interleaved", "generalized_interleaved"],
    "zb-gis": ["zb-gis", "ZBGIS", "zb_gis"],
}


@pytest.mark.parametrize(("name", "spelling"), [(name, s) for name, many in SPELLINGS.items() for s in many])
def test_any_spelling(name: str, spelling: str) -> None:
    assert get_schedule(spelling).name == name


def test_nothing_else_is_there() -> None:
    assert {recipe.name for recipe in all_schedules()} == set(SPELLINGS)


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("1f1c", "1f1b"), ("gpip", "gpipe"), ("interleaved", "interleaved1f1b"), ("zbh3", "zb-h")]
)
def test_an_unknown_name_gets_the_nearest_and_the_list(wrong: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        get_schedule(wrong)
    message = str(caught.value)
    assert f"no schedule is called {wrong!r}" in message
    assert f"Did you mean '{nearest}" in message
    for name in SPELLINGS:
        assert name in message


@pytest.mark.parametrize("wrong", ["", "---", None, 3])
def test_what_is_like_nothing_gets_the_list(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"There are: forward, gpipe, 1f1b"):
        get_schedule(wrong)  # type: ignore[arg-type]


def test_a_name_cannot_be_taken_twice() -> None:
    taken = get_schedule("1f1b")
    with pytest.raises(PlanError, match="'1-F-1-B' is taken by the schedule '1f1b'"):
        register(Recipe("mine", "a schedule of somebody", taken.rank_actions, aliases=("1-F-1-B",)))
    assert get_schedule("1f1b") is taken
    with pytest.raises(UnknownNameError):
        get_schedule("mine")
