"""What commands print: tables, lines, JSON and CSV, and sizes as users write them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from vision_longformer.cli.output import (
    billions,
    log_lines,
    millions,
    print_csv,
    print_line,
    print_table,
    progress_bar,
    size_text,
    step_status,
    track,
    warn_if_outdated,
)


def test_a_table_has_text_on_the_left_and_numbers_on_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Markup is text: names of classes may have brackets."""
    print_table("Two", ("name", "note", "count"), [("a", "[b]", 7), ("longer", "x", 1234)], left=2)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Two",
        "",
        "  name     note   count",
        " ───────────────────────",
        "  a        [b]        7",
        "  longer   x       1234",
        "",
    ]


def test_without_a_number_of_text_columns_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ("name", "count"), [("a", 7), ("bb", 12345678)])
    assert capsys.readouterr().out.splitlines()[-3].rstrip() == "  a             7"


def _printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_table_that_is_too_wide_wraps_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns are nearer then, and it is the widest that wraps."""
    monkeypatch.setenv("COLUMNS", "24")
    print_table("A title that is longer", ("name", "about"), [("a_long_name", "one two three four")], left=2)
    assert _printed(capsys) == [
        "A title that is longer",
        "",
        " name         about",
        " ─────────────────────",
        " a_long_name  one two",
        "              three",
        "              four",
        "",
    ]


def test_a_table_whose_words_do_not_fit_is_paragraphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty cells are left out, a column without a name has its cell alone, and a word may be longer than a line."""
    monkeypatch.setenv("COLUMNS", "20")
    rows = [("a_long_name", "", "another_long_name", "="), ("b", "x", "a_name_of_twenty_four_ch", "")]
    print_table("", ("name", "data", "model", ""), rows, left=2)
    expected = ["", "  a_long_name", "    model:", "    another_long_name;", "    =", "  b"]
    assert _printed(capsys) == [*expected, "    data: x; model:", "    a_name_of_twenty_four_ch", ""]


def test_wide_characters_are_not_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them takes two columns of a terminal."""
    monkeypatch.setenv("COLUMNS", "22")
    print_table("", ("class", "%"), [("猫犬馬羊牛", "99.10")])
    assert "  猫犬馬羊牛   99.10" in _printed(capsys)


def test_without_columns_in_the_environment_a_file_is_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table("", ("name", "about"), [("a", "word " * 28)], left=2)
    assert len(_printed(capsys)) == 5


def test_long_lines_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("word " * 100)
    assert capsys.readouterr().out == "word " * 100 + "\n"


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    print_csv([{"model": "a, b", "params": 1}, {"model": "c", "params": 2}])
    assert capsys.readouterr().out == 'model,params\n"a, b",1\nc,2\n'


def test_log_lines_are_for_the_time_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("vision_longformer.somewhere")
    with log_lines():
        logger.info("resized")
    logger.info("quiet")
    assert capsys.readouterr().err == "resized\n"


def test_no_bars_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """But a line every 30 seconds: a quarter took 40 s, so the rest takes 120 s."""
    assert list(track([1, 2, 3], "counting")) == [1, 2, 3]
    clock = iter([100.0, 110.0, 140.0, 169.0, 500.0])
    monkeypatch.setattr("vision_longformer.cli.output.time.monotonic", lambda: next(clock))
    with progress_bar("counting") as progress:
        for done in (1, 2, 3, 8):
            progress(done, 8)
    assert capsys.readouterr() == ("", "counting: 25%, 2 min 0 s left\n")


def test_steps_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute is over when the second step begins, and again when the last does; no time is foretold."""
    now = 100.0
    monkeypatch.setattr("vision_longformer.cli.output.time.monotonic", lambda: now)
    with step_status(("tracing", "comparing")) as progress:
        for seconds, done in ((31, 1), (1, 2), (30, 3), (90, 4)):
            now += seconds
            progress(done, 4)
    assert capsys.readouterr() == ("", "comparing (step 2 of 4)\ncomparing (step 4 of 4)\n")


def test_an_exported_file_older_than_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is said of other files, of run directories and of names on the hub."""
    exported, checkpoint = tmp_path / "best.onnx", tmp_path / "best.safetensors"
    for path, written in ((exported, 1000), (checkpoint, 1000), (tmp_path / "last.onnx", 500)):
        path.touch()
        os.utime(path, (written, written))
    others = (exported, checkpoint, tmp_path / "last.onnx", tmp_path, ".", "hf-hub:owner/name")
    for path in others:
        warn_if_outdated(path)
    assert capsys.readouterr().err == ""
    os.utime(checkpoint, (1001, 1001))
    warn_if_outdated(exported)
    assert capsys.readouterr().err == (
        f"{exported} is older than best.safetensors beside it; to update it, run 'vil export' again with --overwrite\n"
    )


def test_numbers() -> None:
    assert (millions(24_657_345), billions(4_861_700_000), size_text((97, 143))) == ("24.66", "4.862", "97×143")
