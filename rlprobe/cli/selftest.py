"""``rlprobe selftest``: planted faults and benign changes through the real pipeline, scored."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlprobe.cli.common import given_path, write_json

if TYPE_CHECKING:
    from rlprobe.selftest.catalogue import Case

_log = logging.getLogger("rlprobe")
_PASSES = ("refined", "weakened", "tensors", "seeds", "blind")
#: Further benign runs of the full self-test: no alarm in as many bounds the rate by 4.9 %.
_SEEDS = 60
#: Disturbances of each alignment in pass blind.
_DISTURBED = 600


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "selftest",
        help="plant faults and benign changes, run the pipeline on each, print the score",
        description="Plant faults and benign changes into a tiny VeRL run on this CPU, run the "
        "real pipeline on each (run, commit, compare, diagnose) and print what was found. Exit "
        "code 1 when the score falls short: stage right in all, module in 90 %, cause in 80 %, "
        "no false alarm.",
    )
    parser.add_argument(
        "--faults",
        type=given_path,
        action="append",
        metavar="DIR",
        help="a directory of faults instead of the built-in ones (repeatable)",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="only these faults or changes"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few faults at full strength and one benign change, without Ray",
    )
    parser.add_argument(
        "--pass",
        dest="passes",
        action="append",
        choices=_PASSES,
        help="besides the first pass (repeatable): refined (suspects of faults looked at by "
        "tensors and operators), weakened (faults at twice the floor), tensors "
        "(every case again with tensors kept), seeds (benign changes with other rollouts); "
        "default: all of these, with --faults: refined and weakened. blind stands alone: an "
        "aligned run of every kind, of which one recorded quantity at a time is disturbed and "
        "judged again",
    )
    parser.add_argument("--no-passes", action="store_true", help="the first pass only")
    parser.add_argument(
        "--runs",
        type=int,
        default=_SEEDS,
        metavar="N",
        help="further benign runs in pass seeds, spread over the changes (default %(default)s)",
    )
    parser.add_argument(
        "--from-step",
        type=int,
        default=0,
        metavar="N",
        help="plant everything from step N on, in an alignment whose steps each begin from the "
        "benchmark's state (controls.rejoin): it must be found at N and in no step before "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--directory",
        type=given_path,
        default=Path("results/selftest"),
        metavar="DIR",
        help="store and results of the trials; what is there already is not run again "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="cases, or processes that disturb, at once (default %(default)s)",
    )
    parser.add_argument(
        "--no-ray",
        action="store_true",
        help="collect in one process as well; the same computation, sooner",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=_DISTURBED,
        metavar="N",
        help="disturbances of each alignment in pass blind (default %(default)s); each kind of "
        "record, stage, micro-batch, step and rank comes first",
    )
    parser.add_argument(
        "--of",
        type=given_path,
        action="append",
        default=[],
        metavar="RESULTS_DIR",
        help="in pass blind this finished alignment instead of those of the self-test (repeatable)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="in pass blind another sample (default %(default)s)",
    )
    parser.add_argument(
        "--all", action="store_true", help="in pass blind every quantity in every way"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlprobe.errors import UsageError
    from rlprobe.selftest import catalogue, messages, session
    from rlprobe.selftest.results import Scores
    from rlprobe.selftest.scoreboard import render

    for option in ("jobs", "runs"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option} is at least 1, found {getattr(args, option)}")
    if args.from_step < 0:
        raise UsageError(f"--from-step counts from 0, found {args.from_step}")
    cases = catalogue.cases(args.faults or catalogue.OWN, args.only)
    if args.passes and "blind" in args.passes:
        return _blind(args, cases)
    if args.quick and not args.only:
        cases = catalogue.quick(cases)
    options = session.Options(
        directory=args.directory,
        passes=_passes(args),
        ray=not (args.quick or args.no_ray),
        step=args.from_step,
        jobs=args.jobs,
    )
    if not args.verbose:
        messages.briefly()
    began = time.monotonic()
    results = session.run(cases, options)
    scores = Scores.of(results)
    print(render(results, scores, time.monotonic() - began))
    if args.json:
        write_json(args.json, [result.as_dict() for result in results])
    short = scores.shortfalls()
    for line in short:
        _log.warning("falls short: %s", line)
    return 1 if short else 0


def _blind(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    """Aligned alignments, disturbed; exit code 1 where that was silent."""
    from rlprobe.errors import UsageError
    from rlprobe.selftest.blind import run as blind
    from rlprobe.selftest.blind import score

    if args.passes != ["blind"] or args.count < 1:
        raise UsageError("--pass blind stands alone, and --count is at least 1")
    found = {}
    for results in args.of or _aligned(args, cases):
        began = time.monotonic()
        count = None if args.all else args.count
        one = blind.disturbed(results, args.directory / "blind", count, args.seed, args.jobs)
        print(score.render(results.name, one, time.monotonic() - began))
        found[results.name] = one
    if args.json:
        write_json(args.json, {name: one.as_dict() for name, one in found.items()})
    short = score.shortfalls(list(found.values()))
    for line in short:
        _log.warning("falls short: %s", line)
    return 1 if short else 0


def _aligned(args: argparse.Namespace, cases: Sequence[Case]) -> list[Path]:
    """Results of one aligned run of every kind of alignment, made where they are not there."""
    from rlprobe.errors import UsageError
    from rlprobe.selftest import session
    from rlprobe.selftest.blind import run as blind

    options = session.Options(
        directory=args.directory, passes=session.Passes(weakened=False), ray=False, jobs=args.jobs
    )
    found = []
    for result in session.run(blind.one_of_each_kind(cases), options):
        results = args.directory / "results" / result.case.name
        if result.full.verdict != "aligned":
            raise UsageError(f"{results} is {result.full.verdict}: there is nothing to disturb")
        found.append(results)
    return found


def _passes(args: argparse.Namespace) -> Any:
    from rlprobe.selftest.session import Passes

    if args.no_passes or (args.quick and not args.passes):
        return Passes(weakened=False)
    chosen = args.passes or (["refined", "weakened"] if args.faults else list(_PASSES[:-1]))
    return Passes(
        weakened="weakened" in chosen,
        tensors="tensors" in chosen,
        refined="refined" in chosen,
        seeds=args.runs if "seeds" in chosen else 0,
    )
