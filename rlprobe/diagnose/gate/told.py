"""What optimizers were told: the rates, betas and decay that they step with, by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, opened
from rlprobe.judge import optimizers
from rlprobe.judge.optimizers import Told
from rlprobe.said import COMMA, SEMICOLON, Said, joined, listed, say

ITEM = "optimizer settings"


def check(evidence: Evidence) -> GateItem | None:
    """Item ``optimizer settings``; None where no stage of both sides says what was told.

    Of steps after the judged one too: what is told does not hang on what updates before it left.

    Raises:
        StoreError: what a run says is damaged.
    """
    found = {
        name: finding.told
        for name, finding in evidence.step.findings.items()
        if finding.told is not None
    }
    if not found:
        return None
    if not any(told.parameters for told in found.values()):
        return caveat(
            ITEM,
            say("the two sides step no parameters of the same names"),
            say("check by hand that both sides' optimizers have the same settings"),
        )
    step, apart = evidence.step.number, _differing(found)
    for later in () if apart else _later(evidence):
        step, apart = later, _differing(_of_step(evidence, later, found))
        if apart:
            break
    if not apart:
        return opened(ITEM, joined((_alike(n, told) for n, told in found.items()), SEMICOLON))
    said = joined((_apart(name, step, told) for name, told in apart.items()), SEMICOLON)
    if any(told.differing for told in apart.values()):
        return caveat(
            ITEM, said, say("see what sets them: a schedule, a group's multiple, a default")
        )
    return caveat(
        ITEM,
        said,
        say("one back end leaves these out: weight_decay=0 on both sides computes the same"),
    )


def _later(evidence: Evidence) -> list[int]:
    both = {*evidence.benchmark.manifest.steps} & {*evidence.target.manifest.steps}
    return sorted(step for step in both if step > evidence.step.number)


def _of_step(evidence: Evidence, step: int, stages: Iterable[str]) -> dict[str, Told]:
    every = {
        name: optimizers.compare(evidence.benchmark, evidence.target, name, step) for name in stages
    }
    return {name: told for name, told in every.items() if told is not None}


def _differing(found: Mapping[str, Told]) -> dict[str, Told]:
    return {name: told for name, told in found.items() if told.settings}


def _alike(stage: str, told: Told) -> Said:
    return say(
        "{stage}: {settings} of {count} parameters are the same",
        stage=stage,
        settings=listed(told.names, 6),
        count=told.parameters,
    )


def _apart(stage: str, step: int, told: Told) -> Said:
    return say(
        "{stage} of step {step}, update {update}: {settings}",
        stage=stage,
        step=step,
        update=told.update,
        settings=joined((one.said for one in told.settings), COMMA),
    )
