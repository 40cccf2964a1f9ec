"""From a tree of functions to a command line: a function's signature and docstring are its arguments and their help.

Parameters without a default are positional, others are options; a positional-only one with a default is positional and
may be left out. A boolean is a flag, a list takes several words, a :data:`Size` is ``224`` or ``480x640``. A
function with ``**settings`` takes any further ``--key value`` as text. Options are documented with dashes and
understood with underscores, too.
"""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, get_args

from ..errors import unknown_name

Function = Callable[..., None]

Size = tuple[int, int]
"""(height, width) of images; on the command line ``480x640``, or ``224`` for a square."""


class Group(NamedTuple):
    """Commands under a common word, as ``vil table cost``."""

    about: str
    commands: Mapping[str, Function | Group]


def run_command(program: str, group: Group, argv: list[str], version: str) -> None:
    """Find the command that ``argv`` names, parse the rest and call it; a group alone prints its help.

    A mistake is a ValueError of one sentence.
    """
    path = [program]
    command: Function | Group = group
    while isinstance(command, Group):
        if not argv or argv[0].startswith("-"):
            _group_parser(" ".join(path), command, version).parse_args(argv or ["--help"])
            return
        name, *argv = argv
        if name not in command.commands:
            names = [" ".join([*path[1:], known]) for known in command.commands]
            raise unknown_name("command", " ".join([*path[1:], name]), names)
        path.append(name)
        command = command.commands[name]
    argv, settings = _take_settings(command, [_dashed(argument) for argument in argv])
    values = vars(_command_parser(" ".join(path), command).parse_args(argv))
    parameters = inspect.signature(command).parameters.values()
    positional = [values.pop(parameter.name) for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    command(*positional, **values, **settings)


def _dashed(argument: str) -> str:
    """``--dry_run=x_y`` as ``--dry-run=x_y``."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def _take_settings(function: Function, argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Arguments that the signature names, and the others as settings if the function takes any."""
    parameters = inspect.signature(function).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        return argv, {}
    named = {"help", *(parameter.name for parameter in parameters)}
    rest, settings, waiting = [], {}, list(argv)
    while waiting:
        argument = waiting.pop(0)
        option, equals, value = argument.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        if not argument.startswith("--") or key in named:
            rest.append(argument)
            continue
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ValueError(f"{option} needs a value, as in '{option} VALUE'")
            value = waiting.pop(0)
        settings[key] = value
    return rest, settings


class _Parser(ArgumentParser):
    """argparse's, but a mistake is an exception."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _group_parser(program: str, group: Group, version: str) -> ArgumentParser:
    """A parser that knows help, version and the names of the commands."""
    parser = _Parser(prog=program, description=group.about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}", help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, command in group.commands.items():
        about = command.about if isinstance(command, Group) else _description(command).splitlines()[0]
        commands.add_parser(name, help=about)
    return parser


def _command_parser(program: str, function: Function) -> ArgumentParser:
    parser = _Parser(prog=program, description=_description(function), allow_abbrev=False)
    help_texts = _argument_help(function)
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            _add_argument(parser, parameter, help_texts.get(parameter.name, ""))
    return parser


def _add_argument(parser: ArgumentParser, parameter: inspect.Parameter, text: str) -> None:
    name, expected = parameter.name, parameter.annotation
    required = parameter.default is parameter.empty
    default = None if required else parameter.default
    if default is not None and default is not False and "default" not in text:
        text = f"{text} (default: {default})"
    options: dict[str, Any] = {"help": text.replace("%", "%%")}
    if expected == list[str]:
        parser.add_argument(name, nargs="+", **options)
    elif parameter.kind is parameter.POSITIONAL_ONLY or (required and parameter.kind is not parameter.KEYWORD_ONLY):
        parser.add_argument(name, nargs=None if required else "?", default=default, **options)
    elif expected is bool:
        parser.add_argument(_dashed(f"--{name}"), action="store_true", **options)
    else:
        options["metavar"] = "{true,false}" if bool in get_args(expected) else name.upper()
        parser.add_argument(
            _dashed(f"--{name}"), type=_converter(expected), default=default, required=required, **options
        )


def parse_size(text: str) -> Size:
    """``"480x640"`` or ``"224"`` as (height, width)."""
    match = re.fullmatch(r"0*([1-9]\d*)(?:[xX×]0*([1-9]\d*))?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not {SIZE_WORDS}")
    height, width = match.groups()
    return int(height), int(width or height)


SIZE_WORDS = "a size; write 224 or 480x640"

CONVERTERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "an integer"),
    float: (float, "a number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    Size: (parse_size, SIZE_WORDS),
}
"""From the text of an option to its value, and what the text must be; anything else is text."""


def _converter(expected: Any) -> Callable[[str], Any]:
    """The converter for a type such as ``int`` or ``int | None``."""
    for named in (expected, *get_args(expected)):
        if named in CONVERTERS:
            convert, words = CONVERTERS[named]
            break
    else:
        return str

    def value(text: str) -> Any:
        try:
            return convert(text)
        except (KeyError, ValueError):
            raise ArgumentTypeError(f"{text!r} is not {words}") from None

    return value


def _description(function: Function) -> str:
    """The docstring up to its list of arguments."""
    return (inspect.getdoc(function) or "").partition("Args:")[0].strip()


def _argument_help(function: Function) -> dict[str, str]:
    """The docstring's list of arguments, by name."""
    listed = (inspect.getdoc(function) or "").partition("Args:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
