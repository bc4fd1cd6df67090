"""Whether records are known to differ of which nothing says by how much: that is no agreement."""

from __future__ import annotations

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import caveat, shut
from rlprobe.judge import analysis, unsized
from rlprobe.judge.analysis import Step
from rlprobe.said import listed, say

ITEM = "differences of unknown size"


def check(step: Step) -> GateItem | None:
    """The item; None where there are none. A divergence that has a size is one all the same."""
    found = unsized.found(step)
    if not found:
        return None
    said = listed(
        say(
            "{stage}: 1 record, first {first} ({why})",
            stage=one.stage,
            first=one.first,
            why=one.why,
        )
        if one.records == 1
        else say(
            "{stage}: {count:,} records, first {first} ({why})",
            stage=one.stage,
            count=one.records,
            first=one.first,
            why=one.why,
        )
        for one in found
    )
    state = shut if analysis.first_of(step) is None else caveat
    return state(
        ITEM,
        say("known to differ, and nothing says by how much: {records}", records=said),
        say("dump with summary_mode statistics, or task tensor, which say how much"),
    )
