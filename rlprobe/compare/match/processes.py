"""Processes that no rank names: paired by what they were given.

Token ids, first inputs and saved values are the same on both sides for the same process, up to
round-off; its pid is not. Where that does not tell one from another, the pairing is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.compare.tables import Table

Floats = npt.NDArray[np.float64]

#: Inputs of a process that are looked at, of whole numbers (token ids) and of any.
_FIRST = 64
#: A pair is distinct from all others if its distance is below this share of theirs.
_DISTINCT = 0.25
_NUMBERS = ("max", "min", "mean", "norm", "said")


@dataclass(frozen=True)
class Pair:
    """Numbers of the processes in the lists given; None where the other side has none for it."""

    benchmark: int | None
    target: int | None
    #: Nothing tells this pair from another.
    guessed: bool = False


def pair(benchmark: Sequence[Table], target: Sequence[Table]) -> list[Pair]:
    """Pair processes of one step, in the benchmark's order."""
    given = [[_given(table) for table in side] for side in (benchmark, target)]
    apart = np.array([[_distance(one, other) for other in given[1]] for one in given[0]])
    apart = apart.reshape(len(benchmark), len(target))
    found: dict[int, int] = {}
    for row, column in zip(
        *np.unravel_index(np.argsort(apart, axis=None), apart.shape), strict=True
    ):
        free = row not in found and column not in found.values()
        if free and _distinct(apart, int(row), int(column)):
            found[int(row)] = int(column)
    left = [row for row in range(len(benchmark)) if row not in found]
    right = [column for column in range(len(target)) if column not in found.values()]
    # one of each that is left is no guess where as many were to be paired
    forced = len(left) == len(right) == 1
    rest = [Pair(row, column, not forced) for row, column in zip(left, right, strict=False)]
    rest += [Pair(row, None, bool(right)) for row in left[len(right) :]]
    pairs = [Pair(row, column) for row, column in found.items()] + rest
    pairs.sort(key=lambda each: each.benchmark or 0)
    return pairs + [Pair(None, column, bool(left)) for column in right[len(left) :]]


def _distinct(apart: Floats, row: int, column: int) -> bool:
    others = np.concatenate([np.delete(apart[row], column), np.delete(apart[:, column], row)])
    here = float(apart[row, column])
    return bool(np.isfinite(here) and (here < _DISTINCT * others).all())


def _given(table: Table) -> pl.DataFrame:
    """The first inputs and saved values of a process, a row each."""
    columns = (
        *("name", "op", "slot", "direction", "dtype", "value"),
        *("max", "min", "mean", "norm", "digest"),
    )
    saved = pl.col("op").str.starts_with("save.")
    rows = table.rows(columns).filter(
        ((pl.col("slot") == "input") & (pl.col("direction") == "forward")) | saved
    )
    whole = pl.col("dtype").str.contains(r"u?int\d").fill_null(False) | saved
    number = pl.int_range(pl.len())
    chosen = rows.filter((number < _FIRST) | (number.over(whole) < _FIRST) & whole)
    # equal or not is all that a digest says, or an argument that is no tensor
    text = pl.coalesce("digest", "value")
    said = pl.when(text.is_not_null()).then(text.hash() / 2**32)
    return chosen.select("name", "max", "min", "mean", "norm", said=said)


def _distance(one: pl.DataFrame, other: pl.DataFrame) -> float:
    """Mean relative difference of what both have; infinite where they have nothing in common."""
    both = one.unique("name").join(other.unique("name"), on="name", suffix="_other")
    if 2 * both.height < min(one.height, other.height):
        # other names for the same inputs: their places
        both = pl.concat(
            [one.head(other.height), other.head(one.height).rename(lambda n: f"{n}_other")],
            how="horizontal",
        )
    b = both.select(_NUMBERS).cast(pl.Float64).to_numpy()
    t = both.select(f"{name}_other" for name in _NUMBERS).cast(pl.Float64).to_numpy()
    known = ~(np.isnan(b) & np.isnan(t))
    if not known.any():
        return float("inf")
    with np.errstate(all="ignore"):
        relative = np.abs(b - t) / np.maximum(np.abs(b), np.abs(t))
    relative = np.where(b == t, 0.0, np.nan_to_num(relative, nan=1.0, posinf=1.0))
    return float(relative[known].mean())
