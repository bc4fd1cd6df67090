"""Simple laws that a difference of key data may follow, fitted over all samples at once.

With b the benchmark's values of a sample, t the target's and d = t - b, a law proposes a
direction c (the next token's value minus this one's, another sample's row minus this one's) and d
is fitted as s * c. Only the direction is judged, by the share of d's square that the fit explains;
so a law is recognised whether it holds fully (s = 1) or in part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
#: One sample's values on the benchmark and the target, shape [values].
Pair = tuple[Array, Array]

#: Share of the difference's square that a law must explain.
EXPLAINED = 0.9
#: How far from 1 the multiple of what came in another's place may be, which noise beside it moves.
_WHOLE = 0.15
#: Shifts looked for, nearest first.
_SHIFTS = (1, -1, 2, -2)
#: More rows than this are not searched for one another.
_ROWS = 512
#: Rows of so few values point anywhere.
_SHORT = 3
#: Fewer values than this show no law of all.
_FEW = 16
#: Least part of a column that others do not hold, squared and relative, for a slope on it.
_INDEPENDENT = 1e-4
#: A row counts as different from this share of the largest difference of any row.
_DIFFERENT = 0.1


@dataclass(frozen=True)
class Fit:
    """d = coefficient * c, and the share of d's square that it explains."""

    coefficient: float
    explained: float
    #: Standard error of the coefficient; None where only a first-order law was fitted.
    error: float | None = None


def fit(parts: Iterable[Pair]) -> Fit | None:
    """Least squares of d on c over all parts; None where either is nothing or not finite.

    Args:
        parts: pairs (c, d) of equal shape.
    """
    cc = cd = dd = 0.0
    for c, d in parts:
        cc += float(np.dot(c, c))
        cd += float(np.dot(c, d))
        dd += float(np.dot(d, d))
    if not (cc > 0 and dd > 0 and math.isfinite(cc + dd)):
        return None
    return Fit(cd / cc, cd * cd / (cc * dd))


def shift(pairs: Sequence[Pair]) -> int | None:
    """By how many places the target's values are displaced along each row, None for none.

    1 says that entry i of the target is the benchmark's entry i + 1.
    """
    best: tuple[float, int] | None = None
    for places in _SHIFTS:
        found = fit(_displaced(b, t, places) for b, t in pairs if len(b) > abs(places) + 1)
        if found is None or found.explained < EXPLAINED or not _is_whole(found.coefficient):
            continue
        if best is None or found.explained > best[0] + 1e-3:
            best = (found.explained, places)
    return best[1] if best is not None else None


def _is_whole(coefficient: float) -> bool:
    """Whether what came in another's place is all of it: of a tenth of it that is not true."""
    return abs(coefficient - 1) <= _WHOLE


def _displaced(b: Array, t: Array, places: int) -> Pair:
    here = slice(0, len(b) - places) if places > 0 else slice(-places, len(b))
    there = slice(places, len(b)) if places > 0 else slice(0, len(b) + places)
    return b[there] - b[here], t[here] - b[here]


def of_other_rows(samples: Sequence[tuple[str, Array, Array]]) -> float:
    """Share of the rows that differ whose difference leads to another sample's row.

    Args:
        samples: name, benchmark's and target's row of each.
    """
    rows = [(name, b, t - b) for name, b, t in samples if len(b) > _SHORT]
    if not 1 < len(rows) <= _ROWS:
        return 0.0
    sizes = np.array([np.linalg.norm(d) for _, _, d in rows])
    if not (sizes.max() > 0 and math.isfinite(sizes.max())):
        return 0.0
    wrong = [row for row, size in zip(rows, sizes, strict=True) if size > _DIFFERENT * sizes.max()]
    found = 0
    for length in {len(b) for _, b, _ in wrong}:
        names = [name for name, b, _ in rows if len(b) == length]
        table = np.stack([b for _, b, _ in rows if len(b) == length])
        for name, b, d in wrong:
            if len(b) == length:
                there = table[[other != name for other in names]] - b
                along, size = there @ d, np.maximum((there**2).sum(axis=1), 1e-300)
                explained = along**2 / np.maximum(size * (d @ d), 1e-300)
                whole = np.abs(along / size - 1) <= _WHOLE
                found += bool((whole & (explained > EXPLAINED)).any())
    return found / len(wrong)


def one_sided(pairs: Sequence[Pair]) -> bool:
    """Whether the target's values are larger throughout, but for a hundredth of the difference."""
    d = _joined(pairs)[1]
    whole = float(d @ d)
    below = d[d < 0]
    return len(d) > _FEW and whole > 0 and float(below @ below) < 0.01 * whole


def constant(pairs: Sequence[Pair]) -> bool:
    """Whether all values are shifted alike: one number explains nearly all of the difference."""
    d = _joined(pairs)[1]
    whole = float(d @ d)
    return len(d) > _FEW and whole > 0 and len(d) * float(d.mean()) ** 2 > 0.95 * whole


def drawn_together(pairs: Sequence[Pair]) -> Fit | None:
    """The slope of the difference on the values, beside a constant; None where it is none.

    Smoothed labels mix each token's log-prob with the mean over the vocabulary, which varies
    little: large ones shrink, small ones grow. Values of something else (another label) leave half
    of the square unexplained, or follow with a slope of -1 where they are nearly constant.
    """
    b, d = _joined(pairs)
    if len(d) <= _FEW:
        return None
    found = fit([(b - b.mean(), d - d.mean())])
    whole = float(d @ d)
    if found is None or not -0.5 < found.coefficient < 0.0:
        return None
    left = (1.0 - found.explained) * float((d - d.mean()) @ (d - d.mean()))
    return Fit(found.coefficient, 1.0 - left / whole) if left < 0.05 * whole else None


def _joined(pairs: Sequence[Pair]) -> Pair:
    """All benchmark's values, and all differences that are finite."""
    if not pairs:
        return np.empty(0), np.empty(0)
    b, t = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    finite = np.isfinite(b) & np.isfinite(t)
    return b[finite], (t - b)[finite]


def temperature(
    log_probs: Sequence[Pair], entropies: Sequence[tuple[Array, Array | None]] | None
) -> Fit | None:
    """The target's temperature over the benchmark's, were that all that differs.

    With logits z, inverse temperature beta, and log p = beta z_y - log Z, the entropy is
    H = log Z - beta E[z], so g = log p + H = beta (z_y - E[z]). And d log p / d log beta = g:
    log p moves by the integral of g over log beta, by the trapezoid rule (g_b + g_t) / 2 times
    log(beta_t / beta_b). No logits are needed, and a first-order change is fitted exactly. The
    share that this explains tells whether it is a temperature.

    The value does not rest on that rule: log p_t = r log p_b + F with r = beta_t / beta_b, for any
    r, where F depends on the token's distribution and not on the label. A label that was drawn from
    the distribution makes g independent of it, so r - 1 is the slope of log p_t - log p_b on g
    beside a constant and powers of the entropies, which take up most of F.

    Args:
        log_probs: tokens by sample, in nats.
        entropies: of the same tokens, on both sides; the benchmark's alone where the target's are
            not of this computation; None where unknown: the mean stands for each, which explains
            less and leaves a first-order value.

    Returns:
        the ratio as ``coefficient``; None where nothing can be fitted.
    """
    if not log_probs:
        return None
    middles = [(b + t) / 2 for b, t in log_probs]
    if entropies is None:
        mean = float(np.concatenate(middles).mean())
        gains = [middle - mean for middle in middles]
    elif [len(b) for b, _ in entropies] != [len(b) for b, _ in log_probs]:
        return None
    else:
        gains = [
            b + own if theirs is None else middle + (own + theirs) / 2
            for middle, (b, _), (own, theirs) in zip(middles, log_probs, entropies, strict=True)
        ]
    found = fit([(gain, t - b) for gain, (b, t) in zip(gains, log_probs, strict=True)])
    if found is None:
        return None
    value = None if entropies is None else _inverse_temperature(log_probs, entropies)
    if value is None:
        return Fit(math.exp(-found.coefficient), found.explained)
    ratio, error = value
    return Fit(1.0 / ratio, found.explained, error / ratio**2)


def _inverse_temperature(
    log_probs: Sequence[Pair], entropies: Sequence[tuple[Array, Array | None]]
) -> tuple[float, float] | None:
    """beta_t / beta_b and its standard error; None where too few tokens say."""
    b, t = (np.concatenate([pair[side] for pair in log_probs]) for side in (0, 1))
    own = np.concatenate([ours for ours, _ in entropies])
    columns = [b + own, np.ones_like(b), own, own**2]
    theirs = [other for _, other in entropies if other is not None]
    if len(theirs) == len(entropies):
        columns.append(np.concatenate(theirs))
    table = np.stack(columns, axis=1)
    usable = np.isfinite(table).all(axis=1) & np.isfinite(t)
    table, moved = table[usable], (t - b)[usable]
    if len(table) <= _FEW + table.shape[1]:
        return None
    scale = np.linalg.norm(table, axis=0)
    if not (scale > 0).all():
        return None
    # the first column's part that the others do not hold, and what of the difference follows it
    first, rest = table[:, 0] / scale[0], table[:, 1:] / scale[1:]
    first = first - rest @ np.linalg.lstsq(rest, first, rcond=None)[0]
    moved = moved - rest @ np.linalg.lstsq(rest, moved, rcond=None)[0]
    square = float(first @ first)
    if square < _INDEPENDENT:
        return None
    slope = float(first @ moved) / square
    left = moved - slope * first
    error = math.sqrt(float(left @ left) / (len(moved) - table.shape[1]) / square)
    ratio = 1.0 + slope / scale[0]
    return (ratio, error / float(scale[0])) if ratio > 0 else None
