"""The command line. Each command is a module of this package, loaded only when it is called.

A command module exposes ``add_parser(subparsers)``, which adds one parser named after the command,
and ``run(args) -> int``, which returns the exit code. Messages go to stderr, data to stdout.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from rlprobe import disk, imports, terminal
from rlprobe.cli.common import CommandParser, called, defaults
from rlprobe.errors import RlprobeError
from rlprobe.imports import uncollected
from rlprobe.version import __version__

#: Command -> what it does. The module is the name with underscores.
COMMANDS: dict[str, str] = {
    "run": "run one role of an alignment and commit it to the store",
    "exec": "run any framework command line with the hooks on",
    "compare": "measure every difference between two runs or dumps",
    "official-table": "write msprobe's own comparison table (needs torch)",
    "official-key-data": "write msprobe's own tables of key data",
    "refine": "tensors for the suspects only, and a sharper verdict",
    "reproduce": "a folder for the kernel team: tensors, operators and a script of plain torch",
    "diagnose": "gate, noise floor, first divergence and cause, as diagnosis.json",
    "report": "write the page",
    "verdict": "print the verdict; exit 0 aligned, 3 diverged, 4 not comparable",
    "curves": "judge a training's metrics against those of further ones on the benchmark's device",
    "store": "look into, check and clean the store",
    "rollouts": "look into recorded rollouts",
    "enter": "run a command of rlprobe's in an alignment's analysis image",
    "doctor": "check an alignment's storage, partitions, devices and images before it runs",
    "estimate": "say how much disk an alignment's runs will need",
    "selftest": "plant faults and benign changes, run the pipeline on each, print the score",
    "config": "check an alignment file; print its plan or its JSON schema",
}


def parse(words: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """The module of the command that ``words`` call, and its arguments.

    Raises:
        SystemExit: by argparse, for ``--help``, ``--version`` and usage errors (2).
    """
    command = called(words)
    if command == "help":
        # as other programs have it: `rlprobe help compare` is `rlprobe compare --help`
        at = words.index("help")
        words = [*words[:at], *words[at + 1 :], "--help"]
        command = called(words)
    parser = CommandParser(
        prog="rlprobe",
        description="Run the same reinforcement-learning steps on two devices from the same "
        "rollouts, and say whether, where and why their numbers part.",
    )
    parser.add_argument("--version", action="version", version=f"rlprobe {__version__}")
    subparsers = parser.add_subparsers(
        metavar="COMMAND", title="commands", parser_class=CommandParser
    )
    module: Any = None
    if command in COMMANDS:
        with uncollected():
            module = importlib.import_module(f"{__name__}.{command.replace('-', '_')}")
        module.add_parser(subparsers)
    else:
        for name, summary in COMMANDS.items():
            subparsers.add_parser(name, help=summary)
    args = parser.parse_args(words, namespace=defaults())
    if command is None:
        parser.print_help(sys.stderr)
        parser.exit(2, "rlprobe: error: give a COMMAND, one of those above\n")
    return module, args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code.

    Raises:
        SystemExit: as :func:`parse`.
    """
    with terminal.guarded():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(words: list[str]) -> int:
    args = argparse.Namespace()
    try:
        module, args = parse(words)
        _log_to_stderr(args)
        code = int(module.run(args))
        sys.stdout.flush()
        return code
    except RlprobeError as error:
        logging.getLogger("rlprobe").debug("where it was raised:", exc_info=error)
        return _fail(str(error), error.exit_code)
    except OSError as error:
        # a full disk or a forbidden path is the user's to mend, not a defect
        logging.getLogger("rlprobe").debug("where it was raised:", exc_info=error)
        if error.filename == terminal.STDOUT:
            _give_up_stdout()
            return _fail(f"{terminal.STDOUT}: {error.strerror}; send it elsewhere", 1)
        return _fail(disk.sentence(error, _places(args)), 1)
    except MemoryError as error:
        logging.getLogger("rlprobe").debug("where it was raised:", exc_info=error)
        return _fail("there was not enough memory; ask for more, or compare fewer stages", 1)
    except ModuleNotFoundError as error:
        lacking = imports.lacking(error)
        if lacking is None:
            raise
        return _fail(lacking, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _places(args: argparse.Namespace) -> tuple[str, ...]:
    """Where a command was told to write, for failures that name no file."""
    given = (
        getattr(args, name, None)
        for name in ("output", "out", "directory", "store", "results", "json")
    )
    return tuple(str(place) for place in given if place is not None)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(terminal.message(f"rlprobe: error: {_redacted(message)}\n"))
    return code


def _redacted(message: str) -> str:
    # Imported here: a command that is quiet says nothing.
    from rlprobe import redaction

    return redaction.text(message, names=False)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return terminal.message(_redacted(super().format(record)))


def _log_to_stderr(args: argparse.Namespace) -> None:
    """Messages of the package's loggers: progress by default, warnings with -q, details with -v."""
    levels = [logging.WARNING, logging.INFO, logging.DEBUG]
    level = levels[max(0, min(1 + args.verbose - args.quiet, 2))]
    logger = logging.getLogger("rlprobe")
    # anew each time: stderr may be another one than at the call before
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("rlprobe: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
    # a log that cannot be written is no reason for a traceback beside the message that matters
    logging.raiseExceptions = False
