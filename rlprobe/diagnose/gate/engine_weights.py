"""An engine's weights: those that its trainer has at the step, on each side by itself.

What was generated stops no verdict: all sides train on it, whoever generated it. Where an engine
was led through responses on both sides, what it computed is judged: item ``weights`` holds the two
engines' weights against each other at the judged step, and here each captured step is asked. What
the benchmark's engine has of its trainer and the target's has not is another policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, opened, shut
from rlprobe.judge import engine_weights
from rlprobe.judge.engine_weights import HALF, STALE, Sync
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import Said, joined, listed, of_side, say

ITEM = "engine weights"
_NAMED = 4
_ACTION = say(
    "see whether and how weights are sent to the engine after an update and when it "
    "wakes: what it generates is of another policy than the one that is trained"
)


def check(evidence: Evidence) -> tuple[GateItem | None, Shut | None]:
    """Item ``engine weights``; None where no side has digested an engine's.

    Raises:
        StoreError: a table of weights is damaged.
    """
    runs = {BENCHMARK: evidence.benchmark, TARGET: evidence.target}
    sides = {role: engine_weights.of_run(run) for role, run in runs.items()}
    if all(stages.FORCED in run.manifest.stages for run in runs.values()):
        lone = _of_target_alone(sides[BENCHMARK], sides[TARGET])
        if lone is not None:
            said = joined(_all_wrong(sides), say("; "))
            return shut(ITEM, said, _ACTION), lone
    return _item(sides), None


def _of_target_alone(benchmark: Sequence[Sync], target: Sequence[Sync]) -> Shut | None:
    """The first weights that the target's engine has otherwise, and the benchmark's has not.

    At the same step, that is: each engine is held against its own trainer, so that what two
    trainers differ by after an update does not matter.
    """
    right = {sync.step: sync for sync in benchmark}
    for sync in target:
        other = right.get(sync.step)
        if other is None:
            continue
        known = {one.name for one in other.wrong} | set(other.left)
        names = [one.name for one in sync.wrong if one.name not in known]
        if names:
            return _shut(sync, names)
    return None


def _shut(sync: Sync, names: Sequence[str]) -> Shut:
    modules = {name.rpartition(".")[0] for name in names}
    said = say(
        "{side}, step {step}: {what}",
        side=of_side(TARGET),
        step=sync.step,
        what=engine_weights.describe(sync),
    )
    right = say("the benchmark's engine has its trainer's: {names}", names=listed(names, _NAMED))
    values = {"parameter": names[0], "parameters that differ": 0}
    return Shut(
        "stale_weights" if sync.kind in (STALE, HALF) else "weights",
        "weights",
        stages.FORCED,
        0,
        modules.pop() or None if len(modules) == 1 else None,
        None,
        values,
        values | {"parameters that differ": len(names)},
        [said, right],
        sync.step,
    )


def _item(sides: Mapping[str, list[Sync]]) -> GateItem | None:
    found = _all_wrong(sides)
    if found:
        return caveat(ITEM, joined(found, say("; ")), _ACTION)
    strange = [
        say(
            "{side}: none of the engine's {left} weights is called as one of the trainer's "
            "({names})",
            side=of_side(role),
            left=len(steps[0].left),
            names=listed(steps[0].left, _NAMED),
        )
        for role, steps in sides.items()
        if steps and not any(step.compared for step in steps)
    ]
    if strange:
        return caveat(
            ITEM,
            joined(strange, say("; ")),
            say("whether the engine has the trainer's weights is not known"),
        )
    known = [_same(role, steps) for role, steps in sides.items() if steps]
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


def _all_wrong(sides: Mapping[str, list[Sync]]) -> list[Said]:
    return [line for role, steps in sides.items() for line in _wrong(role, steps)]


def _wrong(role: str, steps: list[Sync]) -> Iterator[Said]:
    for step in steps:
        if step.kind is not None:
            yield say(
                "{side}, step {step}: {what}",
                side=of_side(role),
                step=step.step,
                what=engine_weights.describe(step),
            )
