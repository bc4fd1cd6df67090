"""``rlprobe config check FILE`` and ``rlprobe config schema``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlprobe.cli.common import write_json


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="check an alignment file, or print its schema")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check", help="validate an alignment file and list the runs it needs, with their keys"
    )
    check.add_argument("file", type=Path, metavar="FILE")
    actions.add_parser("schema", help="print the JSON schema of alignment files")


def run(args: argparse.Namespace) -> int:
    return _schema() if args.action == "schema" else _check(args.file, args.json)


def _schema() -> int:
    from rlprobe.config import schema_text

    print(schema_text(), end="")
    return 0


def _check(path: Path, output: Path | None) -> int:
    from rlprobe.config import load
    from rlprobe.runs.plan import pairs, plan

    alignment = load(path)
    runs = plan(alignment)
    if output is not None:
        write_json(
            output,
            {
                "name": alignment.name,
                "runs": {
                    role: {"key": spec.key, "stages": spec.stages, "declared": spec.declared()}
                    for role, spec in runs.items()
                },
                "pairs": {name: list(sides) for name, sides in pairs(runs).items()},
            },
        )
    print(f"{alignment.name}: {len(runs)} runs, {len(pairs(runs))} comparisons")
    for role, spec in runs.items():
        print(
            f"{role:<15} {spec.key[:16]}  {spec.device} {spec.precision}  {', '.join(spec.stages)}"
        )
    return 0
