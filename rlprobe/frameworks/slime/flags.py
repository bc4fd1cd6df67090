"""slime's command line, read as far as rlprobe must know it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from rlprobe.errors import ConfigError

#: A flag's values: none for a switch, one or several otherwise.
Flags = dict[str, tuple[str, ...]]


def words(overrides: Iterable[str]) -> list[str]:
    """Overrides as the words of a command line; one override may hold a flag and its values.

    Raises:
        ConfigError: an override does not begin with ``--`` or has an open quote.
    """
    found: list[str] = []
    for override in overrides:
        parts = split(override)
        if not parts or not parts[0].startswith("--"):
            raise ConfigError(
                f"override {override!r} is not one of slime's command-line flags; accepted: "
                "--name, or --name value"
            )
        found += parts
    return found


def split(override: str) -> list[str]:
    """A flag and its values, or one word that is a value.

    Raises:
        ConfigError: it has an open quote.
    """
    if not override.strip().startswith("--"):
        return [override]
    try:
        return shlex.split(override)
    except ValueError as error:
        raise ConfigError(f"override {override!r}: {error}") from error


def parse(command_line: Iterable[str]) -> Flags:
    """Flags by name without the dashes; a flag given twice keeps its last values."""
    found: Flags = {}
    name = None
    for word in command_line:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = (value,) if equals else ()
        elif name is not None:
            found[name] = (*found[name], word)
    return found


def text(flags: Mapping[str, tuple[str, ...]], name: str, default: str) -> str:
    """A flag's only value, or the default where the flag is not given.

    Raises:
        ConfigError: the flag stands without a value.
    """
    if name not in flags:
        return default
    if not flags[name]:
        raise ConfigError(f"--{name}: found no value; accepted: one")
    return flags[name][-1]


def number(flags: Mapping[str, tuple[str, ...]], name: str, default: float) -> float:
    """A flag's value as a number.

    Raises:
        ConfigError: the value is not a number.
    """
    value = text(flags, name, str(default))
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError(f"--{name}: found {value!r}; accepted: a number") from error


def render(flags: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The words that give these flags."""
    return [word for name, values in flags.items() for word in (f"--{name}", *values)]
