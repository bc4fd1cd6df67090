"""``rlprobe official-key-data BENCHMARK TARGET -o OUT``: msprobe's own tables of key data."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from rlprobe import disk
from rlprobe.cli.common import given_path, write_json
from rlprobe.compare import outdir, sides
from rlprobe.compare.msprobe import single
from rlprobe.errors import NotComparableError

_log = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "official-key-data",
        help="write msprobe's own tables of key data",
        description="Run msprobe's SingleComparator on the key data of both sides and keep its "
        "workbooks as OUT/official_key_data/{name}.xlsx. It pairs arrays by step, rank and "
        "micro-step; `rlprobe compare` joins them by sample.",
    )
    parser.add_argument("benchmark", metavar="BENCHMARK", help="as for compare")
    parser.add_argument("target", metavar="TARGET", help="as for compare")
    parser.add_argument("-o", "--out", type=given_path, required=True, metavar="OUT")
    parser.add_argument("--store", type=given_path, help="where run keys are looked up")
    parser.add_argument(
        "--steps",
        choices=("first", "all"),
        default="first",
        help="the first step that both sides have (default), or every one",
    )
    parser.add_argument(
        "--no-fail",
        action="store_true",
        help="exit 0 even where nothing could be compared; the log says why",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    benchmark, target = sides.both(args.benchmark, args.target, args.store)
    outdir.require_apart(args.out, (benchmark.path, target.path))
    try:
        with disk.writing(args.out):
            results = single.write(benchmark, target, args.out, every_step=args.steps == "all")
        if not any(result["written"] for result in results):
            raise NotComparableError("msprobe compared no key data: the workbooks say why")
    except NotComparableError as error:
        if not args.no_fail:
            raise
        (args.out / single.DIRECTORY).mkdir(parents=True, exist_ok=True)
        _log.warning("%s", error)
        results = []
    if args.json is not None:
        write_json(args.json, results)
    return 0
