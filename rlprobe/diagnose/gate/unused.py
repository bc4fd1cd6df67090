"""What differs only where nothing looks: records that were not judged, and parts of results.

A caveat and no open item: that positions are padding follows from the results, which agree, or from
sketches of the tokens (:mod:`rlprobe.judge.excuses.padding_only`); that a part of a result is
dropped, from what updates were given (:mod:`rlprobe.judge.handed_on`).
"""

from __future__ import annotations

import math

import polars as pl

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import caveat
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.handed_on import Dropped
from rlprobe.said import Said, exactly, joined, listed, say

ITEM = "unused positions"


def check(step: Step) -> GateItem | None:
    """Item ``unused positions``; None where all that differs could be judged."""
    found = [finding for finding in step.findings.values() if finding.confined]
    said = [_records(found)] if found else []
    said += [_dropped(one) for one in step.dropped]
    if not said:
        return None
    kernels = say(
        "these records were not judged; two attention kernels may fill rows of "
        "padding differently. To have them judged, use one kernel on both sides, "
        "or no padding"
    )
    parts = say("what is handed on was judged; look at what the stage makes of the other tokens")
    return caveat(ITEM, joined(said, "; "), kernels if found else parts)


def _records(found: list[Finding]) -> Said:
    stages = say("one stage") if len(found) == 1 else say("{count} stages", count=len(found))
    return say(
        "{count:,} records of {stages} differ by up to {size} at positions that no "
        "log-prob, value, loss or gradient depends on (padding), since all of "
        "these agree: {found}",
        count=sum(f.unused for f in found),
        stages=stages,
        size=_size(found),
        found=listed([f"{f.stage.name} ({f.unused:,})" for f in found], 6),
    )


def _dropped(one: Dropped) -> Said:
    return say(
        "{name} differ by up to {size} at {differing:,} of the {count:,} tokens of which no update "
        "was given any, and agree at all others",
        name=one.name,
        size=exactly(f"{one.largest:.2g}"),
        differing=one.differing,
        count=one.count,
    )


def _size(found: list[Finding]) -> Said:
    """The largest difference, and how many times its floor the furthest record is."""
    rows = pl.concat([f.padding_only.select("error", "excess") for f in found])
    error, excess = (rows.get_column(name).max() for name in ("error", "excess"))
    said = exactly(f"{error:.2g}") if isinstance(error, float) else say("more than their floor")
    if isinstance(excess, float) and math.isfinite(excess):
        said += say(" ({excess:,.0f} times their floor)", excess=excess)
    return said
