"""Values between YAML and dataclass fields: numbers, tuples, and what a field asks for in words."""

from __future__ import annotations

import math
import re
from types import UnionType
from typing import Any, get_args, get_origin

import yaml


class RecipeLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as it is everywhere else; PyYAML wants 1.0e-3."""


class RecipeDumper(yaml.SafeDumper):
    """Lists on one line; quotes around strings that :class:`RecipeLoader` would take for numbers."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)


for _class in (RecipeLoader, RecipeDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def as_type(value: Any, expected: Any) -> Any:
    """``value`` for a field of type ``expected``: whole numbers become floats, and lists tuples, where it has them.

    TypeError if it is something else.
    """
    origin, options = get_origin(expected), get_args(expected)
    if origin is UnionType:
        return None if value is None else as_type(value, _not_none(options))
    if origin is tuple and isinstance(value, (list, tuple)):
        items = options[:1] * len(value) if options[-1] is ... else options
        if len(items) == len(value):
            return tuple(as_type(item, option) for item, option in zip(value, items, strict=True))
    elif expected is float:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif type(value) is (origin or expected):
        return value
    raise TypeError(f"{value!r} is not {in_words(expected)}")


def in_words(expected: Any) -> str:
    """What a type asks for, as a sentence would say it."""
    origin, options = get_origin(expected), get_args(expected)
    if origin is UnionType:
        return f"{in_words(_not_none(options))}, or null"
    if origin is tuple:
        return "a list of numbers" if options[-1] is ... else f"a list of {len(options)} numbers"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "keys with values"}
    return words[origin or expected]


def _not_none(options: tuple[Any, ...]) -> Any:
    """The type beside None in an optional one."""
    (option,) = (option for option in options if option is not type(None))
    return option
