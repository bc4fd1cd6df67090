"""Some tokens that all have one value on the target, and all others as they were.

Where they stand says why: every occurrence of one token id, or the beginnings and ends of rows, are
what a mask or an index to ignore leaves out.

A law of the tokens that differ needs every one of them: a value that most of them share is a
coincidence of numbers, one that all of them share is what they were set to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlprobe.diagnose.cause.differences import Tensors, Tokens
from rlprobe.diagnose.cause.hypotheses.factor import tensor_residual
from rlprobe.diagnose.cause.hypothesis import UNKNOWN, Fit
from rlprobe.judge.fits import Pair
from rlprobe.said import Said, say

#: Fewer tokens that differ may share a value by chance.
_FEW = 2


@dataclass(frozen=True)
class Subset:
    """Tokens that were set to a value."""

    value: float
    differ: int
    tokens: int

    @property
    def said(self) -> Said:
        """In words."""
        return say(
            "{differ} of {tokens} tokens differ, and all of these are {value:g} on the target",
            differ=self.differ,
            tokens=self.tokens,
            value=self.value,
        )


def fit(pairs: Sequence[Pair]) -> Subset | None:
    """The value that every token that differs has on the target, where there is one.

    Args:
        pairs: benchmark's and target's values of each sample's tokens.
    """
    b, t = _joined(pairs)
    wrong = _apart(b, t)
    if not _FEW <= int(wrong.sum()) < len(b):
        return None
    values = np.unique(t[wrong])
    own = np.unique(b[wrong])
    if len(values) != 1 or len(own) == 1:
        return None
    return Subset(float(values[0]), int(wrong.sum()), len(b))


def counted(pairs: Sequence[Pair]) -> Said:
    """How many tokens differ, in words."""
    b, t = _joined(pairs)
    return say("{count} of {total} tokens differ", count=int(_apart(b, t).sum()), total=len(b))


def _apart(b: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Tokens that differ by more than a hundredth of the largest difference."""
    size = np.abs(t - b)
    found: np.ndarray = size > 0.01 * float(np.nanmax(size, initial=0.0))
    return found


def _joined(pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    if not pairs:
        return np.zeros(0), np.zeros(0)
    return np.concatenate([b for b, _ in pairs]), np.concatenate([t for _, t in pairs])


class OfTokens:
    """Every token that differs has one value, and stands where a mask begins or ends."""

    needs = Tokens

    def fit(self, difference: Tokens) -> Fit | None:
        """One value for all of them; a class only where they are ends of rows."""
        found = fit(difference.values)
        if found is None:
            return None
        said = say("{name}: {what}", name=difference.name, what=found.said)
        token = _of_one_id(difference, found.value)
        if token is not None:
            said += say("; they are every token of id {token}, and no other: left out", token=token)
            return Fit("label_or_mask_shift", (said,), 0.0, {"value": found.value}, choices=1)
        if not _ends(difference.values, found.value):
            # which tokens was chosen to fit, one by one
            return Fit(UNKNOWN, (said,), 0.0, {"value": found.value}, choices=found.differ)
        said += say("; they are the first or the last of their rows: they are left out")
        return Fit("label_or_mask_shift", (said,), 0.0, {"value": found.value}, choices=1)


def _of_one_id(difference: Tokens, value: float) -> int | None:
    """The id that all tokens that differ have, if every token of that id has the value."""
    b, t = _joined(difference.values)
    wrong = _apart(b, t)
    for rows in difference.ids:
        ids = np.concatenate(list(rows))
        mine = np.unique(ids[wrong])
        if len(mine) == 1 and bool((t[ids == mine[0]] == value).all()):
            return int(mine[0])
    return None


def _ends(pairs: Sequence[Pair], value: float) -> bool:
    """Whether what has the value is each row's beginning, its end or both, and no row whole."""
    for b, t in pairs:
        kept = np.flatnonzero(t != value)
        if len(kept) < len(b) and (not len(kept) or kept[-1] - kept[0] + 1 != len(kept)):
            return False
    return True


class OfTensors:
    """Elements that are 0 on the target and were not, the others as they were."""

    needs = Tensors

    def fit(self, difference: Tensors) -> Fit | None:
        """How many; that names no class."""
        b, t = difference.benchmark, difference.target
        lost = (t == 0) & (b != 0)
        count = int(np.count_nonzero(lost))
        square = float(np.sum(difference.difference**2))
        if not square or not _FEW <= count < b.size:
            return None
        model = np.where(lost, 0.0, b)
        share = float(np.sum((t - model) ** 2)) / square
        said = say(
            "{count} of {size} elements are 0 on the target alone: that explains "
            "{share:.2%} of the difference",
            count=count,
            size=b.size,
            share=1 - share,
        )
        residual = tensor_residual(difference, difference.left(model), share)
        return Fit(UNKNOWN, (said,), residual, choices=count, left=share)
