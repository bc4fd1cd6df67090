"""``rlprobe reproduce``: a folder that shows a divergence with plain torch alone."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from rlprobe.cli.common import given_path, require_results, write_json

_log = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "reproduce",
        help="a folder for the kernel team: tensors, operators and a script of plain torch",
        description="Of a divergence in a module that was refined, write a folder with what both "
        "sides were given and made (safetensors), the operators that ran, and reproduce.py, which "
        "needs torch only: it runs them on --device cpu, cuda or npu and in fp64, and exits 3 "
        "while the target's differ.",
    )
    parser.add_argument("results", type=given_path, metavar="RESULTS_DIR")
    parser.add_argument(
        "-o", "--out", type=given_path, required=True, metavar="DIR", help="folder, not there yet"
    )
    parser.add_argument(
        "--no-data",
        action="store_true",
        help="leave tensors out: random numbers of their shapes and norms stand in",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlprobe.refine.reproduce import reproduce

    require_results(args.results)
    size = reproduce(args.results, args.out, data=not args.no_data)
    _log.info("%.1f MB written; python %s/reproduce.py --device cpu", size / 1e6, args.out)
    if args.json:
        write_json(args.json, {"directory": str(args.out), "bytes": size})
    print(args.out)
    return 0
