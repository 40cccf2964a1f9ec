"""From functions to command lines: what becomes an argument of which type, and what its help says."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest

from vision_longformer.cli.main import COMMANDS, main
from vision_longformer.cli.parser import Group, Settings, Size, run_command, settings_from
from vision_longformer.cli.recipes import SETTING_GROUPS, recipe_settings

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


@dataclass
class _Wet:
    """Wet.

    Args:
        drops: how many; None for any number.
        stir: with a spoon.
        thin: with water, or with oil.
    """

    drops: int | None = None
    stir: bool = False
    thin: bool | Literal["oil"] = False


@dataclass
class _Colour(_Wet):
    """A colour.

    Args:
        red: how much red.
        parts: of all colours.
        shake: with 100% of one's force.
        dry_run: not an option: the command has its own.
    """

    red: float = 1 / 3
    parts: tuple[float, ...] = (1.0, 0.5)
    shake: bool = True
    dry_run: str = ""
    seed: int = 0


@settings_from(
    lambda: Settings(_Colour, "Of paint.", {"wet settings": ("drops", "stir", "thin", "no_field"), "dry": ("parts",)})
)
def _mix(recipe: str | None = None, /, *, dry_run: bool = False, **settings: str) -> None:
    """Mix."""
    CALLS.append(((recipe, dry_run), settings))


GROUP = Group("Art.", {"oil": Group("Oil.", {"paint": _paint}), "mix": _mix})


def test_a_group_that_is_a_command_too() -> None:
    """Its own commands come first; anything else is for the function, also nothing at all."""
    group = Group("Art.", {"mix": Group("Mixing.", {"oil": _mix}, otherwise=_mix)})
    for words in (["oil", "blue"], ["blue"], [], ["--dry-run"]):
        run_command("art", group, ["mix", *words], "0")
    assert CALLS == [(("blue", False), {}), (("blue", False), {}), ((None, False), {}), ((None, True), {})]


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
    run_command("art", GROUP, ["mix", "--drops", "8", spelling, "green", "--parts=a-b=c"], "0")
    assert CALLS == [(("green", True), {"drops": "8", "parts": "a-b=c"})]
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
        (["oil", "paint", "board", "red", "--signed=perhaps"], "argument --signed: 'perhaps' is not true or false"),
        (["mix", "green", "--dry-run", "perhaps"], "unrecognized arguments: perhaps"),
        (["oil", "paint", "--dry", "x"], "unknown option '--dry'; did you mean '--dry-run'?"),
        (
            ["oil", "paint", "board", "red", "--coat=3"],
            "unknown option '--coat'; did you mean '--coats' or '--first-coat'?",
        ),
        (["mix", "--drop", "3"], "unknown option '--drop'; did you mean '--drops'?"),
        (["mix", "--part_s=3"], "unknown option '--part-s'; did you mean '--parts'?"),
        (["mix", "--stir="], "argument --stir: '' is not true or false"),
        (["mix", "--drops", "--dry-run"], "argument --drops: expected one argument"),
        (["mix", "green", "blue"], "unrecognized arguments: blue"),
        (["oil", "pant"], "unknown command 'oil pant'; did you mean 'oil paint'?"),
        (["oli"], "unknown command 'oli'; did you mean 'oil'?"),
        (["oil", "--versoin"], "unknown option '--versoin'; did you mean '--version'?"),
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


BOOLEANS: list[tuple[list[str], dict[str, bool]]] = [
    ([], {}),
    (["--dry-run"], {"dry_run": True}),
    (["--no-dry-run"], {"dry_run": False}),
    (["--dry-run", "true"], {"dry_run": True}),
    (["--dry_run", "false"], {"dry_run": False}),
    (["--dry-run=true"], {"dry_run": True}),
    (["--dry-run=false"], {"dry_run": False}),
    (["--dry-run", "--no-dry-run"], {"dry_run": False}),
    (["--signed", "--dry-run", "false"], {"signed": True, "dry_run": False}),
    (["--no-signed"], {"signed": False}),
]
"""Options, and what they set; what they do not is False and None."""


@pytest.mark.parametrize(
    ("words", "given"), BOOLEANS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_booleans(words: list[str], given: dict[str, bool]) -> None:
    run_command("art", GROUP, ["oil", "paint", "board", "red", *words], "0")
    assert CALLS[1] == ((given.get("dry_run", False), given.get("signed")), {})


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--stir"], {"stir": "true"}),
        (["--no-shake", "--stir", "true"], {"shake": "false", "stir": "true"}),
        (["--stir=false", "--shake", "false"], {"stir": "false", "shake": "false"}),
        (["--thin"], {"thin": "true"}),
        (["--no-thin"], {"thin": "false"}),
        (["--thin", "oil"], {"thin": "oil"}),
        (["--thin=oil", "--stir"], {"thin": "oil", "stir": "true"}),
        (["--thin", "false"], {"thin": "false"}),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_booleans_among_settings(words: list[str], settings: dict[str, str], last: bool) -> None:
    """They are text, as a recipe states them; a word after them that is neither true nor false is not theirs."""
    run_command("art", GROUP, ["mix", "green", *words] if last else ["mix", *words, "green"], "0")
    assert [(("green", False), settings)] == CALLS


@pytest.mark.parametrize(
    ("words", "output", "options"),
    [
        (["scan", "--sharp", "--size", "28", "out"], "out", {"sharp": True, "size": (28, 28)}),
        (["--size", "28", "scan", "--sharp", "out"], "out", {"sharp": True, "size": (28, 28)}),
        (["scan", "--size", "28"], None, {"size": (28, 28)}),
        (["scan", "out", "--sharp"], "out", {"sharp": True}),
    ],
)
def test_options_between_positional_words(words: list[str], output: str | None, options: dict[str, Any]) -> None:
    def copy(source: str, output: str | None = None, /, *, sharp: bool = False, size: Size | None = None) -> None:
        CALLS.append(((source, output), {"sharp": sharp, "size": size}))

    run_command("art", Group("Art.", {"copy": copy}), ["copy", *words], "0")
    assert [(("scan", output), {"sharp": False, "size": None, **options})] == CALLS


def test_options_between_the_words_of_a_list() -> None:
    run_command("art", GROUP, ["oil", "paint", "board", "red", "--coats", "3", "blue", "--dry-run", "green"], "0")
    assert CALLS[0][0] == ("board", ["red", "blue", "green"])
    assert CALLS[0][1]["coats"] == 3


def test_after_two_dashes_nothing_is_an_option() -> None:
    run_command("art", GROUP, ["mix", "--", "--green"], "0")
    assert CALLS == [(("--green", False), {})]


def test_help_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """By group, those of no group at the end, each with its default and the sentence of its class."""
    text = _help(capsys, "mix", "--help")
    assert text.startswith("usage: art mix [-h] [--dry-run | --no-dry-run] [recipe] [--SETTING VALUE ...] Mix.")
    wet, dry = text.index("wet settings: Of paint."), text.index("dry: --parts")
    other = text.index("other settings:")
    assert wet < dry < other
    assert "--drops N how many; null for any number. --stir, --no-stir with a spoon. --thin [oil] with" in text
    assert "--parts [X,...] of all colours. (default: [1, 0.5])" in text
    assert (
        "--red X how much red. (default: 0.3333) --shake, --no-shake with 100% of one's force. (default: true)" in text
    )
    assert text.endswith("--seed N (default: 0)")
    assert "not an option" not in text


@pytest.mark.parametrize("task", ["classification", "detection"])
def test_every_setting_of_a_recipe_is_in_a_group_with_a_sentence(task: str) -> None:
    recipe, _, groups, *_ = recipe_settings(task)
    names = [name for group in groups.values() for name in group]
    assert sorted(set(names)) == sorted(names)
    command = COMMANDS.commands["train"] if task == "classification" else COMMANDS.commands["detect"].commands["train"]
    taken = inspect.signature(command).parameters
    assert {field.name for field in fields(recipe)} - taken.keys() <= set(names)
    documented = "".join(base.__doc__ or "" for base in recipe.__mro__)
    assert [field.name for field in fields(recipe) if f"        {field.name}: " not in documented] == []


def test_groups_have_no_settings_that_are_no_longer_there() -> None:
    known = {
        field.name for task in ("classification", "detection") for field in fields(recipe_settings(task).dataclass)
    }
    assert {name for group in SETTING_GROUPS.values() for name in group} <= known


def test_help_says_which_settings_follow_from_own_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--epochs N passes over the training set. (default: 300; derived for data of your own)" in text
    assert "--std [X,...] channel standard deviations; null for ImageNet's. (derived for data of your own)" in text
    assert "--seed N seeds everything random; the same seed gives the same run. (default: 0)" in text


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys, "oil", "paint", "--help")
    assert text.startswith("usage: art oil paint [-h] [--frame FRAME] [--coats COATS] [--first-coat FIRST_COAT]")
    assert "Paint a picture. It takes 100% of the canvas. positional arguments:" in text
    assert "canvas what to paint on. colours the colours." in text
    assert "--frame FRAME wood of the frame. (default: oak)" in text
    assert "--coats COATS how many; the text may go on in another line. (default: 2)" in text
    assert "--first-coat FIRST_COAT the number of the first; 1 by default. --gloss" in text
    assert "--dry-run, --no-dry-run paint nothing. --signed, --no-signed put a name on it." in text


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
