"""Records that were not judged because they differ only where no result looks.

A caveat and no open item: that those positions are padding follows from the results, which agree;
nobody has looked at the positions themselves (:mod:`rlprobe.judge.excuses.padding_only`).
"""

from __future__ import annotations

import math

import polars as pl

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import caveat
from rlprobe.judge.analysis import Finding, Step
from rlprobe.said import Said, exactly, listed, say

ITEM = "unused positions"


def check(step: Step) -> GateItem | None:
    """Item ``unused positions``; None where all that differs could be judged."""
    found = [finding for finding in step.findings.values() if finding.confined]
    if not found:
        return None
    stages = say("one stage") if len(found) == 1 else say("{count} stages", count=len(found))
    return caveat(
        ITEM,
        say(
            "{count:,} records of {stages} differ by up to {size} at positions that no "
            "log-prob, value, loss or gradient depends on (padding), since all of "
            "these agree: {found}",
            count=sum(f.unused for f in found),
            stages=stages,
            size=_size(found),
            found=listed([f"{f.stage.name} ({f.unused:,})" for f in found], 6),
        ),
        say(
            "these records were not judged; two attention kernels may fill rows of "
            "padding differently. To have them judged, use one kernel on both sides, "
            "or no padding"
        ),
    )


def _size(found: list[Finding]) -> Said:
    """The largest difference, and how many times its floor the furthest record is."""
    rows = pl.concat([f.padding_only.select("error", "excess") for f in found])
    error, excess = (rows.get_column(name).max() for name in ("error", "excess"))
    said = exactly(f"{error:.2g}") if isinstance(error, float) else say("more than their floor")
    if isinstance(excess, float) and math.isfinite(excess):
        said += say(" ({excess:,.0f} times their floor)", excess=excess)
    return said
