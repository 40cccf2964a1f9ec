"""From a tree of functions to a command line: a function's signature and docstring are its arguments and their help.

Parameters without a default are positional, others are options; a positional-only one with a default is positional and
may be left out. A list takes several words, a :data:`Size` is ``224`` or ``480x640``. A boolean is ``--name`` or
``--no-name``; ``--name true`` and ``--name=false`` are understood, too. A function with ``**settings`` says by
:func:`settings_from` which dataclass has them, and gets those that were given as text. Options are documented with
dashes and understood with underscores, too.
"""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType, UnionType
from typing import Any, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import unknown_name

Function = Callable[..., None]
F = TypeVar("F", bound=Function)

Size = tuple[int, int]
"""(height, width) of images; on the command line ``480x640``, or ``224`` for a square."""


class Group(NamedTuple):
    """Commands under a common word, as ``vil table cost``; ``epilogue`` is printed below the list of them.

    ``otherwise``: what the common word alone is, followed by anything but the name of one of the commands.
    """

    about: str
    commands: Mapping[str, Function | Group]
    epilogue: str = ""
    otherwise: Function | None = None


class Settings(NamedTuple):
    """A dataclass whose fields a command takes as options, a sentence about them, and the titles to list them under.

    ``nested``: those among the fields that are dictionaries, with a dataclass whose fields are their keys. ``derived``:
    those whose defaults do not hold for data of one's own, from which they are derived.
    """

    dataclass: type
    about: str
    groups: Mapping[str, tuple[str, ...]]
    nested: Mapping[str, type] = MappingProxyType({})
    derived: Collection[str] = ()


def settings_from(load: Callable[[], Settings]) -> Callable[[F], F]:
    """Declare where the ``**settings`` of a command come from; ``load`` is called when its arguments are parsed."""

    def declare(function: F) -> F:
        function.load_settings = load  # type: ignore[attr-defined]
        return function

    return declare


def run_command(program: str, group: Group, argv: list[str], version: str) -> None:
    """Find the command that ``argv`` names, parse the rest and call it; a group alone prints its help.

    A mistake is a ValueError of one sentence.
    """
    path = [program]
    command: Function | Group = group
    while isinstance(command, Group):
        if command.otherwise is not None and (not argv or argv[0] not in command.commands):
            command = command.otherwise
            break
        if not argv or argv[0].startswith("-"):
            _parse(_group_parser(" ".join(path), command, version), argv or ["--help"])
            return
        name, *argv = argv
        if name not in command.commands:
            names = [" ".join([*path[1:], known]) for known in command.commands]
            raise unknown_name("command", " ".join([*path[1:], name]), names)
        path.append(name)
        command = command.commands[name]
    _call(command, _parse(_command_parser(" ".join(path), command), argv))


def _call(function: Function, values: dict[str, Any]) -> None:
    """Call it with what was given; what was not has the default of its signature."""
    positional, options = [], {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(values.pop(parameter.name))
        elif parameter.name in values:
            options[parameter.name] = values.pop(parameter.name)
    settings = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    function(*positional, **options, **settings)


# Parsing


class _Parser(ArgumentParser):
    """argparse's, but a mistake is an exception. ``nested``: how to write options that are keys of another."""

    nested: Mapping[str, str] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def booleans(self) -> set[str]:
        """The options that are ``--name``, without their ``--no-name``."""
        return {action.option_strings[0] for action in self._actions if isinstance(action, BooleanOptionalAction)}

    def words(self) -> dict[str, tuple[str, ...]]:
        """The words that an option takes in place of true and false, by option."""
        return {action.option_strings[0]: action.words for action in self._actions if hasattr(action, "words")}

    def options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


def _parse(parser: _Parser, argv: list[str]) -> dict[str, Any]:
    """Values by name; of options only those that were given. What follows ``--`` is positional.

    Options may stand between positional words, except where argparse cannot mix them: with ``--`` and for groups.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    words, options = [_dashed(argument) for argument in argv[:end]], parser.options()
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in options:
            if name in parser.nested:
                raise ValueError(f"unknown option {name!r}; write it as {parser.nested[name]}")
            raise unknown_name("option", name, options)
    mixed = end == len(argv) and parser._subparsers is None
    parse = parser.parse_intermixed_args if mixed else parser.parse_args
    return vars(parse([*_flags(words, parser.booleans(), parser.words()), *argv[end:]]))


def _dashed(argument: str) -> str:
    """``--dry_run=x_y`` as ``--dry-run=x_y``."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def _flags(words: list[str], booleans: set[str], more: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """``--name true`` and ``--name=true`` as ``--name``, with false as ``--no-name``; other words as they are.

    Options that take ``more`` words keep what they are given, as ``--name=true`` or ``--name=word``.
    """
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        name, equals, value = word.partition("=")
        if name in booleans or name in more:
            values = (*TRUTH, *more.get(name, ()))
            if not equals:
                value = waiting.popleft() if waiting and waiting[0] in values else "true"
            if value not in values:
                raise ValueError(f"argument {name}: {value!r} is not {' or '.join(values)}")
            word = f"{name}={value}"
            if name in booleans:
                word = name if TRUTH[value] else _negative(name)
        yield word


TRUTH = {"true": True, "false": False}


def _negative(option: str) -> str:
    """``--no-name`` of ``--name``."""
    return f"--no-{option.removeprefix('--')}"


# Parsers


def _group_parser(program: str, group: Group, version: str) -> _Parser:
    """A parser that knows help, version and the names of the commands."""
    parser = _Parser(prog=program, description=group.about, epilog=group.epilogue, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}", help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, command in group.commands.items():
        about = command.about if isinstance(command, Group) else _description(command).splitlines()[0]
        commands.add_parser(name, help=about)
    return parser


def _command_parser(program: str, function: Function) -> _Parser:
    parser = _Parser(prog=program, description=_description(function), allow_abbrev=False)
    help_texts = _argument_help(function)
    parameters = inspect.signature(function, eval_str=True).parameters
    for parameter in parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            _add_argument(parser, parameter, help_texts.get(parameter.name, ""))
    if hasattr(function, "load_settings"):
        usage, indent = parser.format_usage().removeprefix("usage: ").rstrip(), len(f"usage: {program} ")
        parser.usage = f"{usage}\n{' ' * indent}[--SETTING VALUE ...]".replace("%", "%%")
        settings = function.load_settings()
        _add_settings(parser, settings, set(parameters))
        parser.nested = {
            _dashed(f"--{key.name}"): f"{_dashed(f'--{name}')} '{{\"{key.name}\": ...}}'"
            for name, dataclass in settings.nested.items()
            for key in fields(dataclass)
        }
    return parser


def _add_argument(parser: ArgumentParser, parameter: inspect.Parameter, text: str) -> None:
    name, expected = parameter.name, parameter.annotation
    required = parameter.default is parameter.empty
    default = None if required else parameter.default
    help_text = _help_text(text, default)
    if expected == list[str]:
        parser.add_argument(name, nargs="+", help=help_text)
    elif parameter.kind is parameter.POSITIONAL_ONLY or (required and parameter.kind is not parameter.KEYWORD_ONLY):
        parser.add_argument(name, nargs=None if required else "?", default=default, help=help_text)
    elif _is_boolean(expected):
        _add_boolean(parser, name, help_text)
    else:
        parser.add_argument(
            _dashed(f"--{name}"),
            type=_converter(expected),
            default=SUPPRESS,
            required=required,
            metavar=name.upper(),
            help=help_text,
        )


def _add_boolean(parser: Any, name: str, help_text: str) -> None:
    """``--name`` and ``--no-name``; without either, the default of the function or dataclass."""
    action = parser.add_argument(_dashed(f"--{name}"), action=BooleanOptionalAction, help=help_text)
    action.default = SUPPRESS


def _add_boolean_or_word(parser: Any, name: str, words: tuple[str, ...], help_text: str) -> None:
    """``--name``, ``--no-name``, or ``--name WORD``."""
    option, metavar = _dashed(f"--{name}"), f"[{'|'.join(words)}]"
    action = parser.add_argument(option, default=SUPPRESS, metavar=metavar, help=help_text)
    action.words = words
    parser.add_argument(
        _negative(option), dest=name, action="store_const", const="false", default=SUPPRESS, help=SUPPRESS
    )


def _add_settings(parser: ArgumentParser, settings: Settings, taken: set[str]) -> None:
    """The fields of a dataclass, group by group; a name that the signature has too is the signature's."""
    types, texts = get_type_hints(settings.dataclass), _settings_help(settings.dataclass)
    own = {field.name: field for field in fields(settings.dataclass) if field.name not in taken}
    grouped = {name: title for title, names in settings.groups.items() for name in names}
    for number, title in enumerate([*settings.groups, OTHER_SETTINGS]):
        group = parser.add_argument_group(title, None if number else settings.about)
        for name in [name for name in own if grouped.get(name, OTHER_SETTINGS) == title]:
            default = own[name].default
            text = re.sub(r"\bNone\b", "null", texts.get(name, ""))  # as it is written on the command line
            note = DERIVED if name in settings.derived else ""
            help_text = _help_text(text, None if default is MISSING else default, note)
            if _is_boolean(types[name]):
                _add_boolean(group, name, help_text)
            elif words := _words_beside_boolean(types[name]):
                _add_boolean_or_word(group, name, words, help_text)
            else:
                group.add_argument(
                    _dashed(f"--{name}"), default=SUPPRESS, metavar=_setting_metavar(types[name]), help=help_text
                )


DERIVED = "derived for data of your own"

OTHER_SETTINGS = "other settings"
"""The title of settings that are in no group."""

METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "[X,...]", dict: "{...}"}


def _setting_metavar(expected: Any) -> str:
    """What to write for a setting, by its type or by the one beside None."""
    choices = [option for option in get_args(expected) if option is not type(None)]
    single = choices[0] if get_origin(expected) in (Union, UnionType) else expected
    return METAVARS.get(get_origin(single) or single, "VALUE")


def _help_text(text: str, default: Any, note: str = "") -> str:
    """The sentence with the default, unless it says what happens by default, and a note on the default.

    argparse reads ``%`` as a field.
    """
    stated = default is not None and default is not False and default not in ("", ()) and "default" not in text
    notes = [f"default: {_default_text(default)}"] * stated + [note] * bool(note)
    return (f"{text} ({'; '.join(notes)})" if notes else text).replace("%", "%%")


def _default_text(default: Any) -> str:
    """As one would write it on the command line."""
    if isinstance(default, tuple):
        return f"[{', '.join(map(_default_text, default))}]"
    if isinstance(default, float):
        return f"{default:.4g}"
    return "true" if default is True else str(default)


# Values


def _is_boolean(expected: Any) -> bool:
    """Whether a type is ``bool`` or ``bool | None``."""
    return expected is bool or expected == bool | None


def _words_beside_boolean(expected: Any) -> tuple[str, ...]:
    """The words of ``bool | Literal["word"]``; none for any other type."""
    options = get_args(expected)
    return get_args(options[1]) if len(options) == 2 and options[0] is bool else ()


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
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not {words}") from None

    return value


# Docstrings


def _description(function: Function) -> str:
    """The docstring up to its list of arguments."""
    return (inspect.getdoc(function) or "").partition("Args:")[0].strip()


def _argument_help(documented: Function | type) -> dict[str, str]:
    """The docstring's list of arguments, by name."""
    listed = (inspect.getdoc(documented) or "").partition("Args:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _settings_help(dataclass: type) -> dict[str, str]:
    """The same of a dataclass and of those it inherits from."""
    return {name: text for base in reversed(dataclass.__mro__) for name, text in _argument_help(base).items()}
