"""An engine's weights: those that its trainer has at the step, on each side by itself.

No verdict is stopped by others: all sides train on what was generated, whoever generated it. Where
an engine was led through responses on both sides, item ``weights`` holds the two engines' against
each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, opened
from rlprobe.judge import engine_weights
from rlprobe.judge.engine_weights import Sync
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import Said, joined, listed, of_side, say

ITEM = "engine weights"
_NAMED = 4


def check(evidence: Evidence) -> GateItem | None:
    """Item ``engine weights``; None where no side has digested an engine's.

    Raises:
        StoreError: a table of weights is damaged.
    """
    sides = [
        (role, engine_weights.of_run(run))
        for role, run in ((BENCHMARK, evidence.benchmark), (TARGET, evidence.target))
    ]
    found = [line for role, steps in sides for line in _wrong(role, steps)]
    if found:
        return caveat(
            ITEM,
            joined(found, say("; ")),
            say(
                "see whether and how weights are sent to the engine after an update and when it "
                "wakes: what it generates is of another policy than the one that is trained"
            ),
        )
    strange = [
        say(
            "{side}: none of the engine's {left} weights is called as one of the trainer's "
            "({names})",
            side=of_side(role),
            left=len(steps[0].left),
            names=listed(steps[0].left, _NAMED),
        )
        for role, steps in sides
        if steps and not any(step.compared for step in steps)
    ]
    if strange:
        return caveat(
            ITEM,
            joined(strange, say("; ")),
            say("whether the engine has the trainer's weights is not known"),
        )
    known = [_same(role, steps) for role, steps in sides if steps]
    return opened(ITEM, joined(known, say("; "))) if known else None


def _same(role: str, steps: list[Sync]) -> Said:
    left = sorted({name for step in steps for name in step.left})
    given = {
        "side": of_side(role),
        "count": min(step.compared for step in steps),
        "steps": listed([str(step.step) for step in steps], 6),
    }
    if not left:
        return say(
            "{side}: all {count} weights of the engine are the trainer's, step {steps}", **given
        )
    return say(
        "{side}: {count} weights of the engine are the trainer's, step {steps}; {left} have no "
        "counterpart that they could be compared with ({names})",
        **given,
        left=len(left),
        names=listed(left, _NAMED),
    )


def _wrong(role: str, steps: list[Sync]) -> Iterator[Said]:
    for step in steps:
        if step.kind is not None:
            yield say(
                "{side}, step {step}: {what}",
                side=of_side(role),
                step=step.step,
                what=engine_weights.describe(step),
            )
