"""The verdict as Markdown, for a pull request or a chat."""

from __future__ import annotations

import re
from pathlib import Path

from rlprobe import redaction
from rlprobe.diagnose.diagnosis import CAVEAT, SHUT, Diagnosis
from rlprobe.files import replace_text
from rlprobe.judge import extent
from rlprobe.judge.curves import LEFT, ratio
from rlprobe.report import advice, words
from rlprobe.report.page import number

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#])")
_VERDICTS = {"aligned": "Aligned", "diverged": "Diverged", "not_comparable": "Not comparable"}
#: Curves listed at most.
_CURVES = 12
_STATES = {
    "aligned": "aligned", "diverged": "**diverged**", "inherited": "differs, after the first",
    "replayed": "replayed", "not_compared": "not judged",
}  # fmt: skip


def write(path: Path, found: Diagnosis) -> None:
    """Write a diagnosis as Markdown."""
    replace_text(path, markdown(found))


def markdown(found: Diagnosis) -> str:
    """A diagnosis as Markdown; every text of a run's is escaped."""
    first, cause = found.first, found.cause
    sentence = advice.without_cause(found)  # which follows
    lines = [f"## {_VERDICTS[found.verdict]}", "", _plain(sentence), ""]
    if first is not None:
        lines += ["| first divergence | |", "|---|---|"]
        lines += [
            f"| {name} | {_plain(str(value))} |"
            for name, value in _named(found)
            if value is not None
        ]
        numbers = found.noise.get("first") or {}
        lines += [
            f"| {name} | {number(numbers[name])} |"
            for name in ("error", "floor", "ratio")
            if numbers.get(name) is not None
        ]
        lines.append("")
    if cause is not None:
        said = _plain(advice.plain_cause(cause))
        lines += [f"**Cause** ({cause.known}): {said} (`{cause.class_}`)", ""]
        lines += [f"- {_plain(line)}" for line in cause.evidence]
        lines.append("")
    todo = advice.plain(found)
    if todo is not None:
        lines += [f"**To do**: {_plain(todo)}", ""]
    lines += ["| stage | | records judged | beyond the floor |", "|---|---|---:|---:|"]
    lines += [
        f"| {stage.stage} | {_STATES[stage.state]} | {stage.records:,} | {stage.beyond:,} |"
        for stage in found.stages
    ]
    gone = [curve for curve in found.curves if curve.verdict == LEFT]
    if gone:
        lines += ["", "| curve that left | step | benchmark | target | difference | may be |"]
        lines += ["|---|---:|---:|---:|---:|---:|"]
        lines += [
            f"| {_plain(c.metric)} | {c.step} | {number(c.benchmark)} | {number(c.target)} "
            f"| {number(c.difference)} | {number(c.allowed)} |"
            for c in sorted(gone, key=lambda c: (c.step or 0, -ratio(c)))[:_CURVES]
        ]
    limits = [item for item in found.gate if item.state in (CAVEAT, SHUT)]
    if limits:
        lines += ["", "| is the comparison valid? | state | found |", "|---|---|---|"]
        lines += [
            f"| {_plain(words.plain_item(item.item))} | {words.text(item.state, 'en')} "
            f"| {_plain(item.evidence)} |"
            for item in limits
        ]
    whole = extent.total(found.extent)
    if whole.recorded:
        lines += ["", f"Judged: {whole.judged:,} of {whole.recorded:,} recorded quantities."]
    return "\n".join(lines).rstrip() + "\n"


def _named(found: Diagnosis) -> list[tuple[str, object]]:
    """What is said of the first divergence: a number of the trainer's has no rank and no module."""
    first = found.first
    assert first is not None
    if advice.of_trainer(found):
        return [("metric", first.operator), ("step", first.step)]
    return [
        ("stage", first.stage), ("step", first.step), ("rank", first.rank),
        ("module", first.module), ("operator", first.operator), ("call", first.call),
    ]  # fmt: skip


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    line = " ".join(text.split())
    shown = "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in redaction.text(line)
    )
    return _SPECIAL.sub(r"\\\1", shown)
