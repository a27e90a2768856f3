"""Make a case that fails smaller: leave out one part after another, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.blocks import KINDS
from tests.fuzz.cases import Case

Fails = Callable[[Case], bool]


def shrink(case: Case, fails: Fails, *, seconds: float = 60.0) -> Case:
    """The smallest case found in that time that still fails.

    smaller = shrink(case, lambda one: run_threads(one).kind == "wrong")
    """
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for smaller in smaller_cases(case):
            if time.monotonic() > end:
                return case
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases with one part less, the largest parts first."""
    for number in range(len(case.actions) - 1, -1, -1):
        left = case.actions[:number] + case.actions[number + 1 :]
        if any(action["do"] == "train" for action in left):
            yield replace(case, actions=left)
    for name in case.options:
        if name == "rng" and "random" in case.traits:
            continue  # without it the plain loop draws other numbers
        paired = {"offload": ("offload", "offload_to"), "rng": ("rng", "seed")}.get(name, (name,))
        yield replace(case, options={k: v for k, v in case.options.items() if k not in paired})
    yield from _of_blocks(case)
    for name in ("frozen", "skips", "ties"):
        for number, _ in enumerate(getattr(case, name)):
            parts = getattr(case, name)
            yield replace(case, **{name: parts[:number] + parts[number + 1 :]})
    yield from _simpler_words(case)
    yield from _smaller_numbers(case)


def _of_blocks(case: Case) -> Iterator[Case]:
    """Without a block, if no stage is left without one; or with a plain one in its place."""
    for number in range(len(case.blocks) - 1, -1, -1):
        first, stop = case.bounds[case.stage_of(number)]
        if stop - first > 1:
            yield without_block(case, number)
    for number, kind in enumerate(case.blocks):
        if kind != "linear" and not KINDS[kind].traits & {"tokens", "head"} and not _is_tied(case, number):
            yield replace(case, blocks=(*case.blocks[:number], "linear", *case.blocks[number + 1 :]))


def _is_tied(case: Case, number: int) -> bool:
    return any(number in pair for pair in case.ties)


def without_block(case: Case, number: int) -> Case:
    """The case with one block less, and everything that counts blocks moved up."""

    def moved(index: int) -> int:
        return index - (index > number)

    def pairs(given: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((moved(a), moved(b)) for a, b in given if number not in (a, b))

    return replace(
        case,
        blocks=case.blocks[:number] + case.blocks[number + 1 :],
        cuts=tuple(moved(cut) for cut in case.cuts),
        frozen=tuple(moved(index) for index in case.frozen if index != number),
        skips=pairs(case.skips),
        ties=pairs(case.ties),
        actions=tuple(action for action in case.actions if action["do"] != "rebuild" or not action["to"]),
    )


def _simpler_words(case: Case) -> Iterator[Case]:
    if case.nest != "tuple":
        yield replace(case, nest="tuple")
    if case.optimizer != "sgd":
        yield replace(case, optimizer="sgd")
    if case.schedule not in ("gpipe", "1f1b") and case.num_stages == case.ranks and not case.placement:
        for name in ("gpipe", "zb-h1"):
            if case.schedule != name:
                yield replace(case, schedule=name)
    if case.num_stages > 1 and case.schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        # One rank and one stage less: the last two become one.
        yield replace(case, ranks=case.ranks - 1, cuts=case.cuts[:-1])
    if not case.captured and case.options.get("compile") is None and case.mesh == {} and case.schedule == "searched":
        yield replace(case, placement=())


def _smaller_numbers(case: Case) -> Iterator[Case]:
    if case.microbatches > 1:
        yield replace(case, microbatches=case.microbatches - 1)
    for number, action in enumerate(case.actions):
        for change in _smaller_actions(action):
            yield replace(case, actions=(*case.actions[:number], change, *case.actions[number + 1 :]))


def _smaller_actions(action: Any) -> Iterator[dict[str, Any]]:
    for name in ("outputs", "length", "beside"):
        if name in action:
            yield {k: v for k, v in action.items() if k != name}
    if action.get("rows", 1) > 1:
        yield {**action, "rows": action["rows"] - 1}
