"""Arguments that one side gives by position and the other by name.

``attn(x, mask)`` and ``attn(x, mask=mask)`` are one call, whose dumps have ``input.1`` and
``input.mask``. No dump says which parameter a position is. So the two are held for one argument
only where they are all that is left of the inputs of one call on both sides, and are alike: of one
type and shape, and of one content or statistics as near as two devices have them.
"""

from __future__ import annotations

import polars as pl

from rlprobe.compare.bounds import STATISTICS
from rlprobe.compare.match import shift
from rlprobe.compare.match.rules import KEYWORD
from rlprobe.compare.match.state import State

_CALL = ("module", "op", "call", "direction")
_VALUES = ("dtype", "shape", *STATISTICS, "value", "digest")


def by_keyword(state: State, benchmark: pl.DataFrame, target: pl.DataFrame) -> None:
    """Match what is left of the inputs of calls whose other records are matched.

    Args:
        benchmark, target: all records (columns of :data:`.pairs.LOADED`).
    """
    left, right = _lone(state.left, benchmark), _lone(state.right, target)
    if left.is_empty() or right.is_empty():
        return
    right = right.rename({name: f"{name}_target" for name in right.columns})
    there = [f"{name}_target" for name in _CALL]
    both = left.join(_calls(state), on=_CALL, nulls_equal=True)
    both = both.join(right, on=there, nulls_equal=True)
    state.add(both.filter(_alike()), pl.lit(KEYWORD))


def _lone(left: pl.DataFrame, frame: pl.DataFrame) -> pl.DataFrame:
    """Inputs that alone are left of their call, with what is known of them."""
    inputs = left.filter((pl.col("slot") == "input") & pl.col("call").is_not_null())
    lone = inputs.filter(pl.len().over(_CALL) == 1)
    values = frame[lone.get_column("row")].select(_VALUES)
    position = pl.col("index").str.contains(r"^\d+$").fill_null(False)
    return lone.select("row", *_CALL, position=position).hstack(values)


def _calls(state: State) -> pl.DataFrame:
    """Calls of both sides of which records are matched, each with one other alone."""
    pairs = state.pairs()
    there = [f"{name}_target" for name in _CALL]
    left, right = (state.every[side].select("row", *_CALL) for side in ("left", "right"))
    calls = (
        pairs.join(left, left_on="benchmark", right_on="row")
        .join(right, left_on="target", right_on="row", suffix="_target")
        .select(*_CALL, *there)
        .unique()
    )
    return calls.filter((pl.len().over(_CALL) == 1) & (pl.len().over(there) == 1))


def _alike() -> pl.Expr:
    def same(name: str) -> pl.Expr:
        return pl.col(name).eq_missing(pl.col(f"{name}_target"))

    known = pl.any_horizontal(pl.col(name).is_not_null() for name in ("value", *STATISTICS))
    near = [shift.near(name, pl.col(f"{name}_target")) for name in STATISTICS]
    content = (pl.col("digest") == pl.col("digest_target")).fill_null(False)
    one_each = pl.col("position") != pl.col("position_target")
    return pl.all_horizontal(
        one_each,
        same("dtype"),
        same("shape"),
        content | pl.all_horizontal(known, same("value"), *near),
    )
