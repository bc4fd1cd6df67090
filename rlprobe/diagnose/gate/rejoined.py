"""Whether a joined step began from the benchmark's state on every process, and as it was there."""

from __future__ import annotations

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, listed, opened, shut

ITEM = "state at the start"
_TRAINED = {stages.MODEL_ROLE[stage] for stage in stages.UPDATE_STAGES}
_OWN = (
    "the target's own updates end with each step, so that curves, and whether weights move from "
    "one step to the next, are not judged"
)


def check(evidence: Evidence) -> GateItem | None:
    """Item ``state at the start``; None where the step began from each side's own state."""
    step, target = evidence.step.number, evidence.target
    if not target.is_joined or step == 0:
        return None
    lines = [line for line in target.joined() if line["step"] == step]
    wanted = {(p.role, p.rank) for p in target.manifest.layout if p.role in _TRAINED}
    lacking = sorted(wanted - {(line["role"], line["rank"]) for line in lines})
    if lacking or not lines:
        said = listed([f"{role} on rank {rank}" for role, rank in lacking], 4) or "no model"
        return shut(
            ITEM,
            f"the benchmark's state was not loaded at step {step}: {said}",
            "run the target again: what it computed there is not of the benchmark's state",
        )
    parameters = sum(int(line.get("parameters") or 0) for line in lines)
    states = sum(int(line.get("states") or 0) for line in lines)
    text = (
        f"weights of {parameters} parameters and the optimizer's state of {states} loaded from the "
        f"benchmark; {_OWN}"
    )
    drawn = sorted({str(line["generators"]) for line in lines if line.get("generators")})
    if drawn:
        text += f"; random generators were not all put back ({listed(drawn, 2)})"
    rounded = sorted({str(name) for line in lines for name in line.get("rounded") or ()})
    if rounded:
        return caveat(
            ITEM,
            f"{text}; {len(rounded)} values are in formats that cannot hold the benchmark's: "
            f"{listed(rounded)}",
            "keep weights and optimizer state in one format on both sides",
        )
    return opened(ITEM, text)
