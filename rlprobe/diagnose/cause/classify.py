"""The cause class of a first divergence: what differs there, and which law it obeys."""

from __future__ import annotations

import polars as pl

from rlprobe.diagnose.cause import around, attention, gradients, losses, modules
from rlprobe.diagnose.cause.hypotheses import ALL
from rlprobe.diagnose.cause.hypothesis import Found, fits, weigh
from rlprobe.diagnose.diagnosis import CONSISTENT, OBSERVED, UNKNOWN, Cause, Known
from rlprobe.diagnose.gate.evidence import Shut
from rlprobe.dumps.schema import FLOATS
from rlprobe.judge import analysis, execution
from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import OUTCOME, Finding, Step
from rlprobe.judge.tokens import Profile
from rlprobe.said import Said, say


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
    if finding.origin.kind == kinds.CUT:
        # the records themselves show it
        reason = finding.origin.reason
        return Cause("implementation", OBSERVED, reason, [reason])
    if finding.origin.kind == kinds.BUFFER:
        return _kept(finding, finding.origin)
    if finding.origin.kind == kinds.SETTING:
        return _told(finding, finding.origin)
    argument = _argument(finding.origin)
    if argument is not None:
        return Cause("hyperparameter", OBSERVED, argument, [argument, finding.origin.reason])
    found = judged(step, finding, world_size, profile)
    known: Known = UNKNOWN if found.cause == UNKNOWN else CONSISTENT
    statement = NOTHING if known == UNKNOWN else found.said[-1]
    evidence: dict[str, None] = dict.fromkeys([finding.origin.reason, *found.said])
    return Cause(found.cause, known, statement, list(evidence))


def _argument(origin: kinds.Origin) -> Said | None:
    """Which plain number or truth value its own code gave an operator otherwise on the two sides.

    Whole numbers are left out: sizes and lengths are what was given, not what anybody chose.
    """
    if origin.kind not in (kinds.GLUE, kinds.MODULE, kinds.STAGE_INPUT):
        return None  # what is of no record has other columns
    row = origin.row
    b, t = row["value_benchmark"], row["value_target"]
    said = row["slot"] == "input" and row["shape_benchmark"] is row["shape_target"] is None
    if not said or not {row["dtype_benchmark"], row["dtype_target"]} <= {*FLOATS, "bool", "bool_"}:
        return None
    if b is None or t is None or b == t:
        return None
    told = say(
        "{operator} is told {target} on the target and {benchmark} on the benchmark (argument "
        "{index})",
        operator=row["op"] or origin.operator or row["name"],
        target=t,
        benchmark=b,
        index=row["index"] or "0",
    )
    return told if origin.module is None else told + say(", in {module}", module=origin.module)


def _told(finding: Finding, origin: kinds.Origin) -> Cause:
    """What an optimizer was told, which both sides recorded, and what came of it."""
    beyond = finding.stage.rows.filter(
        analysis.HELD & pl.col("beyond") & (pl.col("phase") == execution.CHANGES)
    )
    came = (
        say("{count} changes of parameters are beyond their floor", count=beyond.height)
        if beyond.height
        else say("changes of parameters differ by less than their floor")
    )
    told = finding.told
    switched = told is not None and any(one.is_switch for one in told.differing)
    # another number in the same computation, or another computation
    cause = "optimizer" if switched else "hyperparameter"
    return Cause(cause, OBSERVED, origin.reason, [origin.reason, came])


#: What a buffer that differs is, by its name; running statistics and the like are state.
_OF_BUFFERS = (("rotary", "position"), ("freq", "position"), ("mask", "mask"))


def _kept(finding: Finding, origin: kinds.Origin) -> Cause:
    """What a module keeps beside its parameters, which both sides recorded."""
    assert finding.buffers is not None and origin.module is not None
    name = f"{origin.module}.{origin.operator}"
    own = next(one for one in finding.buffers.beyond if one.name == name)
    of_name = next((cause for word, cause in _OF_BUFFERS if word in name), "weights")
    cause = "rounding_order" if own.is_shorter else of_name
    evidence: dict[str, None] = dict.fromkeys([origin.reason, finding.buffers.said])
    return Cause(cause, OBSERVED, origin.reason, list(evidence))


def judged(
    step: Step, finding: Finding, world_size: int = 1, profile: Profile | None = None
) -> Found:
    """What the numbers at a finding's origin are consistent with."""
    origin = finding.origin
    assert origin is not None
    scene = around.Scene(step, finding, origin, world_size, profile)
    found = _symptoms(scene)
    return weigh(fits(ALL, found.differences), found.seen)


def _symptoms(scene: around.Scene) -> around.Symptoms:
    kind = scene.origin.kind
    if kind == OUTCOME:
        return losses.outcome(scene)
    if kind == kinds.LOSS:
        return losses.loss(scene)
    if kind == kinds.OPTIMIZER:
        return gradients.optimizer(scene)
    if kind not in (kinds.MODULE, kinds.GLUE, kinds.STAGE_INPUT):
        return gradients.parameters(scene)
    if scene.row.get("direction") == "backward":
        return gradients.activations(scene)
    if attention.is_one(scene):
        return attention.symptoms(scene)
    return modules.symptoms(scene)


def of_gate(shut: Shut) -> Cause:
    """What shut the gate, as a cause."""
    evidence: list[str] = [*shut.evidence]
    return Cause(shut.cause, OBSERVED, evidence[0] if evidence else "", evidence)


#: What is said where no law holds.
NOTHING = say("no law that is known of explains the difference")
