"""Whether both sides began from one checkpoint, where runs were resumed from any."""

from __future__ import annotations

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, opened, shut

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
        return None if benchmark is None else opened(ITEM, f"both began from {_said(benchmark)}")
    return shut(
        ITEM,
        f"the benchmark began from {_said(benchmark)}, the target from {_said(target)}",
        "begin both sides from one checkpoint (resume_from), and collect the benchmark with it",
    )


def _said(declared: object) -> str:
    if declared is None:
        return "the models as they are"
    step, _, digest = str(declared).partition(":")
    return f"the checkpoint of the trainer's step {step} ({digest[:12]})"
