"""Some tokens that all have one value on the target, and all others as they were.

A law of the tokens that differ needs every one of them: a value that most of them share is a
coincidence of numbers, one that all of them share is what they were set to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlprobe.judge.fits import Pair

#: Fewer tokens that differ may share a value by chance.
_FEW = 2


@dataclass(frozen=True)
class Subset:
    """Tokens that were set to a value."""

    value: float
    differ: int
    tokens: int

    @property
    def said(self) -> str:
        """In words."""
        return (
            f"{self.differ} of {self.tokens} tokens differ, and all of these are {self.value:g} on "
            "the target: they are left out"
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


def counted(pairs: Sequence[Pair]) -> str:
    """How many tokens differ, in words."""
    b, t = _joined(pairs)
    return f"{int(_apart(b, t).sum())} of {len(b)} tokens differ"


def _apart(b: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Tokens that differ by more than a hundredth of the largest difference."""
    size = np.abs(t - b)
    found: np.ndarray = size > 0.01 * float(np.nanmax(size, initial=0.0))
    return found


def _joined(pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    if not pairs:
        return np.zeros(0), np.zeros(0)
    return np.concatenate([b for b, _ in pairs]), np.concatenate([t for _, t in pairs])
