"""What every command has: the options --json, -q and -v, and how results are written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlprobe.errors import UsageError
from rlprobe.files import replace_text


class CommandParser(argparse.ArgumentParser):
    """A parser with the common options; subcommands get them as well.

    A command that describes ``--json`` in its own words replaces the common one. Abbreviated
    options are refused: a later option would change what an old script means.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"conflict_handler": "resolve", "allow_abbrev": False, **kwargs})
        common = self.add_argument_group("common options")
        # Suppressed defaults: a subcommand's must not overwrite what was given before it.
        common.add_argument(
            "--json",
            type=given_path,
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="write the result as JSON",
        )
        for short, long, text in (
            ("-q", "--quiet", "warnings only"),
            ("-v", "--verbose", "details, and tracebacks of errors"),
        ):
            common.add_argument(short, long, action="count", default=argparse.SUPPRESS, help=text)


def called(words: Sequence[str]) -> str | None:
    """The command that ``words`` call: the first that is neither an option nor an option's value.

    Common options are accepted before the command as well as after it.
    """
    before = None
    for word in words:
        if not word.startswith("-") and before != "--json":
            return word
        before = word
    return None


def defaults() -> argparse.Namespace:
    """The common options' values before a command line is parsed."""
    return argparse.Namespace(json=None, quiet=0, verbose=0)


def given_path(text: str) -> Path:
    """The type of arguments that are paths: an empty one, which would be here, is refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError(_EMPTY)
    return Path(text)


_EMPTY = "an empty path; was a shell variable not set?"


def unfit(text: str) -> str | None:
    """Why results cannot stand at a path; None where nothing is against it.

    An empty one would be here. Tables are neither written nor read where a name is no UTF-8, or is
    taken for none in another locale.
    """
    if not text.strip():
        return _EMPTY
    try:
        text.encode()
    except UnicodeEncodeError:
        return (
            f"a path that is no UTF-8, which tables need ({text!r}); give one of another name, or "
            "a link to it, or set LC_ALL=C.UTF-8 where it is UTF-8"
        )
    return None


def given_stage(text: str) -> str:
    """The type of arguments that are names of stages: results stand in a directory of that name."""
    if not text.strip() or text.startswith(".") or "/" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a stage, which is the name of a directory in OUT as well"
        )
    return text


def require_results(directory: Path) -> None:
    """Make sure that a results directory is there, and a directory.

    Raises:
        UsageError: it is not.
    """
    if directory.is_dir():
        if _has_results(directory):
            return
        raise UsageError(
            f"{directory} holds no results: neither the plan of an alignment (alignment.json) nor "
            "a comparison (STAGE/summary.json); `make align` makes the first, "
            "`rlprobe compare A B -o DIR` the second"
        )
    if directory.exists():
        raise UsageError(
            f"{directory} is a file; give the directory of the results, {directory.parent}"
        )
    raise UsageError(
        f"{directory} does not exist; give the directory of an alignment's results, or of what "
        "`rlprobe compare -o` wrote"
    )


def _has_results(directory: Path) -> bool:
    names = ("alignment.json", "diagnosis.json", "sides.json")
    return any((directory / name).exists() for name in names) or any(
        directory.glob("*/summary.json")
    )


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as strict JSON, whole or not at all.

    Raises:
        OSError: the directory cannot be written.
        ValueError: a number is not finite; say null or a text instead.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    replace_text(path, text)
