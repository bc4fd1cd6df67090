"""The card of the first divergence, or of what shut the gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl
from markupsafe import Markup

from rlprobe.diagnose.diagnosis import NOT_COMPARABLE, Diagnosis, First
from rlprobe.dumps import records
from rlprobe.errors import ReplayError
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.extent import TRAINER
from rlprobe.report import words
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
class Input:
    """Something that the call of the first record was given."""

    name: str
    error: float | None
    floor: float | None
    norm_benchmark: float | None
    norm_target: float | None


@dataclass(frozen=True)
class Card:
    """What is said about the first divergence."""

    #: Whether this is what refused the comparison.
    shut: bool
    where: str
    #: Label, value, meaning.
    pairs: list[tuple[Markup, str, Markup]]
    #: The cause in words; None where nothing is said of it.
    cause: Markup | None
    class_: str
    known: str
    evidence: list[Markup]
    values: list[tuple[Markup, str, str]]
    #: None of what takes no inputs: a number that the trainer reports.
    inputs: list[Input] | None
    sample: SampleText | None
    #: Side and call stack.
    stacks: list[tuple[str, str]]


def headline(found: Diagnosis) -> Markup | None:
    """The cause in words, for the first line; None where it is not known."""
    cause = found.cause
    if cause is None or cause.class_ == "unknown":
        return None
    return words.sentence(cause.statement, found.messages)


def build(
    found: Diagnosis, step: Step, benchmark: Run, target: Run, *, texts: bool = True
) -> Card | None:
    """The card; None where nothing parts."""
    first = found.first
    if first is None:
        return None
    shut = found.verdict == NOT_COMPARABLE
    finding = None if shut else step.findings.get(first.stage)
    cause = found.cause
    return Card(
        shut=shut,
        where=f"{first.stage} / {first.module or first.operator or 'unknown'}",
        pairs=_pairs(first, found, target),
        cause=None if cause is None else words.sentence(cause.statement, found.messages),
        class_="" if cause is None else cause.class_,
        known="unknown" if cause is None else cause.known,
        evidence=[]
        if cause is None
        else [words.sentence(line, found.messages) for line in cause.evidence],
        values=_values(first),
        inputs=None if first.stage == TRAINER else [] if finding is None else _inputs(finding),
        sample=_sample(first, benchmark, step.number, texts=texts),
        stacks=[] if finding is None else _stacks(finding, first, benchmark, target),
    )


def _inputs(finding: Finding) -> list[Input]:
    """What the call of the record that parts was given, as recorded on both sides."""
    if finding.origin is None:
        return []
    row = finding.origin.row
    known = ("rank", "module", "op", "call", "direction", "micro_batch")
    same = [pl.col(name).eq_missing(pl.lit(row.get(name))) for name in known if name in row]
    if len(same) < len(known) or row.get("call") is None:
        return []
    rows = finding.stage.rows.filter(*same, pl.col("slot") == "input")
    return [
        Input(*values)
        for values in rows.select(
            "name", "error", "floor", "norm_benchmark", "norm_target"
        ).iter_rows()
    ]


def _pairs(first: First, found: Diagnosis, target: Run) -> list[tuple[Markup, str, Markup]]:
    begin = target.manifest.first_step
    own = words.both("trainers_step", step=begin + first.step) if begin is not None else _NOTHING
    pairs = [("step", str(first.step), own)]
    named = [("rank", str(first.rank)), ("module", first.module), ("operator", first.operator)]
    if first.stage == TRAINER:  # a number of the run as a whole
        named = [("metric", first.operator)]
    for label, value in named:
        if value:
            pairs.append((label, value, _NOTHING))
    if first.call is not None:
        pairs.append(("call", str(first.call), words.both("call_means")))
    numbers = found.noise.get("first") or {}
    if numbers.get("record"):
        pairs.append(("record", str(numbers["record"]), words.both("record_means")))
    for label in ("error", "floor", "ratio", "R"):
        value = numbers.get(label)
        if value is not None:
            text = f"{value:.3g}" if isinstance(value, int | float) else str(value)
            pairs.append((label, text, words.both(f"{label}_means".lower())))
    return [
        (words.both(label) if label != "R" else Markup("R"), value, meaning)
        for label, value, meaning in pairs
    ]


_NOTHING = Markup()


def _values(first: First) -> list[tuple[Markup, str, str]]:
    names = [*first.benchmark, *(n for n in first.target if n not in first.benchmark)]
    return [
        (words.value(name), _shown(first.benchmark.get(name)), _shown(first.target.get(name)))
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


def _sample(first: First, benchmark: Run, step: int, *, texts: bool) -> SampleText | None:
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
    if not texts:
        return SampleText(found.id, first.token, "", "")
    return SampleText(found.id, first.token, found.prompt_text[:_TEXT], found.response_text[:_TEXT])


def _stacks(finding: Finding, first: First, benchmark: Run, target: Run) -> list[tuple[str, str]]:
    """The call stack of the first record on either side, where one was recorded."""
    if finding.origin is None:
        return []
    row = finding.origin.row
    found = []
    for side, run in (("benchmark", benchmark), ("target", target)):
        name = row.get(f"name_{side}") or row.get("name")
        known = _recorded(run, first.stage, first.step, [str(name)])
        if known:
            found.append((side, next(iter(known.values()))))
    return found


#: Records whose stacks are on the page, per stage: those beyond their floor, then each module's.
_STACKS = 400


def stacks(step: Step, benchmark: Run, target: Run, stages: list[str]) -> dict[str, dict[str, str]]:
    """Call stacks by ``stage|record``, a side's own under its name."""
    found: dict[str, dict[str, str]] = {}
    for stage in stages:
        finding = step.findings.get(stage)
        if finding is None:
            continue
        rows = finding.stage.rows.filter(pl.col("module").is_not_null())
        wanted = pl.concat(
            [rows.filter(pl.col("beyond")), rows.unique("module", maintain_order=True)]
        ).unique("name", maintain_order=True)
        for side, run in (("benchmark", benchmark), ("target", target)):
            own = pl.coalesce(f"name_{side}", "name")
            names = wanted.head(_STACKS).select("name", own=own).drop_nulls().unique("own")
            known = _recorded(run, stage, step.number, names.get_column("own").to_list())
            for name, theirs in names.iter_rows():
                if theirs in known:
                    found.setdefault(f"{stage}|{name}", {})[side] = known[theirs]
    return found


def _recorded(run: Run, stage: str, step: int, names: list[str]) -> dict[str, str]:
    """Stacks of records by name, of whichever rank recorded one."""
    captured = run.manifest.stages.get(stage)
    if captured is None or captured.state != "captured" or not names:
        return {}
    rows = (
        records.scan(run.records(stage))
        .filter(
            (pl.col("step") == step) & pl.col("name").is_in(names) & pl.col("stack").is_not_null()
        )
        .select("name", "stack")
        .unique("name", keep="first")
        .collect()
    )
    return {str(name): str(stack) for name, stack in rows.iter_rows()}
