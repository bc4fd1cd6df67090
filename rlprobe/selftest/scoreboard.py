"""The scoreboard as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from rlprobe.selftest.results import Result, Scores
from rlprobe.selftest.score import (
    ALIGNED,
    FAILED,
    Found,
    Right,
    Tally,
    false_alarms,
    upper_bound,
)

_HEAD = (
    "fault", "verdict", "stage", "module", "cause", "refined", "ratio", "twice the floor",
    "tensors", "s",
)  # fmt: skip
_BENIGN = ("benign change", "verdict", "nearest", "further runs", "tensors", "s")


def render(results: list[Result], scores: Scores, seconds: float) -> str:
    """What was planted and found, a line each, then the totals."""
    faults = [r for r in results if not r.is_benign]
    benign = [r for r in results if r.is_benign]
    parts = []
    if faults:
        parts += [_table(_HEAD, map(_fault, faults)), ""]
    if benign:
        parts += [_table(_BENIGN, map(_unharmful, benign)), ""]
    parts += [*_totals(scores, seconds)]
    misses = [line for r in [*faults, *benign] for line in _misses(r)]
    if misses:
        parts += ["", "not as declared:", *(f"  {line}" for line in misses)]
    return "\n".join(parts)


def line(result: Result) -> str:
    """One case's outcome in all passes, as it is told while the others still run."""
    if result.is_benign:
        found = [result.full, *result.seeds.values(), *([result.tensors] if result.tensors else [])]
        failed = sum(item.verdict == FAILED for item in found)
        alarms = f"{false_alarms(found)} of {len(found)} alarm"
        return f"{alarms}, {failed} failed" if failed else alarms
    said = [_short(result.right(result.full))]
    if result.weakened is not None:
        said.append(f"twice the floor {_weakened(result)}")
    if result.refined is not None:
        said.append(f"refined {_refined(result.right(result.refined), result.refined)}")
    if result.tensors is not None:
        said.append(f"tensors {_short(result.right(result.tensors))}")
    return ", ".join(said)


def _fault(result: Result) -> tuple[str, ...]:
    right = result.right(result.full)
    return (
        result.case.name,
        _mark(right.verdict, result.full.verdict),
        _mark(right.stage),
        _mark(right.module),
        _cause(right, result.full),
        "-" if result.refined is None else _refined(result.right(result.refined), result.refined),
        _number(result.full.ratio),
        _weakened(result),
        "-" if result.tensors is None else _short(result.right(result.tensors)),
        f"{result.seconds:.1f}",
    )


def _cause(right: Right, found: Found) -> str:
    """A right class, an unknown one, which costs nobody a day, or a wrong one."""
    if right.asserted_wrongly:
        return f"WRONG ({found.cause})"
    if right.cause and found.cause != "unknown":
        return "ok"
    return "unknown" if found.cause == "unknown" else "MISS (-)"


def _refined(right: Right, found: Found) -> str:
    if not (right.verdict and right.stage and right.module):
        return _short(right)
    said = _cause(right, found)
    return said if found.known in (None, "unknown") else f"{said}, {found.known}"


def _weakened(result: Result) -> str:
    weaker = result.weakened
    if weaker is None:
        return "-"
    if weaker.found is None:
        return "not scalable"
    return f"{_short(result.right(weaker.found))} at {weaker.strength:.1e}"


def _unharmful(result: Result) -> tuple[str, ...]:
    seeds = list(result.seeds.values())
    further = f"{false_alarms(seeds)} of {len(seeds)} alarm" if seeds else "-"
    return (
        result.case.name,
        _mark(result.full.verdict == ALIGNED, result.full.verdict),
        _number(result.full.ratio),
        further,
        "-" if result.tensors is None else result.tensors.verdict,
        f"{result.seconds:.1f}",
    )


def _mark(right: bool, said: str = "") -> str:
    sign = "ok" if right else "MISS"
    return f"{sign} ({said})" if said and not right else sign


def _short(right: Right) -> str:
    if right.verdict and right.stage and right.module and right.cause:
        return "ok"
    wrong = [
        name
        for name, good in (
            ("verdict", right.verdict),
            ("stage", right.stage),
            ("module", right.module),
            ("cause", right.cause),
        )
        if not good
    ]
    return f"MISS {wrong[0]}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "inf" if math.isinf(value) else f"{value:.3g}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _totals(scores: Scores, seconds: float) -> list[str]:
    lines = []
    for name, tally in (
        ("full strength", scores.full),
        ("twice the floor", scores.weakened),
        ("tensors", scores.tensors),
        ("refined", scores.refined),
    ):
        if tally.total:
            lines.append(f"{name}: {_line(tally)}")
    for name, known in scores.known.items():
        if sum(known.values()):
            counts = ", ".join(f"{what} {count}" for what, count in sorted(known.items()))
            lines.append(f"how causes are known, {name}: {counts}")
    if scores.not_scalable:
        lines.append(
            f"not scalable: {len(scores.not_scalable)} ("
            + "; ".join(f"{name}: {reason}" for name, reason in scores.not_scalable.items())
            + ")"
        )
    if scores.benign:
        bound = upper_bound(scores.alarms, scores.benign)
        lines.append(
            f"false alarms: {scores.alarms} of {scores.benign} benign runs; "
            f"the rate is below {100 * bound:.1f} % at 95 %"
        )
    lines.append(f"time: {seconds:.0f} s")
    return lines


def _line(tally: Tally) -> str:
    counts = (
        ("found", tally.verdict),
        ("stage", tally.stage),
        ("module", tally.module),
        ("cause", tally.cause),
    )
    return f"{tally.total} faults, " + ", ".join(
        f"{name} {count} ({100 * count / tally.total:.0f} %)" for name, count in counts
    )


def _misses(result: Result) -> list[str]:
    """A line for each of a case's runs that was not found as declared, or failed."""
    passes: list[tuple[str, Found | None]] = [
        ("", result.full),
        (" at twice the floor", result.weakened.found if result.weakened else None),
        (" with tensors", result.tensors),
        (" refined", result.refined),
        *((f" with seed {seed}", found) for seed, found in sorted(result.seeds.items())),
    ]
    words = _alarm if result.is_benign else _miss
    lines = []
    for name, found in passes:
        if found is None:
            continue
        if found.verdict == FAILED:
            lines.append(f"{result.case.name}{name}: {_last(result.error) or 'the run failed'}")
        elif said := words(result, found):
            lines.append(f"{result.case.name}{name}: {said}")
    return lines


def _miss(result: Result, found: Found) -> str:
    """What is not as declared of a fault; empty where all is."""
    right = result.right(found)
    if right.verdict and right.stage and right.module and right.cause:
        return ""
    declared = result.case.declared
    return (
        f"declared {declared.verdict}, {declared.stage}, {declared.module}, "
        f"{' or '.join(declared.cause)}; found {_described(found)}"
    )


def _alarm(result: Result, found: Found) -> str:
    """What a benign change alarmed with; empty where it did not."""
    if found.verdict == ALIGNED:
        return ""
    declared, ratio = result.case.declared.verdict, _number(found.ratio)
    return f"declared {declared}; found {_described(found)}, ratio {ratio}"


def _described(found: Found) -> str:
    said = f"{found.verdict}, {found.stage}, {found.module}, {found.cause}"
    return said if found.known is None else f"{said} ({found.known})"


def _last(error: str) -> str:
    """What went wrong, without the log that led to it: the exception's own line, and the first."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return "; ".join(dict.fromkeys([*lines[:1], *raised[-1:]]))
