"""Routing that was replayed: where would the target's own routers have sent its tokens?

The numbers behind a router are then judged as if it had chosen like the benchmark's. That is sound
for what the experts compute, and it says nothing of a run without the replay.
"""

from __future__ import annotations

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, opened
from rlprobe.judge.routed import Routed, routed
from rlprobe.said import Said, say

ITEM = "routing"


def check(evidence: Evidence) -> GateItem | None:
    """Item ``routing``; None where every router's own choices were followed.

    Raises:
        StoreError: a table of choices is damaged.
    """
    if evidence.target.manifest.declared.get("routing") != "replay":
        return None
    # engines choose by themselves, whatever is replayed in training
    own = [each for each in routed(evidence.results, evidence.step.number) if each.replayed]
    moved = [each for each in own if each.otherwise]
    if not own:
        return caveat(
            ITEM,
            say("tokens were sent to the benchmark's experts; what routers chose is not recorded"),
            say("capture the stages whose routing is replayed on both sides"),
        )
    if not moved:
        return opened(
            ITEM,
            say(
                "tokens were sent to the benchmark's experts, which the target's routers chose too "
                "({tokens} choices of {routers} routers)",
                tokens=f"{sum(each.tokens for each in own):,}",
                routers=len({each.module for each in own}),
            ),
        )
    return caveat(
        ITEM,
        _said(own, moved),
        say(
            "what experts compute is judged; where the target's own choices would lead is not: "
            "routing: own shows it"
        ),
    )


def _said(own: list[Routed], moved: list[Routed]) -> Said:
    most = max(moved, key=lambda each: each.share)
    return say(
        "tokens were sent to the benchmark's experts, where the target's routers chose otherwise "
        "for {moved} of {tokens}; the most in {stage}, {module}: {share} %",
        moved=f"{sum(each.otherwise for each in moved):,}",
        tokens=f"{sum(each.tokens for each in own):,}",
        stage=most.stage,
        module=most.module,
        share=f"{100 * most.share:.2g}",
    )
