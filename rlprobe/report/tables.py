"""Records per stage as plain tables: the worst, those without partner, and what is to be noted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl
from markupsafe import Markup

from rlprobe.judge import tables as judged
from rlprobe.judge.analysis import Step
from rlprobe.judge.inputs import Results
from rlprobe.report import words
from rlprobe.roles import TARGET

#: Records shown per stage: those in order that part, then those nearest to their floor.
WORST, FIRST = 12, 8


@dataclass(frozen=True)
class StageTable:
    """One stage's records nearest to, or beyond, their floor."""

    name: str
    rows: list[dict[str, Any]]
    open: bool


def is_judged(results: Results, name: str) -> bool:
    """Whether a stage has a judged table."""
    return (results.directory / judged.DIRECTORY / f"{name}.parquet").is_file()


def stage(name: str, step: Step, open_: bool) -> StageTable:
    """A stage's table."""
    finding = step.findings.get(name)
    return StageTable(name, [] if finding is None else _rows(finding.stage.rows), open_)


def unmatched(results: Results) -> list[tuple[str, str, str]]:
    """Stage, side and name of records without partner, as many as the summaries list.

    Raises:
        DumpError: a summary is damaged.
    """
    return [
        (name, side, str(record))
        for name in results.stages(TARGET)
        if (summary := results.summary(TARGET, name)) is not None
        for side in ("benchmark", "target")
        for record in summary.unmatched.get(side, ())
    ]


def notes(results: Results, step: Step) -> list[tuple[str, Markup]]:
    """Stage and what is to be noted of its comparison.

    Raises:
        DumpError: a summary is damaged.
    """
    found: list[tuple[str, Markup]] = []
    for name in results.stages(TARGET):
        summary = results.summary(TARGET, name)
        if summary is None:
            found.append((name, words.both("note_not_compared")))
            continue
        found += [(name, words.sentence(note, summary.messages)) for note in summary.notes]
        finding = step.findings.get(name)
        if finding is not None and finding.stage.misplaced is not None:
            why = words.sentence(finding.stage.misplaced, {})
            found.append((name, why + words.both("note_misplaced")))
        if finding is not None and finding.stage.laid_out is not None:
            why = words.sentence(finding.stage.laid_out, {})
            found.append((name, why + words.both("note_laid_out")))
        if finding is not None and finding.confined:
            found.append((name, words.both("note_padding")))
    return found


def _rows(rows: pl.DataFrame) -> list[dict[str, Any]]:
    known = rows.filter(
        pl.col("judged") & (pl.col("slot") != "parameters") & pl.col("excess").is_not_null()
    )
    first = known.filter(pl.col("beyond")).head(FIRST)
    worst = known.sort("excess", descending=True, nulls_last=True).head(WORST)
    shown = pl.concat([first, worst]).unique("name", maintain_order=True).sort("sequence")
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
