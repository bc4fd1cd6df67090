"""``rlprobe run``: one role of an alignment, from start to commit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlprobe.cli.common import given_path, write_json
from rlprobe.roles import ROLES, is_role


def _role(text: str) -> str:
    if not is_role(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no role; accepted: {', '.join(ROLES)}, or perturbed1, perturbed2, …"
        )
    return text


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run one role of an alignment and commit it to the store",
        description="Run one role of an alignment: enter its image, start the framework with the "
        "hooks on, wait, check that every expected stage was captured, and commit. A run that the "
        "store holds already is not started again.",
    )
    parser.add_argument(
        "--config", type=given_path, required=True, help="the alignment's YAML file"
    )
    parser.add_argument(
        "--role",
        required=True,
        type=_role,
        metavar="ROLE",
        help=f"{', '.join(ROLES)}, or perturbed1, perturbed2, …",
    )
    parser.add_argument("--store", type=given_path, help="instead of the store the file names")
    parser.add_argument(
        "--force",
        action="store_true",
        help="make the run again, in place of the one that the store holds",
    )
    parser.add_argument(
        "--log", type=given_path, help="the framework's output (default: in the store)"
    )


def run(args: argparse.Namespace) -> int:
    from rlprobe.config import load
    from rlprobe.errors import ConfigError
    from rlprobe.runs.launch import launch, require
    from rlprobe.runs.plan import plan
    from rlprobe.store.alignments import keeping

    alignment = load(args.config)
    runs = plan(alignment)
    if args.role not in runs:
        raise ConfigError(
            f"{args.config} has no run for role {args.role}; it has: {', '.join(runs)} "
            "(controls are switched on in its controls section)"
        )
    spec = runs[args.role]
    store = args.store or Path(alignment.store)
    require(spec, store, force=args.force)
    # no clean-up takes what is made here for garbage
    with keeping(store, alignment.name, [other.key for other in runs.values()]):
        manifest = launch(spec, store, args.log, force=args.force)
    if args.json:
        write_json(args.json, {"role": spec.role, "key": spec.key, "manifest": str(manifest)})
    print(spec.key)
    return 0
