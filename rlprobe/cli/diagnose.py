"""``rlprobe diagnose RESULTS_DIR``: gate, noise floor, first divergence and cause."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from rlprobe.cli.common import given_path, require_results, write_json
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.run import diagnose
from rlprobe.errors import NotComparableError
from rlprobe.judge import extent, reasons
from rlprobe.judge.extent import Extents
from rlprobe.refine.decide import sharpened

_log = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "diagnose",
        help="gate, noise floor, first divergence and cause, as diagnosis.json",
        description="Judge the comparisons of an alignment and write RESULTS_DIR/diagnosis.json. "
        "Exit code 0: judged, whatever the verdict; 4: the runs cannot be compared.",
    )
    parser.add_argument(
        "results",
        type=given_path,
        metavar="RESULTS_DIR",
        help="results of an alignment (alignment.json and compare/), or of `rlprobe compare -o`",
    )
    parser.add_argument(
        "--no-fail", action="store_true", help="exit 0 even if the runs cannot be compared"
    )
    parser.set_defaults(run=run)


def _say_extent(extents: Extents) -> None:
    """How many records each excuse took, and how many were not judged, by reason."""
    whole = extent.total(extents)
    for said, counts, meanings in (
        ("excused", whole.excused, reasons.EXCUSES),
        ("not judged", whole.unjudged, reasons.UNJUDGED),
    ):
        for reason, count in counts.items():
            _log.info("%s: %s (%s): %s", said, f"{count:,}", reason, meanings[reason])


def written(results: Path) -> diagnosis.Diagnosis:
    """Judge results, and write what was found beside them.

    Raises:
        RlprobeError: they cannot be read or written.
    """
    found = sharpened(results, diagnose(results))
    write_json(results / diagnosis.NAME, found.as_dict())
    return found


def run(args: argparse.Namespace) -> int:
    require_results(args.results)
    found = written(args.results)
    if args.json is not None:
        write_json(args.json, found.as_dict())
    refused = found.verdict == diagnosis.NOT_COMPARABLE and not args.no_fail
    if not refused:
        _log.info("%s", found.sentence)
    _say_extent(found.extent)
    if refused:  # the sentence is the error's then, and said once
        raise NotComparableError(found.sentence)
    return 0
