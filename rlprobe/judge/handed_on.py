"""Results of which only a part is handed on, and which differ nowhere else.

verl computes log-probs and values at every token of a sequence, and hands on those of the
response. A difference at the others reaches nothing. That it is so is proven sample by sample, on
each side by itself: what an update was given is a copy of a part of what the stage computed, so
that this part is all that was handed on. The result is then held against its floor in that part,
and what differs besides is said (item ``unused positions``).

No ground, and judged whole: a result that no update was given, of which a sample was not given, or
whose given numbers are not that part on either side; one that is not finite somewhere on one side
alone; one that differs in that part as well.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlprobe.judge import keydata
from rlprobe.judge.keydata import Array, Difference, Row

#: A copy may be kept in another format, which rounds it.
_SAME = 1e-6
#: A sample's values on both sides, and which of them are handed on.
_Part = tuple[tuple[str, Array, Array], slice]


@dataclass(frozen=True)
class Dropped:
    """A result that differs where it is handed to nobody."""

    name: str
    #: Values that differ there, of how many, and the largest difference.
    differing: int
    count: int
    largest: float


def narrowed(
    found: Mapping[str, Difference], name: str
) -> tuple[dict[str, Difference], Dropped] | None:
    """Differences of a result in the part that is handed on, and what differs besides.

    Args:
        found: differences of key data by name.
        name: of a result of a stage.

    Returns:
        By name, with what the stage handed back of it whole; None where nothing proves that a part
        alone is handed on.
    """
    whole = found[name]
    copies = [found[n] for n, (of, _) in keydata.GIVEN.items() if of == name and n in found]
    if not copies or _is_partial(whole):
        return None
    parts = _parts(whole, copies)
    if parts is None:
        return None
    apart = [np.delete(np.abs(t - b), part) for (_, b, t), part in parts]
    besides = np.concatenate(apart)
    differing = int(np.count_nonzero(besides))
    if not differing:
        return None
    within = {name: _within(whole, parts)}
    for other, (of, _) in keydata.HANDED.items():
        if of == name and other in found:
            alike = _alike(found[other], parts)
            within |= {} if alike is None else {other: _within(found[other], alike)}
    return within, Dropped(name, differing, besides.size, float(besides.max()))


def _is_partial(difference: Difference) -> bool:
    """Whether not every value has a finite partner."""
    alone = difference.benchmark_only or difference.target_only or any(difference.lopsided)
    return bool(alone)


def _within(whole: Difference, parts: list[_Part]) -> Difference:
    """A difference of parts of its rows."""
    benchmark = [Row(sample, values[part], 0, 0) for (sample, values, _), part in parts]
    target = [Row(sample, values[part], 0, 0) for (sample, _, values), part in parts]
    narrow = keydata.compare(benchmark, target, whole.name, whole.step)
    return dataclasses.replace(narrow, formats=whole.formats, shorter=whole.shorter)


def _alike(handed: Difference, parts: list[_Part]) -> list[_Part] | None:
    """The same parts of what a stage handed back; None where its rows are others."""
    if _is_partial(handed) or len(handed.pairs) != len(parts):
        return None
    same = all(
        sample == pair[0] and _is_copy(pair[1], b) and _is_copy(pair[2], t)
        for (sample, b, t), (pair, _) in zip(handed.pairs, parts, strict=True)
    )
    every = zip(handed.pairs, parts, strict=True)
    return [(pair, part) for pair, (_, part) in every] if same else None


def _parts(whole: Difference, copies: list[Difference]) -> list[_Part] | None:
    """Each sample's values and the part of them that both sides handed on; None where one is not
    known to be all that was."""
    given: dict[str, list[tuple[Array, Array]]] = defaultdict(list)
    for copy in copies:
        if _is_partial(copy):
            return None
        for sample, benchmark, target in copy.pairs:
            given[sample].append((benchmark, target))
    parts = []
    for pair in whole.pairs:
        sample, *own = pair
        # over a sequence, entry i is about token i + 1
        starts = {len(own[0]) - len(b) - 1 for b, _ in given[sample]}
        if len(starts) != 1 or min(starts) < 0:
            return None
        part = slice(min(starts), len(own[0]) - 1)
        copied = all(
            _is_copy(values[part], handed)
            for both in given[sample]
            for values, handed in zip(own, both, strict=True)
        )
        if not copied:
            return None
        parts.append((pair, part))
    return parts or None


def _is_copy(own: Array, handed: Array) -> bool:
    return own.shape == handed.shape and bool(
        np.all(np.abs(own - handed) <= _SAME * np.maximum(np.abs(own), np.abs(handed)))
    )
