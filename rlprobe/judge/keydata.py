"""Key data of two runs, joined by sample, and what their differences look like.

How key data lie in a run and how a row's sample is found: :mod:`rlprobe.dumps.key_data`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rlprobe.compare.samples.apart import value_by_value
from rlprobe.compare.samples.pairing import joined
from rlprobe.dumps import key_names
from rlprobe.dumps.key_data import Array, Row
from rlprobe.dumps.key_names import (
    ADVANTAGES,
    CHOICES,
    FREE,
    GIVEN,
    HANDED,
    LOSS_MASK,
    OUTCOMES,
    REWARDS,
    SAMPLE_REWARDS,
    TOKENS,
)
from rlprobe.judge import digits, fits

if TYPE_CHECKING:
    from rlprobe.store.read import Run

__all__ = [
    "ADVANTAGES", "CHOICES", "FREE", "GIVEN", "HANDED", "LOSS_MASK", "OUTCOMES", "REWARDS",
    "SAMPLE_REWARDS", "TOKENS", "Array", "Row",
]  # fmt: skip

#: What an update's results after its first change of weights are called, behind their name: other
#: floors hold there than before it.
LATER = " (later updates)"


def stage_of(name: str) -> str:
    """The stage whose micro-batches key data are of."""
    return key_names.stage_of(name.removesuffix(LATER))


def result_of(name: str) -> str | None:
    """The stage that key data are a result of; None where a stage was given them."""
    return OUTCOMES.get(name.removesuffix(LATER))


def names(run: Run) -> list[str]:
    """Names of the key data that a run has."""
    data = run.recorded
    return [] if data is None else data.keys()


def norms(run: Run) -> list[str]:
    """Names of the norms of gradients that a run has among its key data."""
    data = run.recorded
    return [] if data is None else data.norms()


def is_given(name: str) -> bool:
    """Whether key data are what a stage was given, and not what it computed."""
    return result_of(name) is None and name not in CHOICES


def pads(run: Run, step: int) -> bool:
    """Whether any micro-batch of a step has positions that are no tokens, as its mask says."""
    data = run.recorded
    batches = [] if data is None else data.micro_batches(step).values()
    return any(batch.valid is not None and not np.all(batch.valid) for batch in batches)


def is_there(run: Run, name: str, step: int) -> bool:
    """Whether a run has key data of a name at a step."""
    return (run.dump / "data" / name / f"step{step}").is_dir()


def load(run: Run, name: str, step: int) -> list[Row]:
    """All rows of a name and step; empty where there are none.

    Raises:
        DumpError: a file is damaged.
    """
    data = run.recorded
    return [] if data is None else data.rows(name, step)


@dataclass(frozen=True)
class Difference:
    """Key data of one name on both sides."""

    name: str
    step: int
    #: Relative L2 difference over all joined values; None where nothing could be joined.
    error: float | None
    max_abs: float
    mean_abs: float
    #: Rows joined, and rows of each side without a partner.
    joined: int
    benchmark_only: int
    target_only: int
    #: Sample with the largest difference, and the first token of its response that stands out.
    sample: str | None = None
    position: int | None = None
    #: Share of positions that differ at all.
    share: float = 0.0
    #: Position of the sequence from which on rows differ far more than before it.
    onset: int | None = None
    #: Root mean square difference at a sequence's first token over that at the others; None where
    #: rows do not begin there.
    first: float | None = None
    #: Share of the differing rows whose difference leads to another sample's row.
    moved: float = 0.0
    #: Places by which values are displaced along their rows (:func:`fits.shift`).
    shift: int | None = None
    #: Joined values, and how many of them are not finite on the benchmark and on the target alone,
    #: or are infinite there the other way round (both count).
    count: int = 0
    lopsided: tuple[int, int] = (0, 0)
    #: How many are not finite on both sides alike; they are left out of the differences.
    both_nonfinite: int = 0
    #: Largest difference of a single value, relative to the larger of its own size and the root
    #: mean square of all that are not zero; its sample, and its token of the response.
    peak: float = 0.0
    peak_sample: str | None = None
    peak_position: int | None = None
    #: Formats of the values as they were saved: numpy's names of floating-point ones; whole
    #: numbers are of one, and truth values.
    formats: tuple[str, str] = ("", "")
    #: The format that all of the target's numbers are of, and the benchmark's are not: they were
    #: rounded to it, whatever format they are kept in (:mod:`rlprobe.judge.digits`).
    shorter: str | None = None
    #: Each joined sample's values on both sides, where they are one number a token.
    pairs: list[tuple[str, Array, Array]] = field(default_factory=list, repr=False)


def compare(benchmark: list[Row], target: list[Row], name: str, step: int) -> Difference:
    """Differences of one name, sample by sample, over values that are finite on both sides.

    A sample that occurs several times is paired in order of occurrence. A row whose length
    differs on the other side counts as unpaired on both.
    """
    pairs: list[tuple[str, Array, Array]] = []
    whole: list[Array] = []
    begins: list[int | None] = []
    squares = norms = total = 0.0
    count = partners = differing = both = 0
    alone = np.zeros(2, dtype=np.int64)
    worst: tuple[float, str | None, int | None] = (0.0, None, None)
    largest = 0.0
    # by sample: sums do not depend on the order of a batch
    for (key, _), one, other in sorted(joined(benchmark, target), key=lambda found: found[0]):
        b, t = one.values, other.values
        if b.shape != t.shape:
            continue
        partners += 1
        wide_b, wide_t = b.astype(np.float64), t.astype(np.float64)
        pairs.append((key, wide_b, wide_t))
        begins.append(one.response_at)
        nans = [~np.isfinite(wide) for wide in (wide_b, wide_t)]
        same, between = value_by_value(b, t)
        alone += [int(np.sum(nan & ~same)) for nan in nans]
        both += int(np.sum(nans[0] & nans[1] & same))
        finite = ~(nans[0] | nans[1])
        difference = np.where(finite, between, 0.0)
        if one.response_at and b.ndim == 1:  # the prompt is in it
            whole.append(difference)
        squares += float(np.sum(difference**2))
        norms += float(np.sum(np.where(finite, wide_b, 0.0) ** 2))
        total += float(difference.sum())
        difference = np.where(finite | same, difference, np.inf)
        count += difference.size
        differing += int(np.count_nonzero(difference))
        size = float(difference.max(initial=0.0))
        if size > largest or (size > 0 and worst[1] is None):
            largest = max(largest, size)
            worst = (size, key, _onset(difference, one.response_at))
    error = None
    if partners:
        scale = np.sqrt(norms)
        error = float(np.sqrt(squares) / scale) if scale > 0 else (0.0 if squares == 0 else np.inf)
    flat = [pair for pair in pairs if pair[1].ndim == 1]
    peak, at, place = _peak(pairs)
    begin = None if at is None else begins[at]
    measured = [] if name in TOKENS else flat  # tokens and masks follow no law of numbers
    with np.errstate(invalid="ignore"):  # infinity less infinity
        apart = [np.abs(t - b) for _, b, t in flat]
        moved = fits.of_other_rows(measured)
        displaced = fits.shift([(b, t) for _, b, t in measured])
    return Difference(
        name=name,
        step=step,
        error=error,
        max_abs=largest,
        mean_abs=total / count if count else 0.0,
        joined=partners,
        benchmark_only=len(benchmark) - partners,
        target_only=len(target) - partners,
        sample=worst[1],
        position=worst[2],
        share=differing / count if count else 0.0,
        onset=change_point(apart),
        first=_first_token(whole),
        moved=moved,
        shift=displaced,
        count=count,
        lopsided=(int(alone[0]), int(alone[1])),
        both_nonfinite=both,
        peak=peak,
        peak_sample=None if at is None else pairs[at][0],
        peak_position=None if begin is None or place < begin else place - begin,
        formats=(_formats(benchmark), _formats(target)),
        shorter=None
        if name in TOKENS
        else digits.shorter([b for _, b, _ in flat], [t for _, _, t in flat]),
        pairs=flat,
    )


#: What numbers are that have no floating-point format, whatever their width.
_KINDS = {"i": "whole numbers", "u": "whole numbers", "b": "truth values"}


def _peak(pairs: list[tuple[str, Array, Array]]) -> tuple[float, int | None, int]:
    """The value that is farthest off by itself, which row has it, and where in it.

    0 and no row where all are equal, or no scale is known.
    """
    finite = [np.isfinite(b) & np.isfinite(t) for _, b, t in pairs]
    there = [b[known & (b != 0)] for (_, b, _), known in zip(pairs, finite, strict=True)]
    count = sum(part.size for part in there)
    if not count:
        return 0.0, None, 0
    scale = math.sqrt(sum(float(np.sum(part**2)) for part in there) / count)
    found: tuple[float, int | None, int] = (0.0, None, 0)
    for row, ((_, b, t), known) in enumerate(zip(pairs, finite, strict=True)):
        with np.errstate(invalid="ignore"):  # infinity less infinity, left out
            apart = np.where(known, np.abs(t - b) / np.maximum(np.abs(b), scale), 0.0)
        most = float(apart.max(initial=0.0))
        if most > found[0]:
            found = most, row, int(np.unravel_index(np.argmax(apart), apart.shape)[0])
    return found


def _formats(rows: list[Row]) -> str:
    names = {row.format or _KINDS.get(row.values.dtype.kind) or row.values.dtype.name
             for row in rows}  # fmt: skip
    return ", ".join(sorted(names))


def _first_token(differences: list[Array]) -> float | None:
    """How much a sequence's first token differs, relative to the others."""
    heads = [d[0] for d in differences if len(d) > 1]
    rest = [d[1:] for d in differences if len(d) > 1]
    if not heads:
        return None
    others = float(np.sqrt(np.mean(np.concatenate(rest) ** 2)))
    return float(np.sqrt(np.mean(np.square(heads)))) / others if 0 < others < np.inf else None


#: Over the first tokens any fault of attention grows, as they see more and more keys; what sets in
#: later has a place of its own.
_GROWING = 6
#: A change point is one where differences grow by this factor at least.
_GROWTH = 6.0


def change_point(differences: list[Array]) -> int | None:
    """Where rows begin to differ, over all rows laid side by side; None where they always do.

    A causal model's fault that needs a history (a window, a cache, a late position) leaves the
    first tokens alone.
    """
    if not differences:
        return None
    longest = max(len(difference) for difference in differences)
    table = np.full((len(differences), longest), np.nan)
    for row, difference in enumerate(differences):
        table[row, : len(difference)] = np.where(np.isfinite(difference), difference, 0.0)
    squares = np.nanmean(table**2, axis=0)
    before = np.cumsum(squares)[:-1] / np.arange(1, longest)
    after = np.cumsum(squares[::-1])[::-1][1:] / np.arange(longest - 1, 0, -1)
    if longest < 2 * _GROWING or not after.max() > 0:
        return None
    places = np.arange(1, longest)
    inner = (places >= _GROWING) & (places <= 0.9 * longest)
    growth = np.where(inner, after / np.maximum(before, 1e-30 + 1e-12 * after.max()), 0.0)
    best = int(np.argmax(growth))
    if not growth[best] > _GROWTH**2:
        return None
    # which ratio is the largest hangs on the noise of a place or two: the first that is nearer, as
    # a factor, to what follows than to what was before
    between = math.sqrt(max(before[best], 1e-30 + 1e-12 * after.max()) * after[best])
    return int(places[best] + np.argmax(squares[places[best] :] > between))


def _onset(difference: Array, response_at: int | None) -> int | None:
    """First token of the response whose difference reaches a tenth of the response's largest."""
    if response_at is None:
        return None
    flat = difference.reshape(len(difference), -1).max(axis=1) if difference.size else difference
    flat = flat[response_at:]
    if not flat.size or not flat.max(initial=0.0) > 0:
        return None
    return int(np.argmax(flat >= 0.1 * flat.max()))
