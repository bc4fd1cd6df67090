"""Whether both sides began from one checkpoint, where runs were resumed from any."""

from __future__ import annotations

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, opened, shut
from rlprobe.said import Said, say

ITEM = "checkpoint"


def check(evidence: Evidence) -> GateItem | None:
    """Item ``checkpoint``; None where both sides began from their models.

    Weights have an item of their own; what only a checkpoint holds (the optimizer's state, its
    schedule) would show as a divergence of the first update.
    """
    benchmark, target = (
        run.manifest.declared.get("resume_from") for run in (evidence.benchmark, evidence.target)
    )
    if benchmark == target:
        if benchmark is None:
            return None
        return opened(ITEM, say("both began from {checkpoint}", checkpoint=_spoken(benchmark)))
    return shut(
        ITEM,
        say(
            "the benchmark began from {benchmark}, the target from {target}",
            benchmark=_spoken(benchmark),
            target=_spoken(target),
        ),
        say(
            "begin both sides from one checkpoint (resume_from), and collect the benchmark with it"
        ),
    )


def _spoken(declared: object) -> Said:
    if declared is None:
        return say("the models as they are")
    step, _, digest = str(declared).partition(":")
    return say(
        "the checkpoint of the trainer's step {step} ({digest})", step=step, digest=digest[:12]
    )
