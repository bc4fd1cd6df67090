"""Whether enough of what was recorded could be judged: agreement of nothing is none.

Counted is the judged step alone. Left out of the count is what is excused, what gate and cause look
at elsewhere (``given``, ``generated``), and what has no partner because micro-batches hold other
samples: its gradients, changes and results, which are judged, stand for it, and item ``coverage``
says so.
"""

from __future__ import annotations

from collections import Counter

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, shut
from rlprobe.diagnose.gate.extent import is_lone_generation
from rlprobe.judge import reasons
from rlprobe.judge.analysis import Step
from rlprobe.judge.extent import TRAINER, Extents
from rlprobe.judge.inputs import Results
from rlprobe.roles import TARGET
from rlprobe.said import listed, say

ITEM = "judged"
_ELSEWHERE = (
    reasons.GIVEN,
    reasons.AS_CHANGES,
    reasons.LATER_STEP,
    reasons.OTHER_PLACES,
    reasons.OTHER_MODULES,
    reasons.GENERATED,
)
_ACTION = say(
    "see `extent` in diagnosis.json and docs/diagnosis.md for each reason; capture both sides alike"
)


def check(evidence: Evidence) -> GateItem | None:
    """Item ``judged``; None where enough was, and nothing ran after a first update."""
    return item(evidence.results, evidence.step, evidence.extent)


def item(results: Results, step: Step, extents: Extents) -> GateItem | None:
    """The same of what was judged, whatever else is known."""
    judged = recorded = after = 0
    why = Counter[str]()
    zero: list[str] = []
    for name, steps in extents.items():
        extent = steps.get(step.number)
        if extent is None or name == TRAINER or _is_lone_generation(results, name):
            continue
        judged += extent.judged
        recorded += extent.judged
        finding = step.findings.get(name)
        after += extent.unjudged.get(reasons.AFTER_UPDATE, 0)
        if finding is not None and finding.stage.misplaced is not None:
            continue
        missing = {r: n for r, n in extent.unjudged.items() if r not in _ELSEWHERE}
        missing.pop(reasons.AFTER_UPDATE, None)
        if count := missing.pop(reasons.ALL_ZERO, 0):
            zero.append(say("{count:,} records of {name}", count=count, name=name))
        why.update(missing)
        recorded += sum(missing.values())
    said = listed([f"{count:,} {reason}" for reason, count in why.most_common()], 4)
    if not judged:
        return shut(
            ITEM,
            say(
                "nothing that was recorded could be judged ({said})", said=said or say("no records")
            ),
            _ACTION,
        )
    share = judged / recorded
    if share < results.plan.coverage:
        return shut(
            ITEM,
            say(
                "{judged:,} of {recorded:,} recorded quantities were judged ({share:.1%}; "
                "at least {coverage:.0%} is asked for): {said}",
                judged=judged,
                recorded=recorded,
                share=share,
                coverage=results.plan.coverage,
                said=said,
            ),
            _ACTION,
        )
    if zero:
        return caveat(
            ITEM,
            say(
                "gradients or changes are zero on both sides throughout ({zero}): their "
                "agreement says nothing and was not judged",
                zero=listed(zero),
            ),
            say("align a step whose rewards differ within a group, so that something is learnt"),
        )
    if after:
        return caveat(
            ITEM,
            say(
                "only the first of several updates was judged in some stage: {after:,} "
                "records ran after it, on weights that differ by what it left",
                after=after,
            ),
            say("to have later updates judged, capture gradients and changes of parameters"),
        )
    return None


def _is_lone_generation(results: Results, stage: str) -> bool:
    summary = results.summary(TARGET, stage)
    return summary is not None and is_lone_generation(stage, summary)
