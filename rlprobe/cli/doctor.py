"""``rlprobe doctor``: everything an alignment needs, looked at before anything is queued."""

from __future__ import annotations

import argparse
from typing import Any

from rlprobe.cli.common import given_path, write_json


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check an alignment's storage, partitions, devices and images",
        description="Look at everything an alignment needs, one line an item, with what to do "
        "where something is wrong. Exits 1 when an item fails.",
    )
    parser.add_argument(
        "--config", type=given_path, required=True, help="the alignment's YAML file"
    )
    parser.add_argument(
        "--on-cluster",
        action="store_true",
        help="also start a short job on each partition and look from its nodes",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="start nothing on this machine: without it, a side that names no partition is entered "
        "here, and imports its packages, makes a tensor, a product and a collective",
    )
    parser.add_argument(
        "--side",
        choices=("benchmark", "target"),
        help="look at this side alone: the other one's runs, and the comparisons, are made at "
        "another site",
    )
    parser.add_argument(
        "--wait",
        type=int,
        default=600,
        metavar="SECONDS",
        help="how long such a job may wait for its nodes (600)",
    )


def run(args: argparse.Namespace) -> int:
    from rlprobe.doctor import examine

    items = []
    for item in examine(
        args.config,
        on_cluster=args.on_cluster,
        wait_s=args.wait,
        tried=not args.quick,
        side=args.side,
    ):
        items.append(item)
        if not args.quiet or item.state in ("warn", "fail"):
            print(item.line(), flush=True)
    failed = sum(item.state == "fail" for item in items)
    if args.json:
        write_json(args.json, {"failed": failed, "items": [item.to_dict() for item in items]})
    return 1 if failed else 0
