"""``rlprobe refine``: tensors for the suspects of a diagnosis, and what they say."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from rlprobe.cli.common import write_json

_log = logging.getLogger(__name__)
PARTS = ("suspects", "benchmark", "target", "verdict")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "refine",
        help="tensors for the suspects only, and a sharper verdict",
        description="Where a diagnosis says that the target parts in a module, replay the step on "
        "both devices once more, keep the tensors of the suspect modules and micro-batches only, "
        "and say what they show. Writes RESULTS/NAME/refine/: suspects.json, refined.json and "
        "diagnosis.json, the sharper one. Where nothing is suspect it says so and runs nothing.",
    )
    parser.add_argument("--config", type=Path, required=True, help="the alignment's YAML file")
    parser.add_argument(
        "--budget-mib",
        type=int,
        default=1024,
        metavar="N",
        help="tensors that each process of each run may write (default %(default)s MiB)",
    )
    parser.add_argument(
        "--part",
        choices=PARTS,
        help="one part only: the suspects, the run on either device, or the verdict",
    )
    parser.add_argument("--log", type=Path, help="the framework's output (default: in the store)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlprobe.diagnose.diagnosis import NAME
    from rlprobe.diagnose.run import diagnose
    from rlprobe.errors import UsageError
    from rlprobe.refine import refined, suspects
    from rlprobe.roles import REPEAT, TARGET
    from rlprobe.runs.jobs import Jobs
    from rlprobe.runs.launch import launch
    from rlprobe.runs.suspects import refining
    from rlprobe.store.alignments import record_alignment
    from rlprobe.store.read import Run

    if args.budget_mib < 1:
        raise UsageError(f"--budget-mib is at least 1, found {args.budget_mib}")
    parts = PARTS if args.part is None else (args.part,)
    jobs = Jobs.load(args.config)
    directory, store = Path(jobs.results), Path(jobs.alignment.store)
    if "suspects" in parts:
        suspects.write(directory, suspects.find(directory, args.budget_mib))
    plan = suspects.read(directory)
    if plan.suspects is None:
        _log.info("%s", plan.reason)
        if args.json:
            write_json(args.json, {"refined": None, "reason": plan.reason})
        return 0
    runs = refining(jobs.alignment, plan.suspects)
    # before the runs are made, so that no clean-up takes them for garbage
    keys = [spec.key for spec in runs.values()]
    record_alignment(store, f"{jobs.alignment.name}.refine", keys)
    for part, role in (("benchmark", REPEAT), ("target", TARGET)):
        if part in parts:
            launch(runs[role], store, args.log)
    if "verdict" not in parts:
        return 0
    sides = [Run.open(store, key) for key in keys]
    found = refined.refine(plan, plan.suspects, *sides)
    refined.write(directory, found)
    sharper = refined.sharpened(directory, diagnose(directory)).as_dict()
    write_json(directory / "refine" / NAME, sharper)
    if args.json:
        write_json(args.json, {"refined": sharper["cause"], "reason": ""})
    print(json.dumps(sharper["cause"], indent=1))
    return 0
