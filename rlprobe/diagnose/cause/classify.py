"""The cause class of a first divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlprobe.diagnose.cause import clipped, gradients, modules, results
from rlprobe.diagnose.cause.found import Found
from rlprobe.diagnose.cause.shape import Shape, of
from rlprobe.diagnose.diagnosis import CONSISTENT, OBSERVED, UNKNOWN, Cause, Known
from rlprobe.diagnose.gate.evidence import Shut
from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import OUTCOME, Finding, Step
from rlprobe.judge.origin import Origin
from rlprobe.judge.tokens import Profile

#: Largest finite numbers; a device that saturates stops there instead of at infinity. Whatever a
#: record's own format is: a kernel may have computed in a smaller one.
_LARGEST = {
    448.0: "float8_e4m3",
    57344.0: "float8_e5m2",
    65504.0: "float16",
    3.3895313892515355e38: "bfloat16",
    3.4028234663852886e38: "float32",
}


@dataclass(frozen=True)
class Scene:
    """What a classifier looks at."""

    step: Step
    finding: Finding
    origin: Origin
    shape: Shape
    world_size: int
    #: How the error lies along the sequence behind the origin's block; None where nothing tells.
    profile: Profile | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The first record that parts."""
        return self.origin.row


def classify(
    step: Step, finding: Finding, world_size: int, profile: Profile | None = None
) -> Cause:
    """The class of a stage's origin; "unknown" where nothing speaks for any.

    Args:
        step: the judged step.
        finding: the stage that parts.
        world_size: processes of the target.
        profile: of the first block behind a forward origin (:func:`tokens.profile`).

    Raises:
        ValueError: the finding has no origin.
    """
    if finding.origin is None:
        raise ValueError("a stage that does not part has no cause")
    scene = Scene(step, finding, finding.origin, of(finding.origin.row), world_size, profile)
    found = _numbers(scene) or _by_kind(scene)
    known: Known = UNKNOWN if found.cause == UNKNOWN else CONSISTENT
    statement = NOTHING if known == UNKNOWN else found.said[-1]
    evidence = dict.fromkeys([finding.origin.reason, *found.said])
    return Cause(found.cause, known, statement, list(evidence))


def of_gate(shut: Shut) -> Cause:
    """What shut the gate, as a cause."""
    return Cause(shut.cause, OBSERVED, shut.evidence[0] if shut.evidence else "", shut.evidence)


#: What is said where no law holds.
NOTHING = "no law that is known of explains the difference"


def _numbers(scene: Scene) -> Found | None:
    """Saturation and what is not finite speak before anything else."""
    row = scene.row
    sides = {
        side: max(abs(row.get(f"max_{side}") or 0.0), abs(row.get(f"min_{side}") or 0.0))
        for side in ("benchmark", "target")
    }
    stopped = [side for side, value in sides.items() if value in _LARGEST]
    if len(stopped) == 1 and not _is_mask(row):
        limit = sides[stopped[0]]
        other = sides["target" if stopped[0] == "benchmark" else "benchmark"]
        return Found("saturation", [
            f"the {stopped[0]} stops at {limit:g}, the largest {_LARGEST[limit]}; the other side "
            f"has {other:g}"
        ])  # fmt: skip
    if row.get("status") == "nonfinite":
        said = f"the {row.get('reason')} is not finite at {row['name']}; everything before it is"
        # of a result of the stage, how many values are not is said where it was found
        whole = scene.origin.kind == OUTCOME
        return Found("nonfinite", [scene.origin.reason if whole else said])
    if row.get("other_format"):
        return Found("rounding_order", [
            f"the output is {row['dtype_benchmark']} on the benchmark and {row['dtype_target']} on "
            "the target, although both were asked for one precision (an autocast, a cast, a "
            "module that was loaded in another format)"
        ])  # fmt: skip
    inside = scene.origin.kind in (kinds.MODULE, kinds.GLUE) and not _is_mask(row)
    cut = clipped.said(row) if inside and not scene.shape.scaled else None
    return None if cut is None else Found("saturation", [cut])


def _is_mask(row: dict[str, Any]) -> bool:
    return "mask" in str(row.get("index"))


def _by_kind(scene: Scene) -> Found:
    kind = scene.origin.kind
    if kind in (kinds.MODULE, kinds.GLUE, kinds.STAGE_INPUT):
        if scene.row.get("direction") == "backward":
            return gradients.backward(scene.finding, scene.shape, scene.row)
        return modules.forward(scene.finding, scene.origin, scene.shape, scene.profile)
    if kind == OUTCOME:
        return results.outcome(scene.step, scene.finding, scene.origin)
    if kind == kinds.LOSS:
        return results.loss(scene.step, scene.finding, scene.shape, scene.row)
    if kind == kinds.OPTIMIZER:
        return gradients.optimizer(scene.finding)
    return gradients.accumulated(scene.finding, scene.origin, scene.shape, scene.world_size)
