"""Tables of records per stage, and the trend over later steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from rlprobe.judge import compared
from rlprobe.judge.analysis import Step
from rlprobe.judge.inputs import Results
from rlprobe.roles import TARGET

#: Records shown per stage: those in order that part, then those nearest to their floor.
WORST, FIRST = 12, 8


@dataclass(frozen=True)
class StageTable:
    """One stage's records."""

    name: str
    text: str
    notes: list[str]
    rows: list[dict[str, Any]]
    unmatched: list[tuple[str, str]]
    open: bool


@dataclass(frozen=True)
class Trend:
    """Median error of each stage at each captured step."""

    steps: list[int]
    rows: list[tuple[str, list[float | None]]]


def stage(results: Results, name: str, step: Step, open_: bool) -> StageTable:
    """A stage's table.

    Raises:
        DumpError: its summary is damaged.
    """
    summary = results.summary(TARGET, name)
    if summary is None:
        return StageTable(name, "was not compared", [], [], [], open_)
    unmatched = [
        (side, str(record))
        for side in ("benchmark", "target")
        for record in summary["unmatched"][side]
    ]
    counts = ", ".join(f"{count} {status}" for status, count in summary["counts"].items() if count)
    unseen = summary.get("no_difference_seen", 0)
    seen = f", no difference seen in {unseen:,}" if unseen else ""
    text = f"{summary['compared']:,} compared, {summary['identical']:,} identical{seen} ({counts})"
    finding = step.findings.get(name)
    rows = [] if finding is None else _rows(finding.stage.rows)
    notes = [str(note) for note in summary["notes"]]
    if finding is not None and finding.stage.misplaced is not None:
        notes.append(
            f"On the two sides {finding.stage.misplaced}: records of micro-batches were not "
            "judged, only what does not depend on the places of samples."
        )
    if finding is not None and finding.confined:
        notes.append(
            "Some records differ far beyond their floor while everything this stage computes for "
            "others agrees: the difference is at positions that no result depends on (padding)."
        )
    return StageTable(name, text, notes, rows, unmatched, open_)


def _rows(rows: pl.DataFrame) -> list[dict[str, Any]]:
    known = rows.filter(
        pl.col("judged") & (pl.col("slot") != "parameters") & pl.col("excess").is_not_null()
    )
    first = known.filter(pl.col("beyond")).head(FIRST)
    worst = known.sort("excess", descending=True, nulls_last=True).head(WORST)
    shown = pl.concat([first, worst]).unique("name", maintain_order=True).sort("place")
    return [
        {
            "name": row["name"],
            "shape": " × ".join(str(n) for n in row["shape_benchmark"] or []),
            "kind": row["error_kind"] or "–",
            **{key: row[key] for key in ("error", "floor", "excess", "R", "beyond",
                                         "norm_benchmark", "norm_target")},
        }
        for row in shown.iter_rows(named=True)
    ]  # fmt: skip


def trend(results: Results) -> Trend | None:
    """How errors develop over the captured steps; None with a single step.

    Raises:
        DumpError: a table is damaged.
    """
    medians: dict[str, dict[int, float]] = {}
    for name in results.stages(TARGET):
        lazy = compared.scan(results, TARGET, name, ["step", "slot", "error"])
        if lazy is None:
            continue
        table = compared.collect(
            lazy.filter(pl.col("error").is_not_null() & (pl.col("slot") != "parameters"))
            .group_by("step")
            .agg(pl.col("error").median()),
            results.compared(TARGET, name),
        )
        medians[name] = dict(table.iter_rows())
    steps = sorted({step for values in medians.values() for step in values})
    if len(steps) < 2:
        return None
    return Trend(
        steps, [(name, [values.get(step) for step in steps]) for name, values in medians.items()]
    )
