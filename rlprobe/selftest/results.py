"""What the self-test found of each case, and the file that says so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlprobe.selftest.catalogue import Case
from rlprobe.selftest.score import FAILED, Found, Right, Tally, expected, false_alarms

#: Verdict of a case whose pipeline did not come to an end.


@dataclass(frozen=True)
class Weaker:
    """A fault weakened to twice the floor, or why it could not be."""

    strength: float
    found: Found | None
    reason: str = ""


@dataclass
class Result:
    """One case after all passes that were asked for."""

    case: Case
    full: Found
    seconds: float
    #: What ended the pipeline, where something did.
    error: str = ""
    #: First step that it was planted in.
    step: int = 0
    weakened: Weaker | None = None
    tensors: Found | None = None
    #: What the first pass's diagnosis became when its suspects were looked at.
    refined: Found | None = None
    #: A benign change with other rollouts: seed -> found.
    seeds: dict[int, Found] = field(default_factory=dict)

    @property
    def is_benign(self) -> bool:
        return self.case.declared.is_benign

    def right(self, found: Found) -> Right:
        return Right.of(self.case.declared, found, self.step)

    def as_dict(self) -> dict[str, Any]:
        """A row of the result file; the passes after the first stand in keys of their own."""
        row: dict[str, Any] = {
            "name": self.case.name,
            "expected": expected(self.case.declared),
            "found": self.full.as_dict(),
            "ratio": _plain(self.full.ratio),
            "seconds": round(self.seconds, 2),
        }
        if self.error:
            row["error"] = self.error
        if self.step:
            row["step"] = self.step
        if self.weakened is not None:
            weaker = self.weakened
            row["weakened"] = {
                "strength": weaker.strength,
                "found": weaker.found.as_dict() if weaker.found else None,
                "ratio": _plain(weaker.found.ratio) if weaker.found else None,
                "reason": weaker.reason or None,
            }
        if self.tensors is not None:
            row["tensors"] = {
                "found": self.tensors.as_dict(),
                "ratio": _plain(self.tensors.ratio),
            }
        if self.refined is not None:
            row["refined"] = {"found": self.refined.as_dict()}
        if self.seeds:
            row["seeds"] = [
                {"seed": seed, "found": found.as_dict(), "ratio": _plain(found.ratio)}
                for seed, found in sorted(self.seeds.items())
            ]
        return row


def _plain(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return value if value is None or math.isfinite(value) else str(value)


#: A class that is named and is none of those declared.
WRONG = "wrong class asserted"


def _known(found: Iterable[tuple[Result, Found]]) -> dict[str, int]:
    """How causes are known, the wrong ones among them, and how those are said to be known."""
    counts = Counter({WRONG: 0})
    for result, each in found:
        known = each.known or "none"
        counts[known] += 1
        if result.right(each).asserted_wrongly:
            counts[WRONG] += 1
            counts[f"{WRONG}, {known}"] += 1
    return dict(counts)


@dataclass(frozen=True)
class Scores:
    """The tallies of all passes."""

    full: Tally
    weakened: Tally
    tensors: Tally
    refined: Tally
    #: Pass -> how the causes of faults are known, and how many asserted classes are wrong.
    known: dict[str, dict[str, int]]
    not_scalable: dict[str, str]
    alarms: int
    #: Benign runs that were judged, and those that failed.
    benign: int
    failed: int

    @classmethod
    def of(cls, results: list[Result]) -> Scores:
        faults = [r for r in results if not r.is_benign]
        benign = [
            found
            for r in results
            if r.is_benign
            for found in (r.full, *([r.tensors] if r.tensors else []), *r.seeds.values())
        ]
        return cls(
            full=Tally.of(r.right(r.full) for r in faults),
            weakened=Tally.of(
                r.right(r.weakened.found) for r in faults if r.weakened and r.weakened.found
            ),
            tensors=Tally.of(r.right(r.tensors) for r in faults if r.tensors),
            refined=Tally.of(r.right(r.refined) for r in faults if r.refined),
            known={
                "full strength": _known((r, r.full) for r in faults),
                "refined": _known((r, r.refined) for r in faults if r.refined),
                "tensors": _known((r, r.tensors) for r in faults if r.tensors),
                "twice the floor": _known(
                    (r, r.weakened.found) for r in faults if r.weakened and r.weakened.found
                ),
            },
            not_scalable={
                r.case.name: r.weakened.reason
                for r in faults
                if r.weakened and r.weakened.found is None
            },
            alarms=false_alarms(benign),
            benign=sum(found.verdict != FAILED for found in benign),
            failed=sum(found.verdict == FAILED for found in benign),
        )

    def shortfalls(self) -> list[str]:
        """What falls short of what is asked for, in words."""
        found = [
            f"{name}: {line}"
            for name, tally in (
                ("full strength", self.full),
                ("weakened", self.weakened),
                ("tensors", self.tensors),
                ("refined", self.refined),
            )
            for line in tally.shortfalls(cause=name == "refined")
        ]
        for name, known in self.known.items():
            if known.get(WRONG):
                found.append(f"{name}: a wrong class was asserted of {known[WRONG]} faults")
        if self.alarms:
            found.append(f"{self.alarms} of {self.benign} benign runs alarmed")
        if self.failed:
            found.append(f"{self.failed} benign runs failed and were not judged")
        return found
