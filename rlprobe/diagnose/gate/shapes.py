"""Records of another shape on the other side, where both hold the same samples alike.

A caveat: another kernel may take a mask of another shape, or run its experts on other rows. An item
of its own, so that it hides nothing of what was recorded otherwise.
"""

from __future__ import annotations

import polars as pl

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import caveat
from rlprobe.judge.analysis import Step
from rlprobe.judge.reasons import OTHER_SHAPE
from rlprobe.said import SEMICOLON, joined, say

ITEM = "shapes"


def check(step: Step) -> GateItem | None:
    """Item ``shapes``; None where all records that have a partner have its shape."""
    found = []
    for name, finding in step.findings.items():
        if finding.stage.misplaced is not None or finding.stage.laid_out is not None:
            continue
        rows = finding.stage.rows.filter(pl.col("unjudged_because") == OTHER_SHAPE)
        if rows.height:
            found.append(
                say(
                    "{name}: {count:,} records have another shape and were not judged, first "
                    "{first}",
                    name=name,
                    count=rows.height,
                    first=rows.item(0, "name"),
                )
            )
    if not found:
        return None
    return caveat(
        ITEM,
        joined(found, SEMICOLON),
        say("use the same kernels and layout on both sides to have them judged"),
    )
