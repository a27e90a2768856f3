"""The table of faults in docs/guides/when-something-goes-wrong.md: every cell that promises something has tests."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "when-something-goes-wrong.md"
EMPTY = (
    "cannot be",
    "there is no",
    "replicas are processes",
    "not promised",
)  # how a cell begins that promises nothing
ANY, LINES, ALONE, HEART = "test_step_processes", "test_comm_faults", "test_without_lines", "test_heartbeat"
STEPS, THREADS, TWO = "test_step_faults", "test_thread_table", "test_threads_and_rows"
TABLE, BOUNDS, DATA = "test_fault_table", "test_boundaries_and_faults", "test_data_parallel"

# By the first words of a row: the tests of its cells (processes; threads; accelerator), each as "file: name name ...".
TESTS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "an exception in forward": (
        [
            f"{ANY}: test_failures_are_told_and_survived test_waiting_ranks_hear_of_it_within_seconds",
            f"{ALONE}: test_an_exception_is_named_and_the_next_step_works",
        ],
        [f"{STEPS}: test_a_failure_anywhere_is_told_to_all_and_the_next_step_works test_failures_in_a_row_then_a_step"],
        [
            (
                f"{BOUNDS}: test_an_exception_is_named_everywhere_and_the_next_step_works "
                "test_so_is_one_in_a_backward_a_hook_or_the_loss"
            ),
        ],
    ),
    "Ctrl-C": (
        [
            f"{ANY}: test_ctrl_c_on_one_rank_ends_the_step_everywhere test_ctrl_c_reaches_a_rank_that_waits",
            f"{LINES}: test_ctrl_c_ends_a_wait",
            f"{ALONE}: test_ctrl_c_reaches_a_rank_that_waits",
        ],
        [f"{STEPS}: test_an_interrupt_in_a_stage_stays_an_interrupt_there"],
        [f"{TABLE}: test_ctrl_c_on_one_rank_ends_the_step_everywhere_and_the_next_one_works"],
    ),
    "wrong arguments": (
        [
            f"{ANY}: test_ranks_that_disagree_are_told_the_difference",
            f"{ALONE}: test_ranks_that_disagree_are_told",
            f"{TWO}: test_batches_that_differ_are_refused_everywhere",
        ],
        [f"{THREADS}: test_ranks_that_disagree_are_told_and_the_next_step_works"],
        [
            (
                f"{TABLE}: test_ranks_that_disagree_are_told_the_difference "
                "test_ranks_on_different_kinds_of_device_disagree_and_do_not_wait"
            )
        ],
    ),
    "a process is killed": (
        [
            f"{ANY}: test_a_killed_rank_is_named",
            f"{LINES}: test_a_killed_process_is_named_on_every_rank",
            f"{ALONE}: test_a_killed_rank_is_named_though_the_store_was_in_it",
            (
                f"{HEART}: test_a_rank_that_is_killed_before_the_first_step_is_named "
                "test_a_rank_on_another_host_that_is_gone_before_the_first_step_is_named"
            ),
        ],
        [],
        [f"{BOUNDS}: test_a_rank_that_dies_or_stops_is_named_and_no_stream_stays_stuck"],
    ),
    "the process with the store is killed (rank 0)": (
        [
            f"{LINES}: test_the_store_may_die_with_its_process",
            (
                f"{HEART}: test_the_death_of_the_store_does_not_flood_the_terminal "
                "test_a_call_that_is_under_way_when_the_store_dies_prints_nothing"
            ),
        ],
        [],
        [f"{TABLE}: test_the_first_rank_may_die_and_the_store_with_it"],
    ),
    "the process with the store is killed, and is none": (
        ["test_store_outside: test_steps_go_on_without_the_process_that_held_the_store"],
        [],
        [f"{TABLE}: test_steps_go_on_without_the_process_that_held_the_store"],
    ),
    "a rank leaves": (
        [
            f"{ANY}: test_a_rank_that_leaves_is_named_by_those_that_step",
            f"{LINES}: test_a_rank_that_leaves_while_its_process_lives_on_is_named",
            f"{ALONE}: test_a_rank_that_leaves_is_named",
        ],
        [f"{THREADS}: test_a_rank_that_leaves_is_named_at_once_and_again"],
        [f"{BOUNDS}: test_a_rank_that_leaves_between_steps_is_named"],
    ),
    "a process is stopped": (
        [
            f"{HEART}: test_a_stopped_rank_is_named_within_the_heartbeat",
            f"{ALONE}: test_a_stopped_rank_is_named",
        ],
        [],
        [f"{BOUNDS}: test_a_rank_that_dies_or_stops_is_named_and_no_stream_stays_stuck"],
    ),
    "a host or the network": (
        [f"{HEART}: test_both_sides_of_a_network_that_is_cut_are_told"],
        [],
        [f"{TABLE}: test_both_sides_of_a_network_that_is_cut_are_told"],
    ),
    "a rank computes for long": (
        [f"{HEART}: test_a_rank_that_computes_for_long_is_left_alone"],
        [f"{THREADS}: test_a_rank_that_computes_for_long_is_left_alone"],
        [f"{TABLE}: test_a_rank_that_computes_for_several_heartbeats_is_left_alone"],
    ),
    "a rank waits longer": (
        [
            f"{LINES}: test_a_wait_that_runs_out_says_who_waited_for_what_and_the_late_rank_hears_why",
            f"{ALONE}: test_a_wait_that_runs_out_says_where_everybody_was",
        ],
        [f"{THREADS}: test_when_all_wait_and_nothing_is_on_its_way_all_say_where_everybody_is"],
        [f"{TABLE}: test_a_wait_that_runs_out_says_where_everybody_was"],
    ),
    "two threads": (
        [
            f"{TWO}: test_another_thread_is_refused_by_every_call_of_one_rank test_a_hook_in_a_step_is_refused_by_every_call"
        ],
        [
            f"{TWO}: test_another_thread_is_refused_by_every_call_of_ranks_as_threads",
            f"{THREADS}: test_a_hook_that_steps_again_is_refused_and_the_next_step_works",
        ],
        [f"{TABLE}: test_a_second_thread_is_refused"],
    ),
    "a data-parallel replica raises": (
        ["test_replicas: test_a_replica_with_a_wrong_batch_fails_the_step_on_all_and_the_next_one_works"],
        [],
        [f"{DATA}: test_a_replica_that_fails_is_named_on_every_rank_and_the_next_step_works"],
    ),
    "a process of a data-parallel replica": (
        [
            (
                "test_replicas: test_a_replica_that_is_stopped_or_killed_is_named_on_all_ranks "
                "test_a_replica_that_is_killed_outside_a_step_is_named_on_all_ranks "
                "test_a_replica_that_is_stopped_outside_a_step_is_named"
            )
        ],
        [],
        [f"{DATA}: test_a_process_of_a_replica_that_is_killed_is_named_on_every_rank"],
    ),
}


def rows() -> dict[str, list[str]]:
    """The table on the page, by its first column."""
    lines = iter(PAGE.read_text(encoding="utf-8").splitlines())
    assert any(line.startswith("| what happens | gloo") for line in lines)
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = cells
    return found


@cache
def named_in(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"))


def row_of(beginning: str) -> list[str]:
    (found,) = [cells for name, cells in rows().items() if name.startswith(beginning)]
    return found


@pytest.mark.parametrize("beginning", TESTS)
def test_every_cell_that_promises_something_has_tests(beginning: str) -> None:
    cells, folders = row_of(beginning), ("faults", "faults", "accelerator")
    for cell, listed, folder in zip(cells, TESTS[beginning], folders, strict=False):
        assert cell.startswith(EMPTY) != bool(listed), f"{beginning}: {cell!r} has the tests {listed}"
        for entry in listed:
            file, _, names = entry.partition(": ")
            missing = set(names.split()) - named_in(ROOT / "tests" / folder / f"{file}.py")
            assert not missing, f"{beginning}: {folder}/{file}.py has no {missing}"


def test_every_row_is_known() -> None:
    unknown = [name for name in rows() if not name.startswith(tuple(TESTS))]
    assert unknown == []
