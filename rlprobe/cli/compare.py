"""``rlprobe compare BENCHMARK TARGET -o OUT``: every difference between two runs or dumps."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rlprobe.cli.common import given_path, given_stage, unfit
from rlprobe.compare import early
from rlprobe.compare.early import COVERAGE
from rlprobe.errors import UsageError
from rlprobe.imports import uncollected

_SIDES = (
    "a run of the store (its directory, or its key with --store), a dump tree, a stage, step, rank "
    "or proc directory, a dump.json or debug.json, a folder of rollouts of verl or slime"
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="measure every difference between two runs or dumps",
        description="Measure every difference between two runs or dumps. Exit code 0: compared, "
        "whatever the differences; 4: nothing, or too little, could be compared.",
    )
    parser.add_argument("benchmark", metavar="BENCHMARK", nargs="?", help=_SIDES)
    parser.add_argument("target", metavar="TARGET", nargs="?", help="likewise")
    parser.add_argument(
        "--train-infer",
        metavar="RUN",
        help="instead of two sides: training's log-prob stage of one run against the inference "
        "engine's prefill (its generate stage), prompt tokens only",
    )
    parser.add_argument(
        "--engine-dump",
        metavar="DIR",
        help="with --train-infer: the engine's dump, where it lies outside the run",
    )
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="OUT",
        help="directory of the results, made where it is missing: OUT/STAGE/records.parquet and "
        "summary.json",
    )
    parser.add_argument(
        "--stage",
        type=given_stage,
        action="append",
        default=[],
        metavar="STAGE",
        help="only this stage (repeatable); names a stage directory that does not say its stage",
    )
    parser.add_argument(
        "--map-step",
        type=_step_pair,
        action="append",
        default=[],
        metavar="A:B",
        help="compare step A of the benchmark with step B of the target (repeatable); one alone "
        "moves the other steps by the same distance, as after a resumed run",
    )
    parser.add_argument("--store", type=given_path, help="where run keys are looked up")
    parser.add_argument("--pair", default="target", help="what the results call this pair")
    parser.add_argument(
        "--coverage",
        type=float,
        default=COVERAGE,
        help="share of both sides' records that must have been compared (default %(default)s)",
    )
    parser.add_argument(
        "--no-fail", action="store_true", help="exit 0 even if too little was compared"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="threads that read tensors (default: the CPUs allowed, %(default)s)",
    )
    parser.add_argument(
        "--check-crc",
        action="store_true",
        help="check the CRC-32 of tensor files (slower than comparing them)",
    )
    parser.add_argument(
        "--rules",
        type=given_path,
        metavar="FILE",
        help="matching rules of your own (YAML), before the packaged ones; or one of msprobe's "
        "data, cell, layer or api mapping files",
    )
    parser.add_argument(
        "--noise",
        action="store_true",
        help="also fill in the round-off bound of every record (diagnose does it in any case)",
    )
    parser.add_argument(
        "--table",
        nargs="?",
        choices=("csv", "xlsx", "both"),
        const="csv",
        help="also write OUT/STAGE/table.csv, table.xlsx (Excel) or both, with the columns of "
        "msprobe compare (default of the option: csv)",
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="show who made the calls that are listed, on both sides (from stack.json)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.coverage <= 1:
        raise UsageError(f"--coverage is a share from 0 to 1, found {args.coverage}")
    for what, given in (
        ("BENCHMARK", args.benchmark),
        ("TARGET", args.target),
        ("--train-infer", args.train_infer),
        ("--engine-dump", args.engine_dump),
    ):
        if given is not None and not given.strip():
            raise UsageError(f"{what} is an empty path; was a shell variable not set?")
    if (problem := unfit(args.out)) is not None:
        raise UsageError(f"-o is {problem}")
    args.out = Path(args.out)
    if args.jobs < 1:
        raise UsageError(f"--jobs is at least 1, found {args.jobs}")
    early.prepare()
    with early.begun(filter(None, (args.benchmark, args.target)), args.jobs) as beside:
        # Imported here: what was begun goes on meanwhile.
        with uncollected():
            from rlprobe.cli import comparing

        return comparing.run(args, beside)


def _step_pair(text: str) -> tuple[int, int]:
    benchmark, colon, target = text.partition(":")
    if not (colon and benchmark.isdecimal() and target.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected two step numbers such as 0:10, found {text!r}")
    return int(benchmark), int(target)
