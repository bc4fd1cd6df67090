"""Rows of the comparison table: both sides' values side by side, in execution order."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from rlprobe.compare.matcher import Matches

#: Said once, from the benchmark where it has the record and else from the target.
COMMON = ("name", "module", "op", "call", "direction", "slot", "index")
#: Both sides' values, suffixed ``_benchmark`` and ``_target``.
BOTH = (
    "name",
    "order",
    "dtype",
    "shape",
    "requires_grad",
    "max",
    "min",
    "mean",
    "norm",
    "value",
    "digest",
    "data",
    "data_name",
)
SIDES = ("benchmark", "target")
#: What has to be loaded of each side.
LOADED = ("order", *COMMON, *BOTH[2:], "sketch")


def side_by_side(
    benchmark: pl.DataFrame, target: pl.DataFrame, matches: Matches | None
) -> pl.DataFrame:
    """One row per match; ``matches`` is None where row i of one side is row i of the other.

    Columns: ``order``, :data:`COMMON`, ``sketch_*`` and :data:`BOTH` suffixed by side, ``rule``,
    ``size_*`` (elements), ``same_shape``. Sorted by ``order``.
    """
    columns: dict[str, pl.Series] = {}
    presence: dict[str, pl.Series] = {}
    for side, frame in zip(SIDES, (benchmark, target), strict=True):
        frame = frame.with_columns(size=elements(frame.get_column("shape")))
        rows = None if matches is None else getattr(matches, side)
        if rows is not None:
            frame = frame[rows]
            presence[side] = rows.is_not_null()
        for name in (*BOTH, "sketch", "size"):
            columns[f"{name}_{side}"] = frame.get_column(name)
        for name in COMMON:
            if side == "benchmark":
                columns[name] = frame.get_column(name)
            elif matches is not None:
                columns[name] = columns[name].zip_with(
                    presence["benchmark"], frame.get_column(name)
                )
    columns["same_shape"] = same_shapes(columns["shape_benchmark"], columns["shape_target"])
    height = len(columns["name"])
    columns["rule"] = (
        pl.Series([None], dtype=pl.String).new_from_index(0, height)
        if matches is None
        else matches.rule
    )
    table = pl.DataFrame(columns)
    if matches is None:
        return table.with_columns(order=pl.col("order_benchmark"))
    return _in_order(table)


def _in_order(table: pl.DataFrame) -> pl.DataFrame:
    """Execution order of the benchmark; a target-only record follows the last matched before it."""
    target = table.select("order_target", "order_benchmark").with_row_index("row")
    anchors = (
        target.filter(pl.col("order_target").is_not_null())
        .sort("order_target")
        .select("row", place=pl.col("order_benchmark").forward_fill().fill_null(-1))
    )
    table = table.with_row_index("row").join(anchors, on="row", how="left", maintain_order="left")
    table = table.with_columns(
        order=pl.coalesce("order_benchmark", "order_target"),
        _place=pl.coalesce("order_benchmark", "place"),
        _after=pl.col("order_benchmark").is_null(),
    )
    return table.sort("_place", "_after", "order_target").drop("row", "place", "_place", "_after")


def elements(shapes: pl.Series) -> pl.Series:
    """Number of elements of each shape as float64, null where the shape is."""
    lengths = shapes.list.len().fill_null(0).to_numpy().astype(np.int64)
    flat = shapes.explode(empty_as_null=False, keep_nulls=False).to_numpy().astype(np.float64)
    sizes = np.ones(len(lengths))
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    if len(starts):
        sizes[filled] = np.multiply.reduceat(flat, starts)
    return pl.Series(sizes).zip_with(shapes.is_not_null(), pl.Series([None], dtype=pl.Float64))


def same_shapes(left: pl.Series, right: pl.Series) -> pl.Series:
    """Whether two shapes are the same; null equals null."""
    lengths = [s.list.len().fill_null(0).to_numpy().astype(np.int64) for s in (left, right)]
    flat: list[Any] = [
        s.explode(empty_as_null=False, keep_nulls=False).to_numpy() for s in (left, right)
    ]
    same = (lengths[0] == lengths[1]) & (left.is_null() == right.is_null()).to_numpy()
    starts = [np.cumsum(n) - n for n in lengths]
    for axis in range(int(lengths[0].max(initial=0))):
        rows = np.nonzero(same & (lengths[0] > axis))[0]
        same[rows] = flat[0][starts[0][rows] + axis] == flat[1][starts[1][rows] + axis]
    return pl.Series(same)
