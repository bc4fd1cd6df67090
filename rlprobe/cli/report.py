"""``rlprobe report RESULTS_DIR``: the page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlprobe.cli.common import write_json
from rlprobe.report import page


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write the page",
        description="Write RESULTS_DIR/report.html: one file that opens from disk without a "
        "network, on a phone and on paper.",
    )
    parser.add_argument(
        "results",
        type=Path,
        metavar="RESULTS_DIR",
        help="results of an alignment, with diagnosis.json",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    path = page.write(args.results)
    if args.json is not None:
        write_json(args.json, {"page": str(path), "bytes": path.stat().st_size})
    print(path)
    return 0
