"""What diagnosis.json says of noise: how floors were made, what controls showed, the extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from rlprobe.diagnose.diagnosis import Values
from rlprobe.judge import compared, decisive, noise
from rlprobe.judge.analysis import HELD, Finding, Step
from rlprobe.judge.floors import R_LIMIT, REPEAT_FACTOR
from rlprobe.judge.inputs import Results
from rlprobe.judge.row import columns_where
from rlprobe.roles import HIGH_PRECISION, REPEAT, REPEAT_TARGET


def of(results: Results, steps: Sequence[Step], diverged: Finding | None) -> Values:
    """How floors were made, what controls showed, and the extremes of these steps."""
    findings: dict[str, list[Finding]] = {}
    for step in steps:
        for name, finding in step.findings.items():
            findings.setdefault(name, []).append(finding)
    controls = {
        pair: _control(results, pair)
        for pair in (REPEAT, REPEAT_TARGET, HIGH_PRECISION)
        if pair in results.plan.pairs
    }
    found: Values = {
        "floor": "max(repeats' difference, round-off bound of dtype, depth and reduction length)",
        "safety": noise.SAFETY,
        "repeat_factor": REPEAT_FACTOR,
        "controls": controls,
        "stages": {name: _of_stage(found) for name, found in findings.items()},
    }
    if HIGH_PRECISION in controls:
        found["r_limit"] = R_LIMIT
    if diverged is not None and diverged.origin is not None:
        row = diverged.origin.row
        measure = decisive.of(row)
        found["first"] = {
            "record": row.get("name"), "slot": row.get("slot"), "measure": measure.name,
            "error": plain(measure.error), "error_kind": row.get("error_kind"),
            "floor": plain(measure.floor), "ratio": plain(row.get("excess")),
            "R": plain(row.get("R")),
        }  # fmt: skip
    return found


def _control(results: Results, pair: str) -> Values:
    known = [s for stage in results.stages(pair) if (s := results.summary(pair, stage))]
    return {
        "compared": sum(s.compared for s in known),
        "identical": sum(s.identical for s in known),
        "no_difference_seen": sum(s.no_difference_seen for s in known),
        "max_error": _largest_error(results, pair),
    }


def _largest_error(results: Results, pair: str) -> float | None:
    """Over all records but masks, whose "lowest number" is another in each format."""
    found = []
    for stage in results.stages(pair):
        lazy = compared.scan(results, pair, stage, ["index", "error"])
        if lazy is not None:
            rows = lazy.filter(~pl.col("index").fill_null("").str.contains("mask"))
            found.append(compared.collect(rows, results.compared(pair, stage)))
    largest = pl.concat(found).get_column("error").max() if found else None
    return float(largest) if isinstance(largest, float) else None


def _of_stage(findings: Sequence[Finding]) -> Values:
    """The extremes of a stage's judged records, at one step or several."""
    columns = ["error", "floor", "excess"]
    held = pl.concat([columns_where(finding.stage.rows, HELD, *columns) for finding in findings])
    rows = held.filter(pl.col("error").is_not_null())
    numbers = rows.filter(pl.col("floor") > 0)
    return {
        "median_floor": plain(numbers.get_column("floor").median()),
        "largest_floor": plain(numbers.get_column("floor").max()),
        "largest_error": plain(rows.get_column("error").max()),
        "largest_ratio": plain(rows.get_column("excess").max()),
        "confined_to_unused_positions": any(finding.confined for finding in findings),
        "near_ties": sum(p.near_ties for finding in findings for p in finding.stage.processes),
    }


def nearest(step: Step) -> float:
    """The nearest any judged record of a stage without divergence came to its floor."""
    found = 0.0
    for finding in step.findings.values():
        value = columns_where(finding.stage.rows, HELD, "excess").get_column("excess").max()
        if isinstance(value, float) and math.isfinite(value):
            found = max(found, value)
    return found


def plain(value: Any) -> Any:
    """Strict JSON has no number for what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
