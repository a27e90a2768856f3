"""Nonsense for `penstock train` and `penstock studio`: one clear line and exit code 1 or 2, before any process is started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import main
from penstock.cli.studio_command import command as studio
from penstock.cli.train_command import command as train
from penstock.studio.answers import answer_json
from penstock.train.train_options import TrainOptions

WORDS = (
    *(
        "",
        "x",
        "-1",
        "0",
        "1.5",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "9" * 30,
        "9" * 5000,
        "true",
        "None",
        "ünï",
        "a\nb",
        "--",
    ),
    *("/nonexistent/x", "/dev/null", "../../etc/passwd", "x" * 5000, "a:b:c", ":", "0x10", "１２"),
)


def refused(*arguments: str) -> Result:
    """Refused in a few words; a traceback would be an exception here."""
    done = CliRunner().invoke(main, arguments, prog_name="penstock")
    assert isinstance(done.exception, SystemExit), (arguments, done.exception)
    assert done.exit_code in (1, 2), (arguments, done.output)
    assert "Error: " in done.stderr, (arguments, done.output)
    assert len(done.stderr) < 1000 + 3 * sum(map(len, arguments)), "an error of a few lines, whatever was given"
    return done


def options_of(command: click.Command) -> list[str]:
    return [max(one.opts, key=len) for one in command.params if isinstance(one, click.Option) and not one.is_flag]


def test_options_of_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one option lets pass is refused by the last check of all, of the device: so nothing is ever started."""
    monkeypatch.chdir(tmp_path)
    for name in options_of(train):
        for word in WORDS:
            refused("train", "--device", "no such device", name, word)
    for word in WORDS:
        refused("train", "--device", "no such device", "--", word)
    refused("train", "--no-such-option")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--learning-rate", "nan"], "--learning-rate nan"),
        (["--dropout", "nan"], "--dropout nan"),
        (["--clip", "nan"], "--clip nan"),
        (["--seed", "9" * 25], "--seed 9999"),
        (["--steps", "9" * 25], "--steps 9999"),
        (["--ranks", "100000"], "100000 processes on this host"),
        (["--ranks", "1000", "--dp", "1000", "--batch", "8000"], "1000000 processes"),
    ],
)
def test_numbers_without_sense_are_named(given: list[str], said: str) -> None:
    """A learning rate of nan trained, and 100,000 ranks were 100,000 processes."""
    assert said in refused("train", *given).stderr


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"ranks": 0},
            {"ranks": -2},
            {"ranks": "two"},
            {"ranks": 1.5},
            {"steps": True},
            {"clip": "much"},
            {"clip": None},
        ),
        *({"stages": 0}, {"microbatches": 10**30}, {"no such": 1}, {"resume": 1}, {"log": ["jsonl"]}, {"output": None}),
    ],
)
def test_options_of_a_run_that_somebody_changed(tmp_path: Path, options: dict[str, object]) -> None:
    """`"ranks": 0` was a ZeroDivisionError."""
    whole = {**json.loads(TrainOptions(output=str(tmp_path)).dumps()), **options}
    (tmp_path / "options.json").write_text(json.dumps(whole), encoding="utf-8")
    assert "options.json" in refused("train", "--resume", "--output", str(tmp_path)).stderr


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", '{"ranks": NaN}', "{" * 100_000, '{"ranks": 1' + "0" * 5000 + "}"]
)
def test_files_of_a_run_that_are_no_options(tmp_path: Path, text: str) -> None:
    (tmp_path / "options.json").write_text(text, encoding="utf-8")
    refused("train", "--resume", "--output", str(tmp_path), "--device", "no such device")


def test_options_of_studio(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for word in ("x", "-1", "65536", "9" * 30, "nan", "1.5", ""):
        refused("studio", "--no-open", "--port", word)
    for given in (["--build", str(tmp_path / "file")], ["--build", str(tmp_path / "out"), "--pyodide", str(tmp_path)]):
        refused("studio", *given)
    assert not (tmp_path / "out").exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in refused("studio", "--no-open", "--port", str(taken.getsockname()[1])).stderr
    assert options_of(studio) == ["--port", "--build", "--pyodide"]


VALUES = (None, "", "x", -1, 0, 1.5, 1e308, 10**30, True, [], {}, [1], ["x"], float("nan"), float("inf"), "9" * 5000)


def test_questions_of_the_page_are_answered_whatever_they_are() -> None:
    """With an answer that the page can read: JSON knows no NaN."""
    names = (
        *TrainOptions.__dataclass_fields__,
        "schedule",
        "forward",
        "memory",
        "speeds",
        "links",
        "transfer",
        "latency",
    )
    names = (*names, "backward_input", "stages_per_rank", "kept_for_weights", "messages")
    for name in names:
        for value in VALUES:
            for kind in ("show", "compare", "csv", value):
                said = answer_json(json.dumps({"kind": kind, "question": {"ranks": 2, "microbatches": 2, name: value}}))
                assert isinstance(json.loads(said, parse_constant=pytest.fail), dict)
    for text in ("", "[", "[]", "3", "{}", '{"kind": "show"}', "[" * 60_000, '{"kind": "show", "question": []}', "\0"):
        assert "error" in json.loads(answer_json(text))
