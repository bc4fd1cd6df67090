"""How often does the diagnosis alarm at two correct devices?

    python -m benchmarks.benign --seeds 0 9 --json benign.json

Every pair of :mod:`benchmarks.benign_model`: four architectures, fp32 and bf16, each change of
kernels, each seed of weights and tokens; compared and diagnosed as an alignment is. Prints alarms,
the one-sided 95 % Clopper-Pearson bound on their rate, and the nearest record of each kind. Pairs
in which no difference is seen are counted apart: they prove nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import benign_model as model
from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.diagnose.run import diagnose
from rlprobe.judge.inputs import PlannedPair, PlannedRun, Results, write
from rlprobe.selftest.score import upper_bound
from rlprobe.store.commit import commit
from rlprobe.store.keys import run_key

#: Fused attention hands out no probabilities: a tenth of so small a model's records.
_COVERAGE = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 9], metavar=("FROM", "TO"))
    parser.add_argument("--architectures", nargs="+", default=list(model.ARCHITECTURES))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--changes", nargs="+", default=list(model.CHANGES))
    parser.add_argument("--seconds", type=float, help="stop after these; go on with --json's file")
    parser.add_argument("--keep", type=Path, help="directory that alarming pairs are kept in")
    parser.add_argument("--json", type=Path, help="results so far; those in it are not made again")
    args = parser.parse_args()
    logging.getLogger("rlprobe").setLevel(logging.ERROR)
    model.start()
    known: list[dict[str, Any]] = []
    if args.json and args.json.is_file():
        known = json.loads(args.json.read_text())
    began = time.monotonic()
    for seed in range(args.seeds[0], args.seeds[1] + 1):
        for architecture in args.architectures:
            for precision in args.precisions:
                done = {
                    row["change"] for row in known
                    if (row["architecture"], row["precision"], row["seed"])
                    == (architecture, precision, seed)
                }  # fmt: skip
                left = [change for change in args.changes if change not in done]
                if left and not (args.seconds and time.monotonic() - began > args.seconds):
                    known += _pairs(architecture, precision, seed, left, args.keep)
                    if args.json:
                        args.json.write_text(json.dumps(known, indent=1))
    _say(known)


def _pairs(
    architecture: str, precision: str, seed: int, changes: list[str], keep: Path | None
) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        origin = _run(root, architecture, precision, seed, "benchmark", "", None)
        for change in changes:
            target = _run(root, architecture, precision, seed, "target", change, origin)
            results = root / change.replace(" ", "-")
            row = _judged(root, results, origin, target, precision)
            found.append({"architecture": architecture, "precision": precision, "seed": seed,
                          "change": change, **row})  # fmt: skip
            if row["verdict"] != "aligned":
                print(f"ALARM: {architecture} {precision} seed {seed}, {change}: {row['sentence']}")
                if keep is not None:
                    name = f"{architecture}-{precision}-{seed}-{results.name}"
                    shutil.copytree(root, keep / name, dirs_exist_ok=True)
    return found


def _run(
    root: Path, architecture: str, precision: str, seed: int, role: str, change: str,
    origin: str | None,
) -> str:  # fmt: skip
    enter, options = model.CHANGES.get(change, (contextlib.nullcontext, {}))
    scratch = root / "scratch"
    model.run(scratch, architecture, precision, seed, enter, role=role, **options)
    declared = {
        "role": role, "name": f"{architecture} {seed} {change}", "replay_of": origin,
        "device": "cpu", "precision": precision,
        "capture": {"engine": "light", "task": "statistics", "sketch": True},
    }  # fmt: skip
    key = run_key(declared)
    commit(scratch, root / "store", key, declared)
    shutil.rmtree(scratch)
    return key


def _judged(root: Path, results: Path, origin: str, target: str, precision: str) -> dict[str, Any]:
    stages = list(model.STAGES)
    runs = {"benchmark": origin, "target": target}
    write(
        results / "alignment.json", name="benign", store=root / "store",
        runs={role: PlannedRun(key, "cpu", precision, stages) for role, key in runs.items()},
        pairs={"target": PlannedPair("benchmark", "target", stages)},
        coverage=_COVERAGE,
    )  # fmt: skip
    left, right = (sides.resolve(str(root / "store" / "runs" / key)) for key in runs.values())
    options = Options("target", model.STAGES, _COVERAGE)
    compare(left, right, results / "compare" / "target", options)
    found = diagnose(results)
    summaries = [Results.open(results).summary("target", stage) for stage in stages]
    ratios = [
        float(stage["largest_ratio"])
        for stage in (found.noise.get("stages") or {}).values()
        if stage.get("largest_ratio") is not None
    ]
    return {
        "verdict": found.verdict,
        "sentence": found.sentence,
        "nearest": max(ratios, default=0.0),
        "identical": all(
            s is not None and s.identical + s.no_difference_seen == s.compared for s in summaries
        ),
        "judged": sum(stage.records for stage in found.stages),
        "gate": [item.item for item in found.gate if item.state != "open"],
    }


def _say(rows: list[dict[str, Any]]) -> None:
    counted = [row for row in rows if not row["identical"]]
    alarms = [row for row in counted if row["verdict"] != "aligned"]
    print(f"{'':22}{'pairs':>7}{'alarms':>8}{'nearest':>9}")
    for key in ("architecture", "precision", "change"):
        for value, number in sorted(Counter(row[key] for row in counted).items()):
            mine = [row for row in counted if row[key] == value]
            alarmed = sum(row["verdict"] != "aligned" for row in mine)
            nearest = max(row["nearest"] for row in mine)
            print(f"{value:22}{number:>7}{alarmed:>8}{nearest:>9.2f}")
    bound = upper_bound(len(alarms), len(counted))
    print(
        f"{len(alarms)} of {len(counted)} pairs alarmed: below {bound:.2%} (95 %); "
        f"{sum(row['judged'] for row in counted):,} records; "
        f"{len(rows) - len(counted)} further pairs show no difference"
    )


if __name__ == "__main__":
    main()
