"""Errors that say what was wrong and what would be right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class CheckpointError(ValueError):
    """A checkpoint could not be read or does not fit; nothing was loaded."""


def unknown_name(what: str, value: object, choices: Iterable[str]) -> ValueError:
    """The error for a name that is not one of ``choices``, with the nearest ones suggested."""
    names = {name.lstrip("-"): name for name in sorted(choices)}  # the dashes of options are no likeness
    near = [names[name] for name in get_close_matches(str(value).lstrip("-"), names, n=3, cutoff=0.5)]
    all_names = listed([*names.values()], MOST_LISTED)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose from {all_names}"
    return ValueError(f"unknown {what} {value!r}; {hint}")


MOST_LISTED = 40
"""Names that an error lists; of more, it says how many there are."""


def listed(names: Sequence[str], most: int) -> str:
    """``a, b and 3 more``: ``most`` of the names, and how many others there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def check_choice(what: str, value: object, choices: Iterable[str]) -> None:
    """Raise :func:`unknown_name` unless ``value`` is one of ``choices``."""
    choices = tuple(choices)
    if value not in choices:
        raise unknown_name(what, value, choices)


def check_at_least(what: str, value: object, least: int) -> None:
    """Raise unless ``value`` is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is {value!r}; it must be an integer of at least {least}")


def check_fraction(what: str, value: float) -> None:
    """Raise unless ``value`` is between 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{what} is {value}; it must be between 0 and 1")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class name if it has none."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]
