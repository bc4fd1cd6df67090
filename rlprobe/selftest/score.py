"""What was found against what was planted, and how good that is over many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.faults.declare import Declaration

#: Shares that the self-test asks for.
STAGE_BAR, MODULE_BAR, CAUSE_BAR = 1.0, 0.9, 0.8
ALIGNED = "aligned"
#: A run or comparison that ended with an error has no verdict.
FAILED = "failed"


@dataclass(frozen=True)
class Found:
    """A diagnosis in the terms of a declaration."""

    verdict: str
    stage: str | None = None
    module: str | None = None
    cause: str | None = None
    #: How the cause is known.
    known: str | None = None
    #: The origin record's error over its floor; the largest of all judged where nothing parts.
    ratio: float | None = None
    #: Captured step where the sides part.
    step: int | None = None

    @classmethod
    def of(cls, diagnosis: Diagnosis, ratio: float | None) -> Found:
        first, cause = diagnosis.first, diagnosis.cause
        return cls(
            verdict=diagnosis.verdict,
            stage=first.stage if first else None,
            module=first.module if first else None,
            cause=cause.class_ if cause else None,
            step=first.step if first else None,
            known=cause.known if cause else None,
            ratio=ratio,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "stage": self.stage,
            "module": self.module,
            "cause": self.cause,
            "known": self.known,
        }


def expected(declared: Declaration) -> dict[str, Any]:
    """A declaration as the result file gives it; several acceptable causes are a list."""
    causes = list(declared.cause)
    return {
        "verdict": declared.verdict,
        "stage": declared.stage,
        "module": declared.module,
        "cause": (causes[0] if len(causes) == 1 else causes) if causes else None,
    }


@dataclass(frozen=True)
class Right:
    """What of a fault's diagnosis is right. Without the verdict, nothing else counts."""

    verdict: bool
    stage: bool
    module: bool
    cause: bool
    #: A class is named, and it is none of those declared.
    asserted_wrongly: bool = False

    @classmethod
    def of(cls, declared: Declaration, found: Found, planted: int = 0) -> Right:
        """Hold a diagnosis against what was declared.

        Args:
            declared: of the fault.
            found: of the diagnosis.
            planted: first step that the fault was in; a stage of an earlier one is not it.
        """
        verdict = found.verdict == declared.verdict
        early = planted > 0 and (found.step is None or found.step < planted)
        stage = verdict and found.stage == declared.stage and not early
        return cls(
            verdict=verdict,
            stage=stage,
            module=stage and found.module == declared.module,
            cause=verdict and found.cause in declared.cause,
            asserted_wrongly=found.cause not in (None, "unknown", *declared.cause),
        )


@dataclass(frozen=True)
class Tally:
    """How many of a number of faults were right."""

    total: int
    verdict: int
    stage: int
    module: int
    cause: int

    @classmethod
    def of(cls, results: Iterable[Right]) -> Tally:
        known = list(results)

        def count(what: Callable[[Right], bool]) -> int:
            return sum(map(what, known))

        return cls(
            len(known),
            count(lambda r: r.verdict),
            count(lambda r: r.stage),
            count(lambda r: r.module),
            count(lambda r: r.cause),
        )

    def shortfalls(self, *, cause: bool = True) -> list[str]:
        """Which bars are missed, in words; empty when none is or there was nothing to find.

        Args:
            cause: whether the class is asked for: statistics alone need not know it.
        """
        if not self.total:
            return []
        bars = (
            ("stage", self.stage, STAGE_BAR),
            ("module", self.module, MODULE_BAR),
            ("cause", self.cause, CAUSE_BAR),
        )
        return [
            f"{what} right in {count} of {self.total}, asked for {bar:.0%}"
            for what, count, bar in bars
            if count < bar * self.total and (cause or what != "cause")
        ]


def upper_bound(alarms: int, runs: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson bound on the rate of false alarms.

    The largest rate at which ``alarms`` or fewer in ``runs`` still happen with probability
    1 - confidence: 0 of 60 gives 0.0487 (C. J. Clopper, E. S. Pearson, Biometrika 26, 1934).

    Raises:
        ValueError: there are no runs, or more alarms than runs.
    """
    if not 0 <= alarms <= runs or runs == 0:
        raise ValueError(f"{alarms} alarms in {runs} runs")
    if alarms == runs:
        return 1.0
    low, high = alarms / runs, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(alarms, runs, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(count: int, runs: int, rate: float) -> float:
    """Probability of at most ``count`` events in ``runs`` at ``rate``."""
    return sum(math.comb(runs, k) * rate**k * (1 - rate) ** (runs - k) for k in range(count + 1))


def false_alarms(found: Sequence[Found]) -> int:
    """How many diagnoses of benign changes are not ``aligned``; a run that failed has none."""
    return sum(item.verdict not in (ALIGNED, FAILED) for item in found)
