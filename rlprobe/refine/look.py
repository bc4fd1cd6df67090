"""What two tensors of the same record say about their difference, element by element.

A sketch gives the size of a difference; the tensors give its shape. The same hypotheses are fitted
that statistics are held against (:mod:`rlprobe.diagnose.cause.hypotheses`), to every element.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlprobe.diagnose.cause.differences import Tensors
from rlprobe.diagnose.cause.hypotheses import ALL
from rlprobe.diagnose.cause.hypothesis import UNKNOWN, fits, weigh
from rlprobe.said import NOTHING_SAID, Said, exactly, of_side, say

Array = npt.NDArray[np.float64]

#: Share of the error that the places named must hold.
_HELD = 0.99


@dataclass
class Look:
    """What was seen."""

    #: Relative L2 difference.
    error: float
    #: A cause class; None where no law explains the difference.
    cause: str | None = None
    #: The law in words, and the share of the difference's square that it leaves.
    law: Said = NOTHING_SAID
    left: float = 1.0
    evidence: list[Said] = field(default_factory=list)
    #: Rows (tokens) that hold the error, ascending; empty: all alike.
    rows: list[int] = field(default_factory=list)
    #: Likewise of the last dimension.
    channels: list[int] = field(default_factory=list)
    tokens: int = 0


def look(benchmark: npt.NDArray[np.generic], target: npt.NDArray[np.generic]) -> Look:
    """Compare two tensors of one shape, [..., tokens, channels].

    Raises:
        ValueError: the shapes differ.
    """
    if benchmark.shape != target.shape:
        raise ValueError(f"shapes {benchmark.shape} and {target.shape}")
    b, t = (np.atleast_2d(_rows(x.astype(np.float64))) for x in (benchmark, target))
    d = t - b
    finite = np.isfinite(d)
    if not finite.all():
        return _not_finite(b, t, finite)
    scale = float(np.linalg.norm(b))
    error = float(np.linalg.norm(d)) / scale if scale else float(np.any(d))
    found = Look(error, tokens=len(b))
    if not np.any(d):
        found.evidence.append(say("the tensors are equal"))
        return found
    laws = fits(ALL, [Tensors(b, t)])
    cause, said = weigh(laws, [])
    found.evidence += said
    if cause != UNKNOWN:
        found.cause, found.law = cause, said[-1]
        found.left = next(fit.left for fit in laws if fit.said[-1] == said[-1])
    _places(found, d)
    return found


def _not_finite(b: Array, t: Array, finite: npt.NDArray[np.bool_]) -> Look:
    places = [int(i) for i in np.flatnonzero(~finite.all(axis=1))]
    wrong = {
        "target": int(np.count_nonzero(np.isfinite(b) & ~np.isfinite(t))),
        "benchmark": int(np.count_nonzero(np.isfinite(t) & ~np.isfinite(b))),
    }
    side = max(wrong, key=lambda name: wrong[name])
    if not wrong[side]:
        said = say("elements are not finite on both sides alike, first in row {row}", row=places[0])
        return Look(float("inf"), evidence=[said], rows=places, tokens=len(b))
    said = say(
        "{wrong} elements are not finite on the {side} alone, first in row {row}",
        wrong=wrong[side],
        side=of_side(side),
        row=places[0],
    )
    return Look(float("inf"), "nonfinite", said, 0.0, [said], places, tokens=len(b))


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(-1, 1)


def _places(found: Look, d: Array) -> None:
    for name, energy in (("rows", (d * d).sum(axis=1)), ("channels", (d * d).sum(axis=0))):
        order = np.argsort(energy)[::-1]
        held = np.cumsum(energy[order]) / energy.sum()
        count = int(np.searchsorted(held, _HELD)) + 1
        if count > len(energy) // 2:
            continue
        places = sorted(int(i) for i in order[:count])
        setattr(found, name, places)
        # of a projection a row is a token of some sample; of experts' an assignment of one
        plain = say("rows") if name == "rows" else say("channels")
        found.evidence.append(
            say(
                "{count} of {total} {places} hold {held:.0%} of the difference: {which}",
                count=count,
                total=len(energy),
                places=plain,
                held=_HELD,
                which=_listed(places),
            )
        )


def _listed(places: list[int]) -> Said:
    if len(places) > 2 and places[-1] - places[0] == len(places) - 1:
        return say("{first} to {last}", first=places[0], last=places[-1])
    shown = ", ".join(map(str, places[:6]))
    return exactly(f"{shown}, …" if len(places) > 6 else shown)
