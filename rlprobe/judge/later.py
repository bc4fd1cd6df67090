"""Steps after the judged one: compared, not judged, and told with how far each is apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlprobe.compare import lacking
from rlprobe.compare.writer import Summary
from rlprobe.terminal import spelled

#: Steps that are named with their largest error.
_NAMED = 4


def steps(judged: int, summaries: Iterable[Summary]) -> list[int]:
    """Steps after the judged one of which anything was compared."""
    return sorted({step for s in summaries for step in s.worst if step > judged})


def largest(after: Iterable[int], summaries: Sequence[Summary]) -> str:
    """The largest error of each of these steps, the furthest first, and where it is."""
    found = {
        step: max(
            ((*s.worst[step], s.stage) for s in summaries if step in s.worst), key=lambda w: w[0]
        )
        for step in after
    }
    apart = sorted((step for step in found if found[step][0] > 0), key=lambda n: -found[n][0])
    said = []
    for step in apart[:_NAMED]:
        error, name, stage = found[step]
        said.append(f"step {step}: {error:.2g}, {lacking.short(name or 'a record')} of {stage}")
    if len(apart) > _NAMED:
        said.append(f"{len(apart) - _NAMED} more, with smaller ones")
    if alike := sorted(set(found) - set(apart)):
        said.append(f"{spelled(alike)}: none")
    return "; ".join(said)
