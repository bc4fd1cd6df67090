"""What modules keep beside their parameters: rotary frequencies, masks, running statistics."""

from __future__ import annotations

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, opened
from rlprobe.said import SEMICOLON, joined, say

ITEM = "buffers"


def check(evidence: Evidence) -> GateItem | None:
    """Item ``buffers``; None where no stage of both sides has any that can be held."""
    found = {
        name: finding.buffers
        for name, finding in evidence.step.findings.items()
        if finding.buffers is not None
    }
    compared = max((kept.compared for kept in found.values()), default=0)
    if not compared:
        return None
    apart = {name: kept for name, kept in found.items() if kept.differing}
    if not apart:
        return opened(
            ITEM,
            say("buffers of modules that are the same as a stage begins: {count}", count=compared),
        )
    said = (
        say("{stage}: {buffers}", stage=name, buffers=kept.said) for name, kept in apart.items()
    )
    return caveat(
        ITEM,
        joined(said, SEMICOLON),
        say("see what makes them and in which format they are kept"),
    )
