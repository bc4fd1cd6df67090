"""The card of the first divergence, or of what shut the gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from rlprobe.diagnose.diagnosis import NOT_COMPARABLE, Diagnosis, First
from rlprobe.dumps import records
from rlprobe.errors import ReplayError
from rlprobe.judge.analysis import Finding, Step
from rlprobe.rollouts import hdf5
from rlprobe.store.read import Run

#: Longest decoded text shown.
_TEXT = 1200


@dataclass(frozen=True)
class SampleText:
    """A sample, decoded."""

    id: str
    token: int | None
    prompt: str
    response: str


@dataclass(frozen=True)
class Card:
    """What is said about the first divergence."""

    title: str
    where: str
    #: Label, value, meaning.
    pairs: list[tuple[str, str, str]]
    cause: str | None
    confidence: float
    evidence: list[str]
    values: list[tuple[str, str, str]]
    sample: SampleText | None
    stack: str | None


def build(found: Diagnosis, step: Step, benchmark: Run, target: Run) -> Card | None:
    """The card; None where nothing parts."""
    first = found.first
    if first is None:
        return None
    shut = found.verdict == NOT_COMPARABLE
    finding = step.findings.get(first.stage)
    return Card(
        title="What shut the gate" if shut else "First divergence",
        where=f"{first.stage} / {first.module or first.operator or 'unknown'}",
        pairs=_pairs(first, found, target),
        cause=None if found.cause is None else found.cause.class_.replace("_", " "),
        confidence=0.0 if found.cause is None else found.cause.confidence,
        evidence=[] if found.cause is None else found.cause.evidence,
        values=_values(first),
        sample=_sample(first, benchmark, step.number),
        stack=None if shut or finding is None else _stack(finding, first, benchmark),
    )


def _pairs(first: First, found: Diagnosis, target: Run) -> list[tuple[str, str, str]]:
    begin = target.manifest.first_step
    own = "" if begin is None else f"the trainer's own number is {begin + first.step}"
    pairs = [("step", str(first.step), own), ("rank", str(first.rank), "")]
    for label, value in (("module", first.module), ("operator", first.operator)):
        if value:
            pairs.append((label, value, ""))
    if first.call is not None:
        pairs.append(("call", str(first.call), "how often it had run in this stage, from 0"))
    numbers = found.noise.get("first") or {}
    if numbers.get("record"):
        pairs.append(("record", str(numbers["record"]), "the first beyond its floor"))
    for key, label, meaning in (
        ("error", "error", "relative L2 difference"),
        ("floor", "floor", "what round-off explains"),
        ("ratio", "ratio", "above 1 it cannot be noise"),
        ("R", "R", "target's error over the benchmark's own, against high precision"),
    ):
        value = numbers.get(key)
        if value is not None:
            text = f"{value:.3g}" if isinstance(value, int | float) else str(value)
            pairs.append((label, text, meaning))
    return pairs


def _values(first: First) -> list[tuple[str, str, str]]:
    names = [*first.benchmark, *(n for n in first.target if n not in first.benchmark)]
    return [
        (name, _shown(first.benchmark.get(name)), _shown(first.target.get(name)))
        for name in names
        if name != "record"
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list):
        return "[" + ", ".join(str(item) for item in value[:12]) + "]"
    return str(value)


def _sample(first: First, benchmark: Run, step: int) -> SampleText | None:
    path = benchmark.rollouts.get(step)
    if first.sample is None or path is None:
        return None
    try:
        found = next(
            (s for s in hdf5.read(path).samples if first.sample in (s.sample_digest, s.id)), None
        )
    except ReplayError:
        return None  # the gate has said that the rollouts cannot be read
    if found is None:
        return None
    return SampleText(found.id, first.token, found.prompt_text[:_TEXT], found.response_text[:_TEXT])


def _stack(finding: Finding, first: First, benchmark: Run) -> str | None:
    """The call stack of the first record on the benchmark, where one was recorded."""
    if finding.origin is None or not benchmark.manifest.stages.get(first.stage):
        return None
    name = finding.origin.row.get("name_benchmark") or finding.origin.row.get("name")
    rows = (
        records.scan(benchmark.records(first.stage))
        .filter(
            (pl.col("step") == first.step)
            & (pl.col("rank") == first.rank)
            & (pl.col("name") == name)
            & pl.col("stack").is_not_null()
        )
        .select("stack")
        .head(1)
        .collect()
    )
    return str(rows.item()) if rows.height else None
