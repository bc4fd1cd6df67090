"""Changes that were read off weights of 16 bits: how much of an update they can show.

A caveat: such a change is known to half a unit in the last place of the weight, and what is smaller
was not judged (:mod:`rlprobe.judge.excuses.rounded_away`).
"""

from __future__ import annotations

import polars as pl

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat
from rlprobe.judge import kept
from rlprobe.judge.noise_updates import CHANGE
from rlprobe.judge.reasons import ROUNDED_AWAY
from rlprobe.said import SEMICOLON, joined, of_side, say

ITEM = "changes"


def check(evidence: Evidence) -> GateItem | None:
    """Item ``changes``; None where all of them were read off fp32 weights or copies.

    Raises:
        StoreError: a table of weights is damaged.
    """
    found = []
    for name, finding in evidence.step.findings.items():
        rows = finding.stage.rows.filter(pl.col("slot") == CHANGE)
        if rows.is_empty():
            continue
        hidden = rows.filter(pl.col("unjudged_because") == ROUNDED_AWAY).height
        for side, run in (("benchmark", evidence.benchmark), ("target", evidence.target)):
            coarse = kept.coarse(run, name, evidence.step.number)
            if coarse is None:
                continue
            whole = coarse.filter(pl.col("rank").is_null())
            found.append(
                say(
                    "{name}: of {count:,} parameters the {side} has nothing finer than weights in "
                    "{format}; {hidden:,} changes were smaller than half a unit in the last place "
                    "of these and were not judged",
                    name=name,
                    count=whole.height,
                    side=of_side(side),
                    format=whole.item(0, "format"),
                    hidden=hidden,
                )
            )
    if not found:
        return None
    return caveat(
        ITEM,
        joined(found, SEMICOLON),
        say("to have every change judged, keep weights in fp32, or fp32 copies that are stepped"),
    )
