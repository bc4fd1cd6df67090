"""The stage strip: every stage of a step, in order, and what was found of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rlprobe import stages
from rlprobe.diagnose.diagnosis import StageResult
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.inputs import Results
from rlprobe.store.read import Run


def of(
    results: Results, target: Run, step: Step, diverged: Finding | None, comparable: bool
) -> list[StageResult]:
    """The strip of one step.

    Args:
        results: for the stages that were planned.
        target: its run, for stages that it replayed.
        step: what judging found of it.
        diverged: the stage that parts first; None where none does.
        comparable: whether the gate let anything be judged.
    """
    planned = results.stages()
    strip = []
    after = False
    for name in [*stages.STAGES, *(s for s in planned if s not in stages.STAGES)]:
        found = target.manifest.stages.get(name)
        finding = step.findings.get(name)
        if found is not None and found.state == "replayed":
            strip.append(StageResult(name, "replayed", 0, 0))
        elif finding is None or not comparable or not finding.records:
            if name in planned or finding is not None:
                counts = (finding.records, finding.beyond) if finding is not None else (0, 0)
                strip.append(StageResult(name, "not_compared", *counts))
        elif diverged is not None and finding is diverged:
            strip.append(StageResult(name, "diverged", finding.records, finding.beyond))
            after = True
        elif finding.origin is not None and after:
            strip.append(StageResult(name, "inherited", finding.records, finding.beyond))
        else:
            strip.append(StageResult(name, "aligned", finding.records, finding.beyond))
    return strip


def of_all(strips: Sequence[list[StageResult]]) -> list[StageResult]:
    """The strip of several steps that agree: each stage with the records of all."""
    whole = []
    for cells in zip(*strips, strict=True):
        compared = [cell for cell in cells if cell.state == "aligned"] or list(cells)
        whole.append(
            msgspec.structs.replace(
                compared[0],
                records=sum(cell.records for cell in compared),
                beyond=sum(cell.beyond for cell in compared),
            )
        )
    return whole
