"""What the gate looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.judge.analysis import Step
from rlprobe.judge.extent import Extents
from rlprobe.judge.inputs import Results
from rlprobe.said import Said
from rlprobe.store.read import Run


@dataclass(frozen=True)
class Shut:
    """Where and why the gate is shut, for the finding beside the verdict."""

    cause: str
    #: What differs: weights, tokens, rewards.
    operator: str
    stage: str
    rank: int
    module: str | None
    sample: str | None
    benchmark: dict[str, Any]
    target: dict[str, Any]
    evidence: list[Said]
    #: Captured step, None for the one that is judged.
    step: int | None = None


@dataclass(frozen=True)
class Evidence:
    """Both runs, the controls and the comparison."""

    results: Results
    benchmark: Run
    target: Run
    controls: dict[str, Run]
    step: Step
    #: How much of each stage and step was judged.
    extent: Extents = field(default_factory=dict)


def rows_of(step: Step, which: pl.Expr) -> Iterator[tuple[str, pl.DataFrame]]:
    """The rows of each stage for which ``which`` holds, where there are any."""
    for name, finding in step.findings.items():
        found = finding.stage.rows.filter(which)
        if found.height:
            yield name, found


def opened(item: str, evidence: Said) -> GateItem:
    """An item that agrees."""
    return GateItem(item, "open", evidence)


def caveat(item: str, evidence: Said, action: Said) -> GateItem:
    """An item that does not stop a verdict and should be read beside it."""
    return GateItem(item, "caveat", evidence, action)


def shut(item: str, evidence: Said, action: Said) -> GateItem:
    """An item that stops any verdict."""
    return GateItem(item, "shut", evidence, action)
