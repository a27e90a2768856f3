"""The fuzzer itself: that it draws everything there is, notices what is wrong, makes it small, and writes it down."""

from __future__ import annotations

import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.schedules import all_schedules
from tests.fuzz.blocks import KINDS
from tests.fuzz.cases import Case
from tests.fuzz.fuzz import Fuzz
from tests.fuzz.generate import PROCESSES, THREADS, generate
from tests.fuzz.known import KNOWN, known
from tests.fuzz.oracle import Oracle
from tests.fuzz.run_threads import run_threads
from tests.fuzz.script import script
from tests.fuzz.shrink import shrink
from tests.fuzz.verdict import RIGHT, WRONG, Verdict

SOME = [generate(seed, only=only) for only in (*THREADS, *PROCESSES) for seed in range(800)]


def test_a_case_follows_from_its_seed_and_survives_as_text() -> None:
    assert generate(7) == generate(7)
    assert generate(7) != generate(8)
    for case in SOME[::50]:
        assert Case.loads(case.dumps()).dumps() == case.dumps()


def test_everything_is_drawn_and_not_all_of_it_left_out() -> None:
    """Each kind of block, schedule, option, action and wrapper is in cases that are run without --known."""
    run = [case for case in SOME if known(case) is None]
    assert len(run) > 0.4 * len(SOME)
    assert len(KINDS) >= 40
    assert {kind for case in run for kind in case.blocks} == set(KINDS)
    names = {recipe.name for recipe in all_schedules() if recipe.name != "forward"}
    assert {case.schedule for case in run} == names | {"searched", "auto", "search"}
    assert {option for case in run for option in case.options} >= {
        *(
            "recompute",
            "offload",
            "offload_to",
            "memory_limit",
            "group_rows",
            "compile",
            "loss_scale",
            "few_rows",
            "rng",
        ),
        *("replan", "dynamic", "profile", "receives", "share_loss", "collect_every", "count_hooks"),
    }
    assert {action["do"] for case in run for action in case.actions} == {
        *("train", "unsynced", "evaluate", "clip", "optimize", "save", "load", "rebuild", "replan", "calibrate")
    }
    kinds = {"ddp", "fsdp", "replicate", "replicate_with_fsdp", "hsdp", "fsdp_mixed", "none"}
    assert {case.mesh["kind"] for case in run if case.mesh} == kinds
    assert {case.optimizer for case in run} == {"sgd", "momentum", "adam", "backward"}
    assert {case.loss for case in run} >= {"mse", "sum", "cross", "own", "chunked"}
    assert any(case.ties for case in run)
    assert any(case.frozen for case in run)
    assert any(len(set(map(case.placement.count, range(case.ranks)))) > 1 for case in run if case.placement)


def test_every_entry_of_the_known_defects_leaves_something_out() -> None:
    """One that never does is forgotten there, or cannot be met."""
    found = Counter(name for case in SOME for name, predicate in KNOWN.items() if predicate(case))
    assert set(KNOWN) == set(found)


class Wrong(Oracle):
    """A loop that trains another model from the second step on."""

    def train(self, left: object, action: object, number: int) -> None:
        super().train(left, action, number)  # type: ignore[arg-type]
        if self.trained > 1:
            for parameter in self.model.blocks[-1].parameters():
                parameter.grad *= 1.0 + 1e-6  # type: ignore[operator]


def test_a_gradient_that_is_off_by_a_millionth_is_found_and_made_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.fuzz.run_threads.Oracle", Wrong)
    actions = tuple({"do": name, "rows": 6} for name in ("train", "evaluate", "train", "optimize", "train"))
    blocks = ("gru", "mlp", "experts", "batchnorm", "wide", "linear")
    case = Case(blocks=blocks, cuts=(2, 4), schedule="zb-h1", ranks=3, options={"dynamic": True}, actions=actions)
    fuzz = Fuzz(run_threads, say=lambda text: None, folder=tmp_path)
    fuzz.case(case, name="found")
    ((smaller, verdict),) = fuzz.findings
    assert verdict.kind == WRONG
    assert "gradient of blocks" in verdict.details
    assert len(smaller.blocks) < len(case.blocks)
    assert [action["do"] for action in smaller.actions] == ["train", "train"]
    assert not smaller.options


def test_a_script_runs_alone(tmp_path: Path) -> None:
    """What was written for a finding needs nothing of the tests; it ends with 0 once the finding is gone."""
    case = Case(blocks=("dropout", "batchnorm", "head"), loss="cross", cuts=(1,), options={"rng": "per-microbatch"})
    path = tmp_path / "found.py"
    path.write_text(script(case, "wrong: a loss", name=path.name))
    assert "tests.fuzz." not in path.read_text()
    assert "class Lstm" not in path.read_text()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code


def test_shrinking_leaves_out_all_that_does_not_matter() -> None:
    def fails(case: Case) -> bool:
        return "lstm" in case.blocks and case.microbatches > 2

    case = replace(
        generate(3, only="hand"), blocks=("mlp", "lstm", "gru", "mlp"), cuts=(1, 2), microbatches=4, frozen=(0, 2)
    )
    smaller = shrink(replace(case, skips=((0, 2),), ties=(), schedule="1f1b", ranks=3, placement=()), fails)
    assert smaller.blocks == ("lstm",)
    assert (smaller.microbatches, smaller.ranks, smaller.skips, smaller.frozen) == (3, 1, (), ())


def test_too_many_refusals_are_told() -> None:
    fuzz = Fuzz(lambda case: Verdict("refused" if case.captured else RIGHT, "why"), say=lambda text: None)
    for case in SOME[:40] + SOME[800:840]:
        fuzz.case(case, name="")
    assert fuzz.refused == 0.5
    assert "refused: why" in fuzz.table(0.0)
