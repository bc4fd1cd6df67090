"""The high-precision control: what it excuses, and whether the benchmark is where it says.

With the control a record that is beyond its floor is held against the benchmark's own error
(:mod:`rlprobe.judge.floors`). A benchmark that is further from its control than correct devices are
from each other is wrong itself, or its control is: then the target is no worse than something that
is wrong, which is no agreement.
"""

from __future__ import annotations

import polars as pl

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import caveat
from rlprobe.judge.analysis import Step
from rlprobe.judge.reasons import NO_WORSE
from rlprobe.said import listed, say

ITEM = "high precision"


def check(step: Step) -> GateItem | None:
    """Item ``high precision``; None where it excuses nothing that the benchmark's error explains
    beyond its own floor."""
    said = []
    for name, finding in step.findings.items():
        rows = finding.stage.rows.filter(
            (pl.col("excused_by") == NO_WORSE) & (pl.col("own_error") > pl.col("floor"))
        )
        if rows.height:
            times = rows.select((pl.col("own_error") / pl.col("floor")).max()).item()
            said.append(
                say(
                    "{name}: {count:,} records, of which the benchmark's own error is up to "
                    "{times:.3g} times the floor, first {first}",
                    name=name,
                    count=rows.height,
                    times=times,
                    first=rows.item(0, "name"),
                )
            )
    if not said:
        return None
    return caveat(
        ITEM,
        say(
            "beyond their floors, and held to be no worse than the benchmark, which is as far from "
            "its control: {records}",
            records=listed(said, 4),
        ),
        say(
            "see whether control and benchmark compute the same in two precisions: where the "
            "control is wrong, the target was judged by nothing"
        ),
    )
