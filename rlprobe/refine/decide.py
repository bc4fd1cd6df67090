"""What a closer look decides: the diagnosis with a cause that was observed or reproduced.

What was observed or reproduced takes the place of what statistics are consistent with; all else is
evidence.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from rlprobe.diagnose import sentence
from rlprobe.diagnose.diagnosis import (
    CONSISTENT,
    OBSERVED,
    REPRODUCED,
    UNKNOWN,
    Cause,
    Diagnosis,
    current,
)
from rlprobe.judge.forced import AFTER_PREFILL
from rlprobe.judge.inputs import Results
from rlprobe.judge.origin import REDUCTION_OVER_RANKS
from rlprobe.refine import region, substitution
from rlprobe.refine.difference import IMPLEMENTATION
from rlprobe.refine.refined import Refined, read
from rlprobe.refine.region import Region
from rlprobe.refine.substitution import Substituted
from rlprobe.refine.suspects import Plan
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import Said, replaced, restored, say


def sharpened(directory: Path, diagnosis: Diagnosis) -> Diagnosis:
    """A diagnosis with what an earlier refinement of the same runs found.

    Raises:
        DumpError: ``refined.json`` or ``alignment.json`` is damaged.
    """
    refined = read(directory)
    if refined is None:
        return diagnosis
    runs = Results.open(directory).plan.runs
    found = sharpen(diagnosis, refined, (runs[BENCHMARK].key, runs[TARGET].key))
    if found is diagnosis:
        return diagnosis
    after, where = substitution.read(directory), region.read(directory)
    if after is not None:
        found = _and_after(found, after)
    return found if where is None else _and_where(found, where)


def is_open(directory: Path, plan: Plan, refined: Refined) -> bool:
    """Whether a closer look leaves the cause unknown, so that the region is worth a replay.

    Raises:
        DumpError: the diagnosis is damaged.
    """
    keys = (plan.benchmark, plan.target)
    cause = sharpen(current(directory), refined, keys).cause
    after = substitution.read(directory)
    told = None if after is None else after.told
    return cause is not None and cause.known == UNKNOWN and told is None


def _and_after(diagnosis: Diagnosis, after: Substituted) -> Diagnosis:
    """The diagnosis with what is left when the suspect's outputs are the benchmark's."""
    cause = diagnosis.cause
    assert cause is not None
    fuller = msgspec.structs.replace(
        _told(cause, after), evidence=[*cause.evidence, *after.sentences]
    )
    text = replaced(
        _said(diagnosis.sentence, diagnosis),
        sentence.why(cause, diagnosis.messages),
        sentence.why(fuller, diagnosis.messages),
    )
    if after.agrees is False:
        text += _next(diagnosis, after)
    return msgspec.structs.replace(diagnosis, cause=fuller, sentence=text)


def _next(diagnosis: Diagnosis, after: Substituted) -> Said:
    """What parts behind the suspect: where the same code runs again, it may be no second thing."""
    where = after.next_module or after.next_record
    first = diagnosis.first
    ran = None if first is None or first.module != after.module else first.operator
    if ran is not None and ran == after.next_operator:
        return say(
            " {stage} parts again at {where}, a {operator} as well: the same difference once more, "
            "or a second one.",
            stage=after.stage,
            where=where,
            operator=ran,
        )
    return say(
        " There is a second difference in {stage}, at {where}.", stage=after.stage, where=where
    )


def _told(cause: Cause, after: Substituted) -> Cause:
    """What the suspect was told, where that makes the difference and no operator was seen to."""
    seen = cause.known == OBSERVED and cause.class_ != IMPLEMENTATION
    if after.told is None or seen or cause.class_ == "nondeterministic":
        return cause
    return Cause("hyperparameter", REPRODUCED, after.told, [])


def _and_where(diagnosis: Diagnosis, where: Region) -> Diagnosis:
    """The diagnosis with the region in which the difference is made, where its cause is open."""
    cause = diagnosis.cause
    assert cause is not None
    fuller = msgspec.structs.replace(cause, evidence=[*cause.evidence, where.sentence])
    text = _said(diagnosis.sentence, diagnosis)
    if cause.known == UNKNOWN and where.first is not None and where.last is not None:
        text += say(
            " The difference is made {where}.", where=region.between(where.first, where.last)
        )
    return msgspec.structs.replace(diagnosis, cause=fuller, sentence=text)


def sharpen(diagnosis: Diagnosis, refined: Refined, keys: tuple[str, str]) -> Diagnosis:
    """The diagnosis with what the closer look shows, if it is of the runs that were diagnosed.

    What was observed or reproduced takes the place of what statistics are consistent with; all
    else is evidence.
    """
    cause, first = diagnosis.cause, diagnosis.first
    if cause is None or first is None or (refined.benchmark, refined.target) != keys:
        return diagnosis
    if first.stage != refined.stage:
        return diagnosis
    evidence = list(cause.evidence)
    if refined.observed is not None and first.phase in AFTER_PREFILL:
        evidence.append(
            say(
                "operators are traced, and run again, in the prefill of prompt and response; what "
                "parts first is a later forward of that sample, which is not run again by itself"
            )
        )
    for seen in (refined.observed, refined.tried):
        evidence += [] if seen is None else map(refined.said, seen.evidence)
    evidence += [
        say("tensors of {record}: {line}", record=refined.record, line=refined.said(line))
        for line in refined.evidence
    ]
    found = _decided(cause, refined, diagnosis)
    if found.class_ == IMPLEMENTATION and _is_refuted(cause, refined, diagnosis):
        evidence.append(
            say(
                "statistics are consistent with a law that the elements of {record} do not obey "
                "within their floor: {law}",
                record=refined.record,
                law=_said(cause.statement, diagnosis),
            )
        )
    sharper = msgspec.structs.replace(found, evidence=evidence)
    text = replaced(
        _said(diagnosis.sentence, diagnosis),
        sentence.why(cause, diagnosis.messages),
        sentence.why(sharper, diagnosis.messages),
    )
    return msgspec.structs.replace(diagnosis, cause=sharper, sentence=text)


def unrefined(diagnosis: Diagnosis, failed: list[str]) -> Diagnosis:
    """A diagnosis that could not be refined, with the reasons among its evidence."""
    cause = diagnosis.cause
    if cause is None:
        return diagnosis
    said = [say("refining failed, {reason}", reason=reason) for reason in failed]
    evidence = [*cause.evidence, *said]
    return msgspec.structs.replace(
        diagnosis, cause=msgspec.structs.replace(cause, evidence=evidence)
    )


def awaited(diagnosis: Diagnosis, plan: Plan) -> Diagnosis:
    """A diagnosis whose refinement waits for the benchmark's half from its own site."""
    cause = diagnosis.cause
    if cause is None:
        return diagnosis
    said = (
        "the cause can be looked at further: the target's operators and tensors are here, the "
        f"benchmark's are to be made at its own site with `{plan.elsewhere}`; then here "
        f"`{plan.afterwards}`"
    )
    fuller = msgspec.structs.replace(cause, evidence=[*cause.evidence, said])
    return msgspec.structs.replace(diagnosis, cause=fuller)


#: Classes that an operator's meaning leaves open, and what numbers may obey within them: elements
#: that are moved may be samples, or tokens of one, and other data another sample's. What multiplies
#: or moves gradients that agree before they are reduced is of their reduction.
_WITHIN = {
    "constant_factor": ("reduction",),
    "layout": ("row_order", "label_or_mask_shift", "reduction"),
    "label_or_mask_shift": ("row_order",),
    "data": ("row_order",),
    # other operators in clipping, where each rank's gradients have a factor of their own: that they
    # ran makes it no more than consistent
    "optimizer": ("reduction",),
}


#: Classes that an experiment shows whatever the operators are: who attends to whom, and that both
#: sides compute the same where nothing is rounded.
_SHOWN = ("mask", "rounding_order")


#: Classes of what a stage or module was given: which law its numbers obey says how it differs.
_CAME_IN = ("data", "position")


def _decided(cause: Cause, refined: Refined, diagnosis: Diagnosis) -> Cause:
    """The best known cause, without its evidence."""
    observed, tried = refined.observed, refined.tried
    law = _said(cause.statement, diagnosis)
    random = _random(refined)
    if random is not None or not refined.repeated:
        return random or cause
    if observed is not None and cause.class_ in _WITHIN.get(observed.cause, ()):
        together = _beside if observed.cause == "optimizer" else _both
        return together(cause, law, refined.said(observed.statement))
    if observed is not None and observed.cause not in ("unknown", IMPLEMENTATION):
        return Cause(observed.cause, OBSERVED, refined.said(observed.statement), [])
    if tried is not None and tried.cause in _SHOWN:
        return Cause(tried.cause, REPRODUCED, refined.said(tried.statement), [])
    floor = _floor(diagnosis) if refined.floor is None else refined.floor
    reproduced = _reproduced(refined, floor)
    if reproduced is not None:
        known = cause.class_ if cause.class_ in _CAME_IN else reproduced.class_
        return msgspec.structs.replace(reproduced, class_=known)
    if observed is not None and observed.cause == IMPLEMENTATION:
        return _of_other_operators(cause, law, refined, diagnosis)
    if cause.class_ == "unknown" and tried is not None and tried.cause != "unknown":
        return Cause(tried.cause, REPRODUCED, refined.said(tried.statement), [])
    return cause


def _random(refined: Refined) -> Cause | None:
    """That a side does not repeat itself; it may be why the runs do not repeat each other."""
    tried, observed = refined.tried, refined.observed
    if tried is not None and tried.cause == "nondeterministic":
        return Cause(tried.cause, REPRODUCED, refined.said(tried.statement), [])
    if observed is not None and observed.cause == "nondeterministic":
        return Cause(observed.cause, OBSERVED, refined.said(observed.statement), [])
    return None


#: Classes of what parts between records that were judged and agree, and of records that are causes
#: by themselves: these were seen, and are no law of numbers.
_RECORDED = ("accumulation", "data", "loss", "nonfinite", "optimizer", "routing", "weights")
#: Classes of laws that are held against every element where tensors were kept.
_OF_ELEMENTS = ("constant_factor", "layout", "saturation")


def _of_other_operators(cause: Cause, law: Said, refined: Refined, diagnosis: Diagnosis) -> Cause:
    """Other operators ran, and no law was reproduced: that they ran makes none observed."""
    assert refined.observed is not None
    operators = refined.said(refined.observed.statement)
    if cause.known in (OBSERVED, REPRODUCED) or _is_recorded(cause, diagnosis):
        return _both(cause, law, operators)
    # that other operators make small errors of either sign is no rounding that anybody saw
    if cause.class_ in ("unknown", "rounding_order") or _is_refuted(cause, refined, diagnosis):
        return Cause(IMPLEMENTATION, OBSERVED, operators, [])
    return _beside(cause, law, operators)


def _is_recorded(cause: Cause, diagnosis: Diagnosis) -> bool:
    """Whether a class says where records part, or which do, as they were judged."""
    first = diagnosis.first
    reduced = first is not None and first.operator == REDUCTION_OVER_RANKS
    return cause.class_ in _RECORDED or (reduced and cause.class_ == "reduction")


def _is_refuted(cause: Cause, refined: Refined, diagnosis: Diagnosis) -> bool:
    """Whether statistics obey a law that the elements of the same record do not."""
    if cause.class_ not in _OF_ELEMENTS or cause.known != CONSISTENT:
        return False
    # a floor of its own has the record that is looked at where it is not the one that parts
    known = bool(refined.error) and refined.floor is None
    # without a floor nothing tells whether a law that holds of the elements leaves noise alone
    return known and (refined.cause != cause.class_ or _floor(diagnosis) is not None)


def _both(cause: Cause, law: Said, operators: Said) -> Cause:
    """The law's class, and the operators that were seen to do what it says, or records that do."""
    said = say("{operators}; the numbers: {law}", operators=operators, law=law)
    return Cause(cause.class_, OBSERVED, said, [])


def _beside(cause: Cause, law: Said, operators: Said) -> Cause:
    """The law's class as it was known, and operators that differ and mean nothing by themselves."""
    said = say("{law}; observed beside it: {operators}", law=law, operators=operators)
    return Cause(cause.class_, CONSISTENT, said, [])


def _reproduced(refined: Refined, floor: float | None) -> Cause | None:
    """The law that makes the target's tensor of the benchmark's within the floor."""
    if refined.cause is None or refined.error is None or floor is None:
        return None
    left = math.sqrt(max(refined.left, 0.0)) * refined.error / floor if floor else 0.0
    if left > 1.0 and refined.left != 0.0:
        return None
    law = refined.said(refined.law)
    said = say("{law}; {left:.2g} of the noise floor is left", law=law, left=left)
    return Cause(refined.cause, REPRODUCED, said, [])


def _floor(diagnosis: Diagnosis) -> float | None:
    floor = diagnosis.noise.get("first", {}).get("floor")
    return float(floor) if isinstance(floor, (int, float)) else None


def _said(text: str, diagnosis: Diagnosis) -> Said:
    """One of a diagnosis's sentences, with how it was made."""
    return text if isinstance(text, Said) else restored(text, diagnosis.messages)
