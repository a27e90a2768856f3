"""The `penstock` command, as a user meets it: in a process of its own where that matters, else in this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock import __version__
from penstock.cli.main import COMMANDS, main
from penstock.lower import lower
from penstock.plan import check, dump, load
from penstock.schedules import all_schedules, get_schedule
from penstock.simulate import Costs, dump_costs


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="penstock")


def ok(*arguments: str | Path) -> str:
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def figures(*arguments: str) -> dict[str, object]:
    found = json.loads(ok(*arguments, "--json"))
    assert isinstance(found, dict)
    return found


def test_help_names_every_command() -> None:
    text = ok("--help")
    for name, (_, line) in COMMANDS.items():
        assert name in text
        assert line in text
    assert __version__ in ok("--version")


@pytest.mark.parametrize("name", ["plan", "compare", "search", "check", "show"])
def test_every_command_helps_with_an_example(name: str) -> None:
    text = ok(name, "--help")
    assert text.startswith(f"Usage: penstock {name}")
    assert "Example" in text
    assert f"penstock {name} " in text.split("Example")[1]


def test_examples_in_the_help_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        line.strip()
        for name in ("plan", "compare", "search", "check", "show")
        for line in ok(name, "--help").splitlines()
    ]
    found = [part for line in lines if line.startswith("penstock ") for part in line.split(" && ")]
    examples = [example for example in found if "--from" not in example]  # needs a training run; tests/train has one
    assert len(examples) >= 7
    for example in examples:
        ok(*example.split()[1:])


def test_the_figures_of_1f1b() -> None:
    found = figures("plan", "1f1b", "--ranks", "4", "--microbatches", "8")
    assert found == {
        "schedule": "1f1b",
        "ranks": 4,
        "stages": 4,
        "microbatches": 8,
        "actions": 64,
        "makespan": 33.0,
        "bubble": {"makespan": pytest.approx(9 / 33), "longest_rank": pytest.approx(9 / 33)},
        "peak_activations": [4.0, 3.0, 2.0, 1.0],
        "idle": {"filling": 6.0, "draining": 12.0, "communication": 0.0, "imbalance": 18.0},
        "idle_per_rank": [
            {"filling": 0.0, "draining": 0.0, "communication": 0.0, "imbalance": 9.0},
            {"filling": 1.0, "draining": 2.0, "communication": 0.0, "imbalance": 6.0},
            {"filling": 2.0, "draining": 4.0, "communication": 0.0, "imbalance": 3.0},
            {"filling": 3.0, "draining": 6.0, "communication": 0.0, "imbalance": 0.0},
        ],
        "busy_per_rank": [24.0] * 4,
    }
    assert figures("plan", "1f1b") == found  # the defaults


def test_times_are_per_rank_and_microbatch() -> None:
    """With two stages a rank each costs half; memory is in units of one rank's activations for one microbatch."""
    given = ("--ranks", "2", "--microbatches", "4", "--forward", "2", "--backward-input", "2", "--backward-weight", "2")
    for stages in ("1", "2", "4"):
        found = figures("plan", "interleaved1f1b", "--stages-per-rank", stages, *given)
        assert found["stages"] == 2 * int(stages)
        assert found["busy_per_rank"] == [24.0, 24.0]
        assert found["makespan"] == pytest.approx(24 + 6 / int(stages))
    assert max(figures("plan", "gpipe", *given)["peak_activations"]) == 4.0  # type: ignore[call-overload]


def test_the_zero_bubble_paper() -> None:
    """The first row of its table: 1.5B, 8 ranks, 24 microbatches."""
    given = (
        "--ranks 8 --microbatches 24 --forward 18.522 --backward-input 18.086 --backward-weight 9.337 --latency 0.601"
    )
    for name, rate in (("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083)):
        bubble = figures("plan", name, *given.split())["bubble"]
        assert isinstance(bubble, dict)
        assert round(bubble["longest_rank"], 4) == rate


def test_lowered_figures_count_messages() -> None:
    plain, lowered = figures("plan", "zbv"), figures("plan", "zbv", "--lowered")
    assert lowered["actions"] > plain["actions"]  # type: ignore[operator]
    assert lowered["makespan"] == plain["makespan"]


def test_a_plan_for_people() -> None:
    text = ok("plan", "1f1b", "--ranks", "2", "--microbatches", "2")
    assert "rank 0" in text
    assert "F0" in text
    assert "makespan 9" in text
    assert "0SEND_F1" in ok("plan", "1f1b", "--ranks", "2", "--microbatches", "2", "--lowered")


def test_a_table_that_nobody_can_read_is_left_out() -> None:
    text = ok("plan", "1f1b", "--ranks", "64", "--microbatches", "200")
    assert "The table of 25,600 actions is not printed" in text
    assert len(text.splitlines()) < 80


def test_files_are_written(tmp_path: Path) -> None:
    names = {kind: tmp_path / f"plan.{kind}" for kind in ("csv", "svg", "html", "trace")}
    ok("plan", "zbv", "-o", names["csv"], "--svg", names["svg"], "--html", names["html"], "--trace", names["trace"])
    assert load(names["csv"], name="zbv") == get_schedule("zbv")(4, 8)
    assert names["svg"].read_text().startswith("<svg")
    assert "<html" in names["html"].read_text()
    assert json.loads(names["trace"].read_text())["traceEvents"]
    ok("plan", "zbv", "--lowered", "-o", names["csv"])
    assert load(names["csv"], name="zbv") == lower(get_schedule("zbv")(4, 8))


def test_compare_shows_all_schedules_the_quickest_first() -> None:
    text = ok("compare")
    names = [recipe.name for recipe in all_schedules()]
    rows = [line.split() for line in text.splitlines() if line.split() and line.split()[0] in names]
    assert sorted(row[0] for row in rows) == sorted(names)
    makespans = [float(row[2]) for row in rows if row[0] != "forward"]
    assert makespans == sorted(makespans)
    assert rows[-1][0] == "forward"
    one = next(row for row in rows if row[0] == "1f1b")
    assert one[1:] == ["1", "33", "27.3%", "27.3%", "4"]


def test_compare_with_stages_per_rank() -> None:
    found = json.loads(ok("compare", "--stages-per-rank", "3", "--ranks", "2", "--json"))
    assert {entry["schedule"] for entry in found} == {
        "forward",
        "loopedbfs",
        "interleaved1f1b",
        "interleavedzerobubble",
        "gis",
        "zb-gis",
    }
    assert {entry["stages"] for entry in found} == {6}


def test_check_accepts(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    dump(get_schedule("zbv")(2, 3), path)
    text = ok("check", path)
    assert "valid. 2 ranks, 4 stages, 3 microbatches, 36 actions" in text
    assert "has no communication" in text
    dump(lower(get_schedule("zbv")(2, 3)), path)
    assert "cannot deadlock, even with blocking sends" in ok("check", path)


def test_check_tells_blocking_sends_apart(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    check(load(path))
    assert "needs asynchronous sends" in ok("check", path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("0F0,0B0garbage\n", "plan.csv, row 1, column 2: '0B0garbage' is no action"),
        ("", "plan.csv holds no action"),
        ("0F0,0B0\n1B0,1F0\n", "rank 1, position 1: 1B0 stands before 1F0, which it needs"),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", "rank 0 lacks 0I1 (or 0B1)"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n", "2 ranks wait for one another"),
    ],
)
@pytest.mark.parametrize("command", ["check", "show"])
def test_a_bad_plan_exits_1_with_the_reason_on_stderr(
    command: str, content: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(content)
    done = run(command, path)
    assert done.exit_code == 1
    assert complaint in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.output


def test_show(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    dump(lower(get_schedule("1f1b")(2, 2)), path)
    assert "makespan 9" in ok("show", path)
    assert json.loads(ok("show", path, "--json", "--latency", "1"))["makespan"] == 11.0
    assert json.loads(ok("show", path, "--json"))["schedule"] == "mine"
    for kind in ("svg", "html", "trace"):
        ok("show", path, f"--{kind}", tmp_path / f"out.{kind}")
        assert (tmp_path / f"out.{kind}").stat().st_size > 100


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["plan", "1f1c"], 1, "no schedule is called '1f1c'. Did you mean '1f1b'?"),
        (["plan", "1f1b", "--stages-per-rank", "2"], 1, "1f1b with 2 stages a rank; it is made for 1"),
        (["plan", "1f1b", "--forward", "nan"], 1, "expected finite numbers"),
        (["plan", "1f1b", "-o", "/no/such/folder/plan.csv"], 1, "No such file or directory"),
        (["plan", "1f1b", "--ranks", "0"], 2, "0 is not in the range 1<=x<=1048576"),
        (["plan", "1f1b", "--forward", "-1"], 2, "-1.0 is not in the range 0<=x<=1e+60"),
        (["plan", "1f1b", "--microbatches", "many"], 2, "'many' is not a valid integer"),
        (["plan"], 2, "Missing argument 'NAME'"),
        (["check", "/no/such/file.csv"], 2, "does not exist"),
        (["check", "/"], 2, "is a directory"),
        (["fly"], 2, "No such command 'fly'"),
        (["trian"], 2, "Did you mean 'train'? Commands: train, top, report"),
        (["plan", "1f1b", "--fast"], 2, "No such option"),
    ],
)
def test_errors_without_a_traceback(arguments: list[str], code: int, complaint: str) -> None:
    done = run(*arguments)
    assert done.exit_code == code
    assert complaint in done.stderr
    assert "Traceback" not in done.output


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "plan", "nothing"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: no schedule is called 'nothing'.")


def test_neither_torch_nor_rich_is_loaded_for_help() -> None:
    program = (
        "import sys\nfrom penstock.cli.main import main\n"
        "main(['plan', '--help'], standalone_mode=False)\n"
        "print(*{'torch', 'numpy', 'rich', 'penstock.schedules'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.split() == []


def test_search_finds_a_plan_within_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "plan.csv"
    sizes = ("--ranks", "3", "--microbatches", "6", "--memory", "5", "--tries", "10")
    found = json.loads(ok("search", *sizes, "--json", "-o", str(file)))
    assert max(found["peak_activations"]) <= 5
    assert found["gap"] == pytest.approx(found["makespan"] / found["floor"] - 1)
    ok("check", str(file))
    assert "optimal" in ok("search", "--ranks", "1", "--tries", "1")


def test_links_and_a_file_of_costs(tmp_path: Path) -> None:
    times = ("--forward", "10", "--backward-input", "10", "--backward-weight", "10", "--json")
    sizes = ("--ranks", "8", "--microbatches", "24")
    assert json.loads(ok("plan", "1f1b", *sizes, *times, "--link", "6-7=30"))["makespan"] == 1650.0
    one_way = json.loads(ok("plan", "1f1b", *sizes, *times, "--link", "6>7=30"))["makespan"]
    assert 930.0 < one_way < 1650.0
    found = json.loads(ok("search", *sizes, *times, "-v", "1", "--memory", "16", "--link", "6-7=30", "--tries", "50"))
    assert found["makespan"] == 820.0
    file = tmp_path / "costs.json"
    dump_costs(Costs.per_stage([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]), file)
    done = json.loads(ok("plan", "1f1b", "-p", "2", "-m", "3", "--costs", str(file), "--json"))
    assert done["makespan"] == 2 * 9 + 3
    assert (
        json.loads(ok("search", "-p", "2", "-m", "3", "--costs", str(file), "--tries", "5", "--json"))["makespan"] < 21
    )
    assert "costs of 2 stages, the plan 4" in run("plan", "zbv", "-p", "2", "--costs", str(file)).output
    for text in ("6=7", "0-1=e3", "0-1=-1", "0-1=nan", "0-1=1e999"):
        assert "expected A-B=T or A>B=T" in run("plan", "1f1b", "--link", text).output
    short = ("plan", "1f1b", "-p", "2", "-m", "1", "--json", "--link")
    assert json.loads(ok(*short, "0-1=5e-1"))["makespan"] == json.loads(ok(*short, "0-1=.5"))["makespan"] == 7.0
    beside = run("search", "-p", "2", "-m", "3", "--costs", str(file), "--backward-input", "2")
    assert beside.exit_code == 2
    assert "--backward-input cannot be combined with --costs, which sets all costs" in beside.output
    front = json.loads(ok("search", "-p", "2", "-m", "3", "--costs", str(file), "--tries", "5", "--front", "--json"))
    assert front["searched"]


def test_search_says_what_memory_is_needed() -> None:
    done = run("search", "--memory", "0.5")
    assert done.exit_code == 1
    assert "memory_limit=0.5 on rank 0" in done.output


def test_plans_can_hold_less(tmp_path: Path) -> None:
    plain = figures("plan", "gpipe", "-p", "2", "-m", "6")
    assert plain["peak_activations"] == [6, 6]
    moved = figures("plan", "gpipe", "-p", "2", "-m", "6", "--recompute", "0", "--offload", "1")
    assert moved["peak_activations"] == [1, 3]
    assert moved["makespan"] <= plain["makespan"] + 6
    file = tmp_path / "plan.csv"
    ok("plan", "gpipe", "-p", "2", "-m", "6", "-o", file)
    text = ok("show", file, "--offload", "all")
    assert "copies" in text
    assert "O offload" in text
    for wrong in ("1-", "x", "0,,1", "-3"):
        done = run("plan", "gpipe", "--recompute", wrong)
        assert done.exit_code == 2
        assert "pass all, or numbers such as 0-3,6" in done.stderr
    assert "expected 0 to 3" in run("plan", "gpipe", "--offload", "4").stderr
