"""``rlprobe verdict DIAGNOSIS.json``: the sentence, and an exit code to act upon."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rlprobe import terminal
from rlprobe.cli.common import given_path, write_json
from rlprobe.diagnose import diagnosis
from rlprobe.errors import UsageError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "verdict",
        help="print the verdict; exit 0 aligned, 3 diverged, 4 not comparable",
        description="Print the verdict of a diagnosis in one sentence. Exit code 0: aligned; "
        "3: diverged; 4: not comparable; 1: the file is no diagnosis.",
    )
    parser.add_argument(
        "diagnosis",
        type=given_path,
        metavar="DIAGNOSIS.json",
        help="the file, or the directory it is in: results of an alignment, or of "
        "`rlprobe compare -o`, after `rlprobe diagnose`",
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="a few lines: the verdict, what parts first, why, and what to do next",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.diagnosis.exists():
        raise UsageError(
            f"{args.diagnosis} does not exist (looked in {Path.cwd()}); give the results of an "
            "alignment (results/NAME), or the diagnosis.json in them"
        )
    path = args.diagnosis / diagnosis.NAME if args.diagnosis.is_dir() else args.diagnosis
    if path.name != diagnosis.NAME:
        found = diagnosis.read(path)
    elif path.parent.name == diagnosis.REFINED:
        found = diagnosis.current(path.parent.parent, f"{diagnosis.REFINED}/{diagnosis.NAME}")
    else:
        found = diagnosis.answer(path.parent)
    if args.json is not None:
        write_json(args.json, {"verdict": found.verdict, "sentence": found.sentence})
    if args.summary:
        return _summary(path.parent, found)
    # One line: names in it come from dumps, which may hold anything.
    print("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in found.sentence))
    return diagnosis.EXIT_CODES[found.verdict]


def _summary(directory: Path, found: diagnosis.Diagnosis) -> int:
    from rlprobe.report import summary

    for line in summary.lines(directory, found, terminal.Paint(sys.stdout)):
        terminal.painted(f"{line}\n", sys.stdout)
    return diagnosis.EXIT_CODES[found.verdict]
