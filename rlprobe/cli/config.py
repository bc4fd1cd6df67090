"""``rlprobe config check|plan|results|schema|reference``: alignment files before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlprobe.cli.common import given_path, write_json
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.terminal import counted


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="check an alignment file, or print its schema")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check", help="validate an alignment file and list the runs it needs, with their keys"
    )
    check.add_argument("file", type=given_path, metavar="FILE")
    plan = actions.add_parser(
        "plan", help="write what results will be of: RESULTS/NAME/alignment.json"
    )
    plan.add_argument("file", type=given_path, metavar="FILE")
    results = actions.add_parser("results", help="print the directory that results go to")
    results.add_argument("file", type=given_path, metavar="FILE")
    actions.add_parser("schema", help="print the JSON schema of alignment files")
    actions.add_parser("reference", help="print the page that describes every key (Markdown)")


def run(args: argparse.Namespace) -> int:
    if args.action in ("schema", "reference"):
        return _generated(args.action)
    if args.action == "plan":
        return _plan(args.file)
    if args.action == "results":
        return _results(args.file)
    return _check(args.file, args.json)


def _generated(what: str) -> int:
    from rlprobe.config import reference_text, schema_text

    print(schema_text() if what == "schema" else reference_text(), end="")
    return 0


def _plan(path: Path) -> int:
    from rlprobe.runs.jobs import Jobs

    jobs = Jobs.load(path)
    results = Path(jobs.results)
    write_json(Path(jobs.plan_file), jobs.described())
    # an older mark no longer tells what the results are of
    for older in results.glob(".plan-*"):
        older.unlink()
    Path(jobs.plan_mark).touch()
    return 0


def _results(path: Path) -> int:
    from rlprobe.config import load

    alignment = load(path)
    print(f"{alignment.results}/{alignment.name}")
    return 0


def _check(path: Path, output: Path | None) -> int:
    from rlprobe.frameworks.layout import comparable
    from rlprobe.runs.jobs import Jobs

    jobs = Jobs.load(path)
    if output is not None:
        write_json(output, jobs.described())
    print(
        f"{jobs.alignment.name}: {counted(len(jobs.runs), 'run')}, "
        f"{counted(len(jobs.pairs), 'comparison')}"
    )
    print(f"results: {jobs.results}")
    for role, spec in jobs.runs.items():
        print(
            f"{role:<15} {spec.key[:12]}  {spec.device} {spec.precision}  {', '.join(spec.stages)}"
        )
    for sentence in comparable(jobs.layout(BENCHMARK), jobs.layout(TARGET)):
        print(f"note: {sentence}")
    versions = [jobs.runs[role].framework_version for role in (BENCHMARK, TARGET)]
    if versions[0] != versions[1]:
        print(
            f"note: {jobs.alignment.framework} {versions[0]} against {versions[1]}: what the "
            "framework changed in between is found as if the device had done it"
        )
    return 0
