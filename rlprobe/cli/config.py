"""``rlprobe config check|plan|results|from-command|schema|reference``: alignment files before
anything runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlprobe.cli.common import given_path, write_json
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.terminal import counted

if TYPE_CHECKING:
    from rlprobe.spec import RunSpec


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
    pair = actions.add_parser(
        "sides", help="name a comparison's directory after its two runs, in place of earlier ones"
    )
    pair.add_argument("file", type=given_path, metavar="RESULTS/compare/PAIR/.of-DIGEST")
    results = actions.add_parser("results", help="print the directory that results go to")
    results.add_argument("file", type=given_path, metavar="FILE")
    made = actions.add_parser(
        "from-command",
        help="write an alignment from a training command, or from the shell script that holds it",
        description="Read a framework's command line, or a shell script, and print the alignment "
        "that trains the same: each option kept, moved or left out with its reason, and everything "
        "that runs set or overrule themselves. A script is read by bash without running any of "
        "its commands.",
    )
    made.add_argument("-o", "--output", type=given_path, metavar="FILE", help="instead of stdout")
    made.add_argument("--name", help="of the alignment (default: the script's)")
    made.add_argument("--framework-version", metavar="V", help="(default: the one installed here)")
    made.add_argument("--benchmark", choices=("cpu", "cuda", "npu"), metavar="DEVICE")
    made.add_argument("--target", choices=("cpu", "cuda", "npu"), metavar="DEVICE")
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENTS] | -- CMD")
    actions.add_parser("schema", help="print the JSON schema of alignment files")
    actions.add_parser("reference", help="print the page that describes every key (Markdown)")


def run(args: argparse.Namespace) -> int:
    if args.action in ("schema", "reference"):
        return _generated(args.action)
    if args.action == "plan":
        return _plan(args.file)
    if args.action == "sides":
        return _sides(args.file)
    if args.action == "results":
        return _results(args.file)
    if args.action == "from-command":
        return _from_command(args)
    return _check(args.file, args.json)


def _generated(what: str) -> int:
    from rlprobe.config import reference_text, schema_text

    print(schema_text() if what == "schema" else reference_text(), end="")
    return 0


def _plan(path: Path) -> int:
    from rlprobe.documents import seal
    from rlprobe.runs.jobs import Jobs

    jobs = Jobs.load(path)
    results = Path(jobs.results)
    write_json(Path(jobs.plan_file), seal.sealed(jobs.described()))
    # an older mark no longer tells what the results are of
    for older in results.glob(".plan-*"):
        older.unlink()
    Path(jobs.plan_mark).touch()
    return 0


def _sides(mark: Path) -> int:
    """An empty file named by the digest of both runs' keys: other runs are another file."""
    from rlprobe.errors import UsageError

    if not re.fullmatch(r"\.of-[0-9a-f]{16}", mark.name):
        raise UsageError(
            f"{mark} names no two runs; accepted: …/.of-DIGEST, as the workflow has it"
        )
    mark.parent.mkdir(parents=True, exist_ok=True)
    for older in mark.parent.glob(".of-*"):
        older.unlink()
    mark.touch()
    return 0


def _results(path: Path) -> int:
    from rlprobe.config import load

    alignment = load(path)
    print(f"{alignment.results}/{alignment.name}")
    return 0


def _from_command(args: argparse.Namespace) -> int:
    from rlprobe.errors import UsageError
    from rlprobe.files import replace_text
    from rlprobe.runs.scripts import read

    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise UsageError("no command given; write: rlprobe config from-command SCRIPT, or -- CMD…")
    if args.output is not None and args.output.exists():
        raise UsageError(f"{args.output} is there already; remove it, or give another --output")
    draft = read.draft_of(
        words,
        name=args.name,
        version=args.framework_version,
        benchmark=args.benchmark,
        target=args.target,
    )
    if args.output is None:
        print(draft.text, end="")
    else:
        replace_text(args.output, draft.text)
        print(
            f"{args.output}: {counted(len(draft.moved), 'option')} became keys, "
            f"{len(draft.dropped)} left out, {len(draft.overruled)} overruled, "
            f"{len(draft.added)} set by runs; each is named at the file's head"
        )
        for note in draft.notes:
            print(f"note: {note}")
    if args.json:
        write_json(
            args.json,
            {
                "alignment": draft.raw,
                "moved": draft.moved,
                "left_out": draft.dropped,
                "overruled": {k: list(v) for k, v in draft.overruled.items()},
                "added": list(draft.added),
                "notes": list(draft.notes),
            },
        )
    return 0


def _check(path: Path, output: Path | None) -> int:
    from rlprobe import frameworks
    from rlprobe.frameworks.layout import comparable
    from rlprobe.runs import identity, states
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
        recorded = ", ".join(spec.stages) or "the trainer's metrics alone"
        print(f"{role:<15} {spec.key[:12]}  {spec.device} {spec.precision}  {recorded}")
    benchmark = jobs.runs[BENCHMARK]
    store = Path(jobs.alignment.store)
    if benchmark.imported is not None and Path(jobs.manifest(BENCHMARK)).is_file():
        states.require(jobs.runs[TARGET], store, whole=False)
        for sentence in _imported(benchmark, store):
            print(f"note: {sentence}")
    for sentence in jobs.missing_imports():
        print(f"note: {sentence}; {jobs.how_to_import}")
    if benchmark.imported is None:
        unrecorded = frameworks.get(jobs.alignment.framework).inference_not_recorded(benchmark)
        if unrecorded is not None:
            print(f"note: {unrecorded}")
    for sentence in identity.analysis_not_here(jobs.alignment):
        print(f"note: {sentence}")
    for sentence in _overruled(jobs.runs):
        print(f"note: {sentence}")
    sides = [jobs.runs[role] for role in (BENCHMARK, TARGET)]
    coordinates = all(bool(side.capture.coordinate_sketch) for side in sides)
    for sentence in comparable(jobs.layout(BENCHMARK), jobs.layout(TARGET), coordinates):
        print(f"note: {sentence}")
    versions = [jobs.runs[role].framework_version for role in (BENCHMARK, TARGET)]
    if versions[0] != versions[1]:
        print(
            f"note: {jobs.alignment.framework} {versions[0]} against {versions[1]}: what the "
            "framework changed in between is found as if the device had done it"
        )
    return 0


def _imported(benchmark: RunSpec, store: Path) -> list[str]:
    """Where an imported benchmark is not of the framework and version that the file says."""
    from rlprobe.store.read import Run

    declared = Run.open(store, benchmark.key).manifest.declared
    name = str(declared.get("framework") or benchmark.framework)
    version = str(declared.get("framework_version") or benchmark.framework_version)
    if name != benchmark.framework:
        return [
            f"benchmark.run {benchmark.key[:12]} is of {name} {version}, this alignment of "
            f"{benchmark.framework}: the gate says which stages and settings mean the same in both"
        ]
    if version != benchmark.framework_version:
        return [
            f"benchmark.run {benchmark.key[:12]} is of {name} {version}, and framework_version "
            f"says {benchmark.framework_version}: give benchmark.framework_version {version}"
        ]
    return []


def _overruled(runs: Mapping[str, RunSpec]) -> list[str]:
    """Overrides that a run does not take, because it sets the key itself."""
    from rlprobe import frameworks

    places = frameworks.RunDirectories(scratch=Path("SCRATCH"), assets=Path("ASSETS"))
    found: dict[str, None] = {}
    for spec in runs.values():
        if spec.imported is not None:
            continue
        framework = frameworks.get(spec.framework)
        used = framework.options(framework.command(spec, places))
        for option, value in framework.options(spec.overrides).items():
            own = used.get(option, value)
            if own != value and spec.replay_of is None:
                found[f"overrides: {option}={value} is overruled: rlprobe sets it to {own}"] = None
    return list(found)
