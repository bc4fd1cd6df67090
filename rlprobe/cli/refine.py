"""``rlprobe refine``: tensors for the suspects of a diagnosis, and what they say."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlprobe.cli.common import given_path, write_json
from rlprobe.files import replace_text

if TYPE_CHECKING:
    from rlprobe.refine.suspects import Plan
    from rlprobe.runs.jobs import Jobs

_log = logging.getLogger(__name__)
PARTS = ("suspects", "benchmark", "target", "substituted", "verdict")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "refine",
        help="tensors for the suspects only, and a sharper verdict",
        description="Where a diagnosis says that the target parts in a module, replay the step on "
        "both devices once more, keep tensors and operators of the suspects only, and say what "
        "they show. Writes RESULTS/NAME/refine/: suspects.json, refined.json and "
        "diagnosis.json, the sharper one. Where nothing is suspect it says so and runs nothing.",
    )
    parser.add_argument(
        "--config", type=given_path, required=True, help="the alignment's YAML file"
    )
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
        help="one part only: the suspects, the run on either device, the target's with the "
        "benchmark's outputs in the suspect's place, or the verdict",
    )
    parser.add_argument(
        "--suspects",
        metavar="TEXT",
        help="at the site of a benchmark that another site imported: make its half of the "
        "refinement; TEXT is in the command that the other site's page gives",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=given_path,
        metavar="FILE",
        help="with --suspects: the bundle that is brought back and imported there",
    )
    parser.add_argument(
        "--log", type=given_path, help="the framework's output (default: in the store)"
    )
    parser.add_argument(
        "--no-fail",
        action="store_true",
        help="where a part fails, say so in refine/diagnosis.json and exit 0: the verdict stands "
        "without it",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlprobe.errors import RlprobeError, UsageError
    from rlprobe.runs.jobs import Jobs

    if args.budget_mib < 1:
        raise UsageError(f"--budget-mib is at least 1, found {args.budget_mib}")
    if args.output is not None and args.suspects is None:
        raise UsageError("-o is the bundle of --suspects, which is not given")
    jobs = Jobs.load(args.config)
    if args.suspects is not None:
        return _half(args, jobs)
    try:
        return _run(args, jobs)
    except RlprobeError as error:
        if not args.no_fail:
            raise
        _log.error("%s", error)
        _fail(Path(jobs.results), args.part or "refine", str(error))
        return 0


def _fail(directory: Path, part: str, said: str) -> None:
    """Remember what failed, for the verdict's evidence."""
    path = directory / "refine" / f"failed-{part}.txt"
    replace_text(path, said)
    if part in ("verdict", "refine", "suspects"):
        _stand(directory)


def _stand(directory: Path) -> None:
    """The diagnosis as it is, with what kept it from being refined."""
    from rlprobe.diagnose import diagnosis
    from rlprobe.refine.decide import unrefined

    said = [
        f"{path.stem.removeprefix('failed-')}: {path.read_text(encoding='utf-8').strip()}"
        for path in sorted((directory / "refine").glob("failed-*.txt"))
    ]
    found = unrefined(diagnosis.current(directory), said)
    write_json(directory / diagnosis.REFINED / diagnosis.NAME, found.as_dict())


def _run(args: argparse.Namespace, jobs: Jobs) -> int:
    from rlprobe.diagnose import diagnosis
    from rlprobe.refine import decide, refined, suspects
    from rlprobe.roles import REPEAT, TARGET
    from rlprobe.runs.launch import launch
    from rlprobe.runs.suspects import SIDES, refining
    from rlprobe.store.alignments import keeping
    from rlprobe.store.read import Run

    parts = PARTS if args.part is None else (args.part,)
    directory, store = Path(jobs.results), Path(jobs.alignment.store)
    if "suspects" in parts:
        for path in (directory / "refine").glob("failed-*.txt"):
            path.unlink()
        found_out = suspects.find(directory, args.budget_mib)
        if jobs.alignment.benchmark.run is not None:
            found_out = suspects.shared(found_out, args.config, directory, store)
        suspects.write(directory, found_out)
    plan = suspects.read(directory)
    if plan.suspects is None:
        _log.info("%s", plan.reason)
        if args.json:
            write_json(args.json, {"refined": None, "reason": plan.reason})
        return 0
    runs = refining(jobs.alignment, plan.suspects)
    away = None if REPEAT in runs else suspects.kept_elsewhere(store, plan)
    keys = [*([] if away is None else [away.key]), *(spec.key for spec in runs.values())]
    if {"benchmark", "target"}.intersection(parts):
        # no clean-up takes what is made here for garbage; later parts add theirs
        with keeping(store, f"{jobs.alignment.name}.refine", keys):
            for part, role in (("benchmark", REPEAT), ("target", TARGET)):
                if part in parts and role in runs:
                    launch(runs[role], store, args.log)
    if len(keys) < len(SIDES):
        return _await(args, directory, plan)
    if "substituted" in parts:
        _substitute(args, jobs, plan, keys)
    if "verdict" not in parts:
        return 0
    sides = [Run.open(store, key) for key in keys]
    found = refined.refine(plan, plan.suspects, *sides)
    refined.write(directory, found)
    before = diagnosis.current(directory)
    sharper = decide.sharpened(directory, before)
    write_json(directory / diagnosis.REFINED / diagnosis.NAME, sharper.as_dict())
    cause = sharper.as_dict()["cause"]
    if args.json:
        write_json(args.json, {"refined": cause, "reason": ""})
    _log.info("%s", sharper.sentence)
    print(json.dumps(cause, indent=1))
    return 0


def _await(args: argparse.Namespace, directory: Path, plan: Plan) -> int:
    """The benchmark's half is not here: the diagnosis stands, with what is to be done."""
    from rlprobe.diagnose import diagnosis
    from rlprobe.refine.decide import awaited

    assert plan.suspects is not None
    where = plan.suspects.trace_module or f"the {plan.suspects.trace}"
    _log.info(
        "%s parts at %s. The target's half of the refinement is here; at the site of the benchmark "
        "run\n%s\nand then here\n%s",
        plan.suspects.stage, where, plan.elsewhere, plan.afterwards,
    )  # fmt: skip
    if args.part in (None, "verdict"):
        found = awaited(diagnosis.read(directory / diagnosis.NAME), plan)
        write_json(directory / diagnosis.REFINED / diagnosis.NAME, found.as_dict())
    if args.json:
        write_json(args.json, {"refined": None, "reason": f"at the other site: {plan.elsewhere}"})
    return 0


def _half(args: argparse.Namespace, jobs: Jobs) -> int:
    """The benchmark's half of another site's refinement, in a bundle."""
    from rlprobe.errors import UsageError
    from rlprobe.refine import suspects
    from rlprobe.runs.launch import launch
    from rlprobe.runs.suspects import half
    from rlprobe.store.alignments import keeping
    from rlprobe.store.exporting import export

    if args.output is None or args.part is not None:
        raise UsageError("--suspects wants -o FILE, the bundle to bring back, and no --part")
    wanted = suspects.half(args.suspects)
    store = Path(jobs.alignment.store)
    spec = half(jobs.alignment, wanted.suspects, wanted.benchmark)
    with keeping(store, f"{jobs.alignment.name}.half", [spec.key]):
        launch(spec, store, args.log)
    made = export(store, [spec.key], args.output)
    _log.info(
        "%s (%d MiB, sha256 %s): bring it back and import it there",
        made.path, made.size >> 20, made.sha256,
    )  # fmt: skip
    return 0


def _substitute(args: argparse.Namespace, jobs: Jobs, plan: Plan, keys: list[str]) -> None:
    """Run the target with the benchmark's outputs of the suspect in place of its own."""
    from rlprobe.refine import substitution
    from rlprobe.runs.launch import launch
    from rlprobe.runs.suspects import substituted
    from rlprobe.store.alignments import keeping
    from rlprobe.store.read import Run

    assert plan.suspects is not None
    spec = substituted(jobs.alignment, plan.suspects, keys[0])
    directory, store = Path(jobs.results), Path(jobs.alignment.store)
    (directory / "refine" / substitution.NAME).unlink(missing_ok=True)
    if spec is None:
        _log.info("nothing is put in place: no module is suspect, or several processes share it")
        return
    with keeping(store, f"{jobs.alignment.name}.refine", [*keys, spec.key]):
        launch(spec, store, args.log)
    found = substitution.look(directory, plan, plan.suspects, Run.open(store, spec.key))
    substitution.write_found(directory, found)
    _log.info("%s", found.said)
    _force(args, jobs, plan, [*keys, spec.key])


def _force(args: argparse.Namespace, jobs: Jobs, plan: Plan, keys: list[str]) -> None:
    """Where the cause stays open: the target with every block given the benchmark's numbers."""
    from rlprobe.refine import decide, refined, region, suspects
    from rlprobe.runs.launch import launch
    from rlprobe.runs.suspects import forced
    from rlprobe.store.alignments import keeping
    from rlprobe.store.read import Run

    assert plan.suspects is not None
    directory, store = Path(jobs.results), Path(jobs.alignment.store)
    (directory / "refine" / region.NAME).unlink(missing_ok=True)
    sides = [Run.open(store, key) for key in keys[:2]]
    if not decide.is_open(directory, plan, refined.refine(plan, plan.suspects, *sides)):
        return
    spec = forced(jobs.alignment, plan.suspects, keys[0])
    if spec is None:
        return
    with keeping(store, f"{jobs.alignment.name}.refine", [*keys, spec.key]):
        launch(spec, store, args.log)
    rows = suspects.rows(directory, plan.suspects)
    found = region.look(Run.open(store, spec.key), plan.suspects, rows)
    region.write(directory, found)
    _log.info("%s", found.said)
