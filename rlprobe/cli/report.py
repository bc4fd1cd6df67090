"""``rlprobe report RESULTS_DIR``: the page, in HTML, Markdown or JSON; or one page about many."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from rlprobe.cli.common import given_path, require_results, write_json
from rlprobe.errors import UsageError

_log = logging.getLogger(__name__)


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
        type=given_path,
        metavar="RESULTS_DIR",
        nargs="+",
        help="results of an alignment, with diagnosis.json, or of `rlprobe compare -o`, which are "
        "judged first where they are not; with --index as many as there are",
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
        type=given_path,
        metavar="FILE",
        help="where --index writes its page (default: overview.html in the directory that holds "
        "all RESULTS_DIR)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    wrong: list[str] = []
    if args.index:
        from rlprobe.report import overview

        _some_have_pages(args.results)
        path = args.output or _above(args.results) / overview.NAME
        wrong = overview.write(args.results, path)
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
    for sentence in wrong:
        _log.error("%s", sentence)
    return 1 if wrong else 0


def _above(directories: list[Path]) -> Path:
    """The directory that holds all of these.

    Raises:
        UsageError: only the root of the file system does.
    """
    parents = [directory.resolve().parent for directory in directories]
    found = Path(os.path.commonpath(parents))
    if found == Path(found.root):
        raise UsageError("these results have no directory in common; say where with -o FILE")
    return found


def _some_have_pages(directories: list[Path]) -> None:
    """Name what an overview would leave out: what is not there is a mistake, a page may be to come.

    Raises:
        UsageError: a directory does not exist; nothing was written.
    """
    from rlprobe.report import history

    missing = [str(d) for d in directories if not d.is_dir()]
    if missing:
        raise UsageError(
            f"no such directory: {', '.join(missing)}; an overview of the others was not written"
        )
    for directory in directories:
        if not history.pages(directory) and not any(directory.glob("*/report.html")):
            _log.warning("%s has no page and is left out; `rlprobe report` writes one", directory)


def _one(results: Path, form: str, *, texts: bool) -> Path:
    require_results(results)
    _judged(results)
    if form == "html":
        from rlprobe.report import page

        return page.write(results, texts=texts)
    from rlprobe.diagnose import diagnosis
    from rlprobe.report import plain

    found = diagnosis.answer(results)
    path = results / f"report.{form}"
    if form == "md":
        plain.write(path, found)
    else:
        write_json(path, found.as_dict())
    return path


def _judged(results: Path) -> None:
    """Judge two sides of which no diagnosis is there yet: a page of them needs nothing else.

    An alignment's diagnosis is its workflow's.
    """
    from rlprobe.diagnose import diagnosis
    from rlprobe.dumps.results import SIDES

    if not (results / SIDES).is_file() or (results / diagnosis.NAME).exists():
        return
    from rlprobe.cli.diagnose import written

    _log.info("%s has no %s yet; it is made first", results, diagnosis.NAME)
    _log.info("%s", written(results).sentence)
