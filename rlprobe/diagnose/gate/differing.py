"""Whether records are known to differ of which nothing says by how much: that is no agreement."""

from __future__ import annotations

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import caveat, listed, shut
from rlprobe.judge import analysis, unsized
from rlprobe.judge.analysis import Step
from rlprobe.terminal import counted

ITEM = "differences of unknown size"


def check(step: Step) -> GateItem | None:
    """The item; None where there are none. A divergence that has a size is one all the same."""
    found = unsized.found(step)
    if not found:
        return None
    said = listed(
        [f"{one.stage}: {counted(one.records, 'record')}, first {one.first} ({one.why})"
         for one in found]
    )  # fmt: skip
    state = shut if analysis.first_of(step) is None else caveat
    return state(
        ITEM,
        f"known to differ, and nothing says by how much: {said}",
        "dump with summary_mode statistics, or task tensor, which say how much",
    )
