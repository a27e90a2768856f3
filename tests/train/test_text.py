"""Text to train on, and the screen: what a run reads and shows."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch
from rich.console import Console

from penstock.errors import PenstockError
from penstock.train.gpt import read_text
from penstock.train.screen import Screen


def test_python_s_own_sources_are_split_by_file_and_need_no_download() -> None:
    text = read_text()
    assert text.train.numel() > 1_000_000
    assert 0.005 < text.validation.numel() / text.train.numel() < 0.3
    assert b"import" in bytes(text.train[:100_000].tolist())


def test_a_batch_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 8)
    text = read_text(str(tmp_path / "a.txt"), length=16)
    tokens, following = text.batch(3, rows=4, length=16, seed=1)
    assert tokens.shape == following.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], following[:, :-1]), "each token's target is the next one"
    assert torch.equal(text.batch(3, rows=4, length=16, seed=1)[0], tokens)
    assert not torch.equal(text.batch(4, rows=4, length=16, seed=1)[0], tokens)
    assert not torch.equal(text.batch(3, rows=4, length=16, seed=2)[0], tokens)


def test_a_folder_is_read_whole_and_some_of_it_is_kept_for_validation(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes([number]) * 500)
    text = read_text(str(tmp_path), length=16)
    train, validation = set(text.train.tolist()), set(text.validation.tolist())
    assert train | validation == set(range(40))
    assert not train & validation, "a file is for one or the other"
    assert validation


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(PenstockError, match="holds 5 bytes of text; training needs at least"):
        read_text(str(tmp_path / "short.txt"))
    with pytest.raises(PenstockError, match="there is no file or folder"):
        read_text(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_screen_shows_step_loss_speed_and_time_left(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None, highlight=False)
    screen = Screen(enabled=True, console=console)
    with screen.bar(40, 10) as bar:
        for done in range(11, 41):
            bar(done, "loss 3.2500  12,346 tokens/s")
        screen.say("[step 40]: validation loss")
    shown = out.getvalue()
    assert "40/40" in shown
    assert "loss 3.2500  12,346 tokens/s" in shown
    assert ("0:00:00" if terminal else "0 s left") in shown
    assert "[step 40]: validation loss" in shown, "not taken for markup"
    if not terminal:
        assert 15 <= shown.count("loss 3.25") <= 32, "a line now and then"


def test_what_penstock_tells_its_logger_is_shown() -> None:
    """`--compile` showed nothing for as long as stages were being compiled."""
    out, logger = io.StringIO(), logging.getLogger("penstock")
    for enabled in (True, False):
        with Screen(enabled=enabled, console=Console(file=out)).hearing():
            logger.info("rank %d compiles stage %s", 0, "0, 3")
    logger.info("afterwards")
    assert out.getvalue() == "rank 0 compiles stage 0, 3\n"


def test_other_ranks_say_nothing() -> None:
    out = io.StringIO()
    screen = Screen(enabled=False, console=Console(file=out))
    with screen.bar(2, 0) as bar:
        bar(1, "loss 1.0000  1 rows/s")
    screen.say("hello")
    assert out.getvalue() == ""
