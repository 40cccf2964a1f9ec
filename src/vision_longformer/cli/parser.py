"""From a function to a command: arguments, types and help come from its signature and docstring, by jsonargparse.

Parameters without a default are positional, others are options; a positional-only one with a default is positional and
may be left out. A boolean is a flag, with ``--no_…`` beside it if it is true by default; fields of a dataclass take a
value, as ``--recipe.augment false``. A function with ``**settings`` takes any further ``--key value`` as text.
"""

from __future__ import annotations

import inspect
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

from jsonargparse import ActionYesNo, ArgumentParser

from ..errors import unknown_name

Function = Callable[..., None]


class Group(NamedTuple):
    """Commands under a common word, as ``vil table cost``."""

    about: str
    commands: Mapping[str, Function | Group]


class _CommandParser(ArgumentParser):
    """jsonargparse's parser with flags, ``optional`` positionals, by name with their defaults, and ``repeated`` ones.

    jsonargparse copies the method to its argument groups, which have no such attributes.
    """

    optional: Mapping[str, Any]
    repeated: Set[str]

    def add_argument(self, *names: Any, **options: Any) -> Any:
        if options.get("type") is bool and "." not in names[0]:
            del options["type"]
            options["action"] = ActionYesNo() if options.get("default") else "store_true"
        optional = getattr(self, "optional", {})
        if names[0] in optional:
            options = {**options, "nargs": "?", "default": optional[names[0]]}
        if names[0] in getattr(self, "repeated", ()):
            options = {"help": options.get("help"), "type": str, "nargs": "+"}
        return super().add_argument(*names, **options)


def run_command(program: str, group: Group, argv: list[str], version: str) -> None:
    """Find the command that ``argv`` names, parse the rest and run it; a group alone prints its help."""
    path = [program]
    command: Function | Group = group
    while isinstance(command, Group):
        if not argv or argv[0].startswith("-"):
            _group_parser(" ".join(path), command, version).parse_args(argv or ["--help"])
            return
        name, *argv = argv
        if name not in command.commands:
            raise unknown_name("command", " ".join([*path[1:], name]), _full_names(path[1:], command))
        path.append(name)
        command = command.commands[name]
    parser = _command_parser(" ".join(path), command)
    argv, settings = _take_settings(command, [_underscored(argument) for argument in argv])
    arguments = parser.instantiate(parser.parse_args(argv))
    positional, options = _split(command, arguments.as_dict())
    command(*positional, **options, **settings)


def _underscored(argument: str) -> str:
    """``--dry-run=x-y`` as ``--dry_run=x-y``: either spelling of an option's name will do."""
    name, equals, value = argument.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value if argument.startswith("--") else argument


def _take_settings(function: Function, argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Arguments that the signature names, and the others as settings if the function takes any."""
    parameters = inspect.signature(function).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        return argv, {}
    named = {"help", *(parameter.name for parameter in parameters)}
    rest, settings, waiting = [], {}, list(argv)
    while waiting:
        argument = waiting.pop(0)
        key, _, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or key in named:
            rest.append(argument)
            continue
        if "=" not in argument:
            if not waiting or waiting[0].startswith("--"):
                raise ValueError(f"{argument} needs a value, as in '{argument} VALUE'")
            value = waiting.pop(0)
        settings[key] = value
    return rest, settings


def _full_names(path: list[str], group: Group) -> list[str]:
    return [" ".join([*path, name]) for name in group.commands]


def _group_parser(program: str, group: Group, version: str) -> ArgumentParser:
    """A parser that knows help, version and the names of the commands."""
    parser = ArgumentParser(prog=program, description=group.about, exit_on_error=False, version=version)
    commands = parser.add_subcommands(metavar="COMMAND", title="commands", description=None)
    for name, command in group.commands.items():
        about = command.about if isinstance(command, Group) else _description(command).splitlines()[0]
        commands.add_subcommand(name, ArgumentParser(), help=about)
    return parser


def _command_parser(program: str, function: Function) -> ArgumentParser:
    parser = _CommandParser(prog=program, description=_description(function), exit_on_error=False, allow_abbrev=False)
    parameters = inspect.signature(function).parameters.values()
    parser.optional = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is not parameter.empty
    }
    parser.repeated = {parameter.name for parameter in parameters if str(parameter.annotation) == "list[str]"}
    parser.add_function_arguments(function, as_group=False, as_positional=True)
    return parser


def _description(function: Function) -> str:
    """The docstring up to its list of arguments."""
    return (inspect.getdoc(function) or "").partition("Args:")[0].strip()


def _split(function: Function, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Values of positional-only parameters in order, and the others by name."""
    parameters = inspect.signature(function).parameters.values()
    positional = [values.pop(parameter.name) for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    return positional, values


def parser_message(error: ArgumentError) -> str:
    """A parser's error as one line."""
    return " ".join(str(error).split())
