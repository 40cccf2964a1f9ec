"""From functions to command lines: what becomes an argument of which type, and what its help says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vision_longformer.cli.main import COMMANDS
from vision_longformer.cli.parser import Group, Size, run_command

CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
SIZES: list[Size | None] = []


def _paint(
    canvas: str,
    colours: list[str],
    /,
    frame: str = "oak",
    *,
    coats: int = 2,
    first_coat: int | None = None,
    gloss: float | None = 0.5,
    dry_run: bool = False,
    signed: bool | None = None,
    size: Size | None = None,
) -> None:
    """Paint a picture.

    It takes 100% of the canvas.

    Args:
        canvas: what to paint on.
        colours: the colours.
        frame: wood of the frame.
        coats: how many; the text may
            go on in another line.
        first_coat: the number of the first; 1 by default.
        gloss: from 0 to 1.
        dry_run: paint nothing.
        signed: put a name on it.
        size: height and width.
    """
    CALLS.append(((canvas, colours), {"frame": frame, "coats": coats, "first_coat": first_coat, "gloss": gloss}))
    CALLS.append(((dry_run, signed), {}))
    SIZES.append(size)


def _mix(recipe: str | None = None, /, *, dry_run: bool = False, **settings: str) -> None:
    """Mix."""
    CALLS.append(((recipe, dry_run), settings))


GROUP = Group("Art.", {"oil": Group("Oil.", {"paint": _paint}), "mix": _mix})


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def test_defaults() -> None:
    run_command("art", GROUP, ["oil", "paint", "board", "red"], "0")
    options = {"frame": "oak", "coats": 2, "first_coat": None, "gloss": 0.5}
    assert [(("board", ["red"]), options), ((False, None), {})] == CALLS


def test_values() -> None:
    """Words of a list, numbers, flags and truth values; dashes and underscores, '=' and a space."""
    given = ["--coats=3", "--first_coat", "-1", "--gloss", "1e-3", "--frame", "two_words-one", "--dry-run"]
    run_command("art", GROUP, ["oil", "paint", "board", "red", "blue", *given, "--signed", "false"], "0")
    options = {"frame": "two_words-one", "coats": 3, "first_coat": -1, "gloss": 0.001}
    assert [(("board", ["red", "blue"]), options), ((True, False), {})] == CALLS


@pytest.mark.parametrize(
    ("text", "size"), [("224", (224, 224)), ("1065x1600", (1065, 1600)), (" 30X40 ", (30, 40)), ("7×5", (7, 5))]
)
def test_sizes(text: str, size: tuple[int, int]) -> None:
    run_command("art", GROUP, ["oil", "paint", "board", "red", "--size", text], "0")
    assert SIZES[-1] == size


@pytest.mark.parametrize("text", ["abc", "224x", "x224", "0", "0x224", "224x00", "-3", "2.5", "1x2x3", ""])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=f"^argument --size: '{text}' is not a size; write 224 or 480x640$"):
        run_command("art", GROUP, ["oil", "paint", "board", "red", f"--size={text}"], "0")


@pytest.mark.parametrize("spelling", ["--dry-run", "--dry_run"])
def test_settings_are_text_by_the_names_of_python(spelling: str) -> None:
    """What the signature does not name; its own options are found among them."""
    run_command("art", GROUP, ["mix", "--batch-size", "8", spelling, "green", "--out_dir=a-b=c"], "0")
    assert CALLS == [(("green", True), {"batch_size": "8", "out_dir": "a-b=c"})]
    CALLS.clear()
    run_command("art", GROUP, ["mix"], "0")
    assert CALLS == [((None, False), {})]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["oil", "paint", "board"], "the following arguments are required: colours"),
        (["oil", "paint", "board", "red", "--coats", "many"], "argument --coats: 'many' is not an integer"),
        (["oil", "paint", "board", "red", "--first_coat", "1.5"], "argument --first-coat: '1.5' is not an integer"),
        (["oil", "paint", "board", "red", "--gloss", "high"], "argument --gloss: 'high' is not a number"),
        (["oil", "paint", "board", "red", "--signed", "perhaps"], "argument --signed: 'perhaps' is not true or false"),
        (["oil", "paint", "board", "red", "--dry", "x"], "unrecognized arguments: --dry x"),
        (["mix", "--size", "--dry-run"], "--size needs a value, as in '--size VALUE'"),
        (["mix", "green", "blue"], "unrecognized arguments: blue"),
        (["oil", "pant"], "unknown command 'oil pant'; did you mean 'oil paint'?"),
        (["oli"], "unknown command 'oli'; did you mean 'oil'?"),
        (["oil", "--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_mistakes(argv: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        run_command("art", GROUP, argv, "0")
    assert CALLS == []


def _help(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        run_command("art", GROUP, list(argv), "1.2")
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys, "oil", "paint", "--help")
    assert text.startswith("usage: art oil paint [-h] [--frame FRAME] [--coats COATS] [--first-coat FIRST_COAT]")
    assert "Paint a picture. It takes 100% of the canvas. positional arguments:" in text
    assert "canvas what to paint on. colours the colours." in text
    assert "--frame FRAME wood of the frame. (default: oak)" in text
    assert "--coats COATS how many; the text may go on in another line. (default: 2)" in text
    assert "--first-coat FIRST_COAT the number of the first; 1 by default. --gloss" in text
    assert "--dry-run paint nothing. --signed {true,false} put a name on it." in text


def test_help_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert _help(capsys, "oil").endswith("commands: COMMAND paint Paint a picture.")
    assert "commands: COMMAND oil Oil. mix Mix." in _help(capsys)
    assert _help(capsys, "--version") == "art 1.2"


def _functions(group: Group) -> list[Any]:
    commands = group.commands.values()
    return [one for command in commands for one in (_functions(command) if isinstance(command, Group) else [command])]


@pytest.mark.parametrize("command", _functions(COMMANDS), ids=lambda command: command.__name__)
def test_every_argument_has_its_sentence(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """An argument without an entry in the docstring would have empty help; options are spelled with dashes."""
    with pytest.raises(SystemExit):
        run_command("vil", Group("", {"it": command}), ["it", "--help"], "0")
    text = capsys.readouterr().out
    names = [name for name in command.__annotations__ if name not in ("return", "settings")]
    for name in names:
        assert f"    {name}: " in (command.__doc__ or "")
        assert name.replace("_", "-") in text or name in text.split("options:")[0]
    options = [word for word in text.split() if word.startswith(("--", "[--"))]
    assert not [word for word in options if "_" in word]
