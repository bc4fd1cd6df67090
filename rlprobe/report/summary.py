"""The verdict for a terminal: a few lines with what parts first, why, and what to do next."""

from __future__ import annotations

from pathlib import Path

from rlprobe import redaction, terminal
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.diagnosis import CAVEAT, SHUT, Diagnosis
from rlprobe.errors import RlprobeError
from rlprobe.judge.inputs import Results, require
from rlprobe.report import advice, commands, words
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.terminal import Paint

_VERDICTS = {"aligned": "ALIGNED", "diverged": "DIVERGED", "not_comparable": "NOT COMPARABLE"}
_SHOWN_CAVEATS = 3


def lines(directory: Path, found: Diagnosis, paint: Paint) -> list[str]:
    """The summary, line by line.

    Args:
        directory: RESULTS_DIR of the diagnosis.
        found: it.
        paint: of the stream that it is written to.
    """
    colour = {"aligned": paint.good, "diverged": paint.bad}.get(found.verdict, paint.warn)
    cause = found.cause if found.verdict == diagnosis.DIVERGED else None
    # the cause has a line of its own
    sentence = found.sentence if cause is None else advice.without_cause(found)
    lines = [f"{colour(_VERDICTS[found.verdict])}  {_plain(sentence)}"]
    pairs: list[tuple[str, str]] = []
    if found.first is not None:
        pairs.append(("first", _first(found)))
    if cause is not None:
        pairs.append(("cause", f"{advice.plain_cause(cause)} ({cause.known})"))
    caveats = [item for item in found.gate if item.state == CAVEAT]
    pairs += [
        ("caveat", f"{words.plain_item(item.item)}: {item.evidence}")
        for item in caveats[:_SHOWN_CAVEATS]
    ]
    if len(caveats) > _SHOWN_CAVEATS:
        pairs.append(("", f"and {len(caveats) - _SHOWN_CAVEATS} more caveats, on the page"))
    lookup = advice.plain(found)
    if lookup is not None:
        pairs.append(("to do", lookup))
    pairs += [("to do", item.action) for item in found.gate if item.state == SHUT and item.action]
    lines += [f"  {paint.dim(f'{name:<7}')} {_plain(text)}" for name, text in pairs]
    lines += [f"  {paint.dim('next   ')} {_plain(text)}" for text in _next(directory, found)]
    return lines


def _first(found: Diagnosis) -> str:
    first = found.first
    assert first is not None
    where = f"{first.stage}, step {first.step}"
    if not advice.of_trainer(found):
        where += f", rank {first.rank}"
    what = first.module or first.operator or "unknown"
    return f"{where}: {what}" + (f" ({first.operator})" if first.module and first.operator else "")


def _next(directory: Path, found: Diagnosis) -> list[str]:
    """The first command that the page gives; none where the runs are not here any more."""
    try:
        results = Results.open(directory)
        sides = require(results, BENCHMARK), require(results, TARGET)
    except RlprobeError:
        return []
    return [command.text for command in commands.next_steps(results, found, *sides)[:1]]


def _plain(text: str) -> str:
    """One line, safe to show: names in it come from dumps, which may hold anything."""
    return terminal.safe(" ".join(redaction.text(str(text), names=False).split()))
