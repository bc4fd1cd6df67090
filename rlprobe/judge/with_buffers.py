"""A stage whose model keeps other numbers beside its parameters parts there."""

from __future__ import annotations

import dataclasses
import math

import polars as pl

from rlprobe.judge import buffers, execution
from rlprobe.judge import row as judged_rows
from rlprobe.judge.analysis import Finding
from rlprobe.judge.buffers import Buffer
from rlprobe.judge.inputs import Results
from rlprobe.judge.origin import BUFFER, Origin
from rlprobe.judge.stage import Stage
from rlprobe.roles import BENCHMARK, TARGET


def with_buffers(finding: Finding, results: Results) -> Finding:
    """A finding with what its model kept; a buffer that differs is where it parts, if nothing of
    another module parts before the first record of its own.

    Raises:
        StoreError: what a run says is damaged.
    """
    benchmark, target = results.run(BENCHMARK), results.run(TARGET)
    if benchmark is None or target is None:
        return finding
    kept = buffers.compare(benchmark, target, finding.stage.name, finding.stage.step)
    finding = dataclasses.replace(finding, buffers=kept)
    one = next(iter(kept.beyond), None) if kept is not None else None
    if one is None:
        return finding
    row, rank = _first_of(finding.stage, one.module)
    if _parts_before(finding, row, rank):
        return finding
    leaf = one.name.rpartition(".")[2]
    origin = Origin(BUFFER, one.module, leaf, _sized(row, one), one.said)
    return dataclasses.replace(finding, origin=origin, rank=rank)


def _sized(row: judged_rows.Row, one: Buffer) -> judged_rows.Row:
    excess = (one.error or 0.0) / one.floor if one.floor else math.inf
    return {**row, "error": one.error, "error_kind": "sketch", "floor": one.floor, "excess": excess}


def _parts_before(finding: Finding, row: judged_rows.Row, rank: int) -> bool:
    """Whether another module's record parts before a buffer's module first runs."""
    if finding.origin is None or finding.rank != rank:
        return False
    found = finding.origin.row
    early = (found.get("update") or 0) == 0 and found.get("phase") == execution.FORWARD
    places = found.get("sequence"), row.get("sequence")
    return early and places[0] is not None and places[1] is not None and places[0] < places[1]


def _first_of(stage: Stage, module: str) -> tuple[judged_rows.Row, int]:
    """A module's first record; where it has none, a row for the module alone."""
    for process in stage.processes:
        row = judged_rows.first(process.rows.filter(pl.col("module") == module))
        if row is not None:
            return row, process.rank
    alone: judged_rows.Row = {"name": module, "module": module, "slot": "parameters"}
    return alone, stage.processes[0].rank
