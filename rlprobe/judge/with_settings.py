"""A stage whose optimizer was told otherwise parts there."""

from __future__ import annotations

import dataclasses

import polars as pl

from rlprobe import stages
from rlprobe.judge import execution, keydata, optimizers
from rlprobe.judge import row as judged_rows
from rlprobe.judge.analysis import Finding
from rlprobe.judge.inputs import Results
from rlprobe.judge.origin import SETTING, Origin
from rlprobe.judge.stage import Stage
from rlprobe.roles import BENCHMARK, TARGET


def with_settings(finding: Finding, results: Results) -> Finding:
    """A finding with what its optimizer was told; where that differs the stage parts in its
    step, if nothing parts before.

    Raises:
        StoreError: what a run says is damaged.
    """
    told = _told(results, finding.stage)
    finding = dataclasses.replace(finding, told=told)
    if told is None or not told.differing:
        return finding
    found = finding.origin
    if found is not None and _place(found.row) < (told.update, execution.CHANGES):
        return finding
    if found is not None:
        row, rank = found.row, finding.rank
    else:
        row, rank = _change(finding.stage, told)
    reason = told.said(told.differing)
    origin = Origin(SETTING, told.module, "optimizer", row, reason)
    return dataclasses.replace(finding, origin=origin, rank=rank)


def _told(results: Results, stage: Stage) -> optimizers.Told | None:
    benchmark, target = results.run(BENCHMARK), results.run(TARGET)
    if benchmark is None or target is None or stage.name not in stages.UPDATE_STAGES:
        return None
    return optimizers.compare(benchmark, target, stage.name, stage.step)


def _place(row: judged_rows.Row) -> tuple[int, int]:
    """Update and phase of the row of an origin; a result of a stage is made in its first pass."""
    phase = row.get("phase")
    late = str(row["name"]).endswith(keydata.LATER)
    update = row.get("update") or int(late)
    return update, execution.FORWARD if phase is None else int(phase)


def _change(stage: Stage, told: optimizers.Told) -> tuple[judged_rows.Row, int]:
    """A change that was made with a setting that differs, though by no more than its floor."""
    modules = [n.rpartition(".")[0] for one in told.differing for n in one.parameters]
    for process in stage.processes:
        changes = process.rows.filter(pl.col("phase") == execution.CHANGES)
        own = judged_rows.first(changes.filter(pl.col("module").is_in(modules)))
        row = own or judged_rows.first(changes)
        if row is not None:
            return {**row, "error": None, "excess": None}, process.rank
    name, phase = "optimizer", execution.CHANGES
    return {"name": name, "slot": "change", "phase": phase}, stage.processes[0].rank
