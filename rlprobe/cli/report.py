"""``rlprobe report RESULTS_DIR``: the page, in HTML, Markdown or JSON; or one page about many."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlprobe.cli.common import write_json
from rlprobe.errors import UsageError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write the page",
        description="Write RESULTS_DIR/report.html: one file that opens from disk without a "
        "network, on a phone and on paper. A page of other runs that is there already is kept in "
        "RESULTS_DIR/history.",
    )
    parser.add_argument(
        "results",
        type=Path,
        metavar="RESULTS_DIR",
        nargs="+",
        help="results of an alignment, with diagnosis.json; with --index as many as there are",
    )
    parser.add_argument(
        "--format",
        choices=("html", "md", "json"),
        default="html",
        help="md and json write report.md and report.json: the verdict without its page",
    )
    parser.add_argument(
        "--no-text", action="store_true", help="leave prompts and responses out of the page"
    )
    parser.add_argument(
        "--index",
        action="store_true",
        help="write one page about all of RESULTS_DIR…, which have pages already",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where --index writes its page (default: overview.html here)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.index:
        from rlprobe.report import overview

        path = overview.write(args.results, args.output or Path(overview.NAME))
    elif len(args.results) != 1:
        raise UsageError(
            f"found {len(args.results)} results directories; give one, or --index for a page about "
            "all of them"
        )
    elif args.output is not None:
        raise UsageError("-o goes with --index; a page is written into its results directory")
    else:
        path = _one(args.results[0], args.format, texts=not args.no_text)
    if args.json is not None:
        write_json(args.json, {"page": str(path), "bytes": path.stat().st_size})
    print(path)
    return 0


def _one(results: Path, form: str, *, texts: bool) -> Path:
    if form == "html":
        from rlprobe.report import page

        return page.write(results, texts=texts)
    from rlprobe.diagnose import diagnosis
    from rlprobe.report import plain

    found = diagnosis.read(results / diagnosis.NAME)
    path = results / f"report.{form}"
    if form == "md":
        plain.write(path, found)
    else:
        write_json(path, found.as_dict())
    return path
