"""``rlprobe curves``: trainers' metrics judged without an alignment."""

from __future__ import annotations

import argparse
import math
from typing import Any

from rlprobe.cli.common import given_path, write_json
from rlprobe.diagnose import diagnosis

#: Metrics printed that stayed within; those that left are all printed.
_NEAREST = 5


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "curves",
        help="judge a training's metrics against those of others on the benchmark's device",
        description="Judge the metrics of a training on the target, step by step, against a "
        "training on the benchmark's device and at least two more there that differ in nothing "
        "that should matter (other seeds where each generates its own rollouts, disturbed weights "
        "where they replay the same). Each is a run's directory, its metrics.jsonl, or the file "
        "that verl's trainer.logger=[file] writes. Exit code 0: every metric that can be judged "
        "stays within; 3: one leaves; 4: none can be judged.",
    )
    parser.add_argument("benchmark", type=given_path, metavar="BENCHMARK")
    parser.add_argument("target", type=given_path, metavar="TARGET")
    parser.add_argument(
        "--perturbed",
        type=given_path,
        nargs="+",
        required=True,
        metavar="RUN",
        help="further trainings on the benchmark's device, two at least",
    )
    parser.add_argument(
        "--replayed",
        choices=("fp32", "bf16", "fp16"),
        metavar="PRECISION",
        help="all replayed the benchmark's rollouts in this precision (fp32, bf16, fp16): they "
        "part by chaos and not by sampling",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlprobe.dumps import metricsfile
    from rlprobe.errors import NotComparableError, UsageError
    from rlprobe.judge import curves
    from rlprobe.terminal import counted

    if len(args.perturbed) < curves.LEAST:
        raise UsageError(
            f"--perturbed: found {len(args.perturbed)}, wanted {curves.LEAST} runs at least: "
            "one says too little about a spread"
        )
    if len({path.resolve() for path in (args.benchmark, *args.perturbed)}) <= len(args.perturbed):
        raise UsageError("--perturbed: a run is given twice, so the spread would seem smaller")
    tables = [
        curves.computed(metricsfile.read(path))
        for path in (args.benchmark, args.target, *args.perturbed)
    ]
    found = curves.judge(
        tables[0],
        tables[1],
        tables[2:],
        curves.Rounding(),
        curves.SAMPLED if args.replayed is None else curves.of_precision(args.replayed),
    )
    left = sorted(
        (c for c in found if c.verdict == curves.LEFT),
        key=lambda c: (c.step or 0, -curves.ratio(c)),
    )
    within = sorted(
        (c for c in found if c.verdict == curves.WITHIN), key=lambda c: -curves.ratio(c)
    )
    if args.json is not None:
        write_json(args.json, {"curves": [_plain(curve) for curve in found]})
    if not left and not within:
        raise NotComparableError(
            f"no metric could be judged: {counted(len(found), 'metric')}, none of which all runs "
            "have at one step; give trainings of the same configuration"
        )
    for curve in left:
        print(f"left at step {curve.step}: {curve.metric}: {curves.said(curve)}")
    print(
        f"{len(within)} of {counted(len(found), 'metric')} within what "
        f"{counted(len(args.perturbed), 'further run')} show; {len(left)} left, "
        f"{len(found) - len(left) - len(within)} not judged"
    )
    for curve in within[:_NEAREST]:
        print(f"  {curve.metric}: nearest at step {curve.at}, {curves.ratio(curve):.2g} of it")
    return diagnosis.EXIT_CODES[diagnosis.DIVERGED if left else diagnosis.ALIGNED]


def _plain(curve: Any) -> dict[str, Any]:
    import msgspec

    value: dict[str, Any] = msgspec.to_builtins(curve)
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in value.items()}  # fmt: skip
