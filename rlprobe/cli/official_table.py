"""``rlprobe official-table BENCHMARK TARGET -o OUT``: msprobe's own tables, written by msprobe."""

from __future__ import annotations

import argparse
from typing import Any

from rlprobe import disk
from rlprobe.cli.common import given_path, given_stage, write_json
from rlprobe.compare import outdir, planner, sides
from rlprobe.compare.msprobe import official
from rlprobe.compare.planner import StagePlan
from rlprobe.errors import NotComparableError, UsageError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "official-table",
        help="write msprobe's own comparison table (needs torch)",
        description="Run `msprobe compare` on every stage and keep its CSV and XLSX as "
        "OUT/{stage}/official.csv and .xlsx; with --graph its graph view too, official.vis.db.",
    )
    parser.add_argument("benchmark", metavar="BENCHMARK", nargs="?", help="as for compare")
    parser.add_argument("target", metavar="TARGET", nargs="?", help="as for compare")
    parser.add_argument(
        "--train-infer",
        metavar="RUN",
        help="instead of two sides: msprobe's --consistent_check of one run's log-prob and "
        "generate stages",
    )
    parser.add_argument("--engine-dump", metavar="DIR", help="as for compare --train-infer")
    parser.add_argument("-o", "--out", type=given_path, required=True, metavar="OUT")
    parser.add_argument(
        "--stage",
        type=given_stage,
        action="append",
        default=[],
        help="only this stage (repeatable)",
    )
    parser.add_argument("--store", type=given_path, help="where run keys are looked up")
    parser.add_argument(
        "--steps",
        choices=("first", "all"),
        default="first",
        help="the first captured step (default), or every one",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="msprobe's graph view as well (OUT/{stage}/official.vis.db, for its TensorBoard "
        "plug-in)",
    )
    parser.add_argument(
        "--no-fail",
        action="store_true",
        help="exit 0 even where msprobe wrote no table; the file in its place says why",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    # msprobe and its libraries write too
    with disk.writing(args.out):
        results = official.write(plan, args.out, every_step=args.steps == "all", graph=args.graph)
    if args.json is not None:
        write_json(args.json, results)
    if not args.no_fail and not any(result["written"] for result in results):
        reasons = {result["message"] for result in results} or {"no stage is on both sides"}
        raise NotComparableError(f"msprobe wrote no table: {'; '.join(sorted(reasons))}")
    return 0


def _plan(args: argparse.Namespace) -> list[StagePlan]:
    if args.train_infer is None:
        if args.benchmark is None or args.target is None or args.engine_dump is not None:
            raise UsageError("give BENCHMARK and TARGET, or --train-infer RUN [--engine-dump DIR]")
        benchmark, target = sides.both(args.benchmark, args.target, args.store)
        outdir.require_apart(args.out, (benchmark.path, target.path))
        return planner.plan(benchmark, target, args.stage)
    if args.benchmark is not None:
        raise UsageError("--train-infer takes one run, and no BENCHMARK and TARGET")
    run = sides.resolve(args.train_infer, args.store)
    engine = None if args.engine_dump is None else sides.resolve(args.engine_dump, args.store)
    outdir.require_apart(args.out, [side.path for side in (run, engine) if side is not None])
    return official.train_infer_plan(run, engine)
