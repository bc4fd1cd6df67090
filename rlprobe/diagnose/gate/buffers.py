"""What modules keep beside their parameters: rotary frequencies, masks, running statistics."""

from __future__ import annotations

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, opened
from rlprobe.said import SEMICOLON, joined, say

ITEM = "buffers"
_SHOWN = 3


def check(evidence: Evidence) -> GateItem | None:
    """Item ``buffers``; None where no stage of both sides has any that can be held."""
    found = {
        name: finding.buffers
        for name, finding in evidence.step.findings.items()
        if finding.buffers is not None
    }
    compared = max((kept.compared for kept in found.values()), default=0)
    unheld = dict.fromkeys(one for kept in found.values() for one in kept.unheld)
    if not compared and not unheld:
        return None
    apart = {name: kept for name, kept in found.items() if kept.differing}
    if not apart and not unheld:
        return opened(
            ITEM,
            say("buffers of modules that are the same as a stage begins: {count}", count=compared),
        )
    said = [
        say("{stage}: {buffers}", stage=name, buffers=kept.said) for name, kept in apart.items()
    ]
    more = list(unheld)
    if len(more) > _SHOWN:
        more = [*more[:_SHOWN], say("and {count} more", count=len(unheld) - _SHOWN)]
    return caveat(
        ITEM,
        joined([*said, *more], SEMICOLON),
        say("see what makes them and in which format they are kept"),
    )
