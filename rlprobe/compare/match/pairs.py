"""Rows of the comparison table: both sides' values side by side, in execution order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import polars as pl

from rlprobe.compare.tables import Table

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
#: What has to be read of each side.
LOADED = ("order", *COMMON, *BOTH[2:], "sketch")
#: What is enough of the second side where both have the same names in the same order; those are
#: the first's.
SLIM = ("order", *BOTH[2:], "sketch")


@dataclass(frozen=True)
class Matches:
    """Row numbers of both sides, a row per pair or single record.

    ``benchmark`` and ``target`` are null where the record is on the other side only; ``rule`` is
    null where the names are the same.
    """

    benchmark: pl.Series
    target: pl.Series
    rule: pl.Series

    def __len__(self) -> int:
        return len(self.rule)


def same_names(benchmark: Table, target: Table) -> bool:
    """Whether both sides hold the same records in the same order, the usual case."""
    if benchmark.height != target.height:
        return False
    return bool((benchmark.names == target.names).all())


def side_by_side(
    benchmark: pl.DataFrame,
    target: pl.DataFrame,
    matches: Matches | None,
    alike: Collection[str] = (),
) -> pl.DataFrame:
    """One row per match; ``matches`` is None where row i of one side is row i of the other.

    Columns: ``order``, :data:`COMMON`, ``sketch_*`` and :data:`BOTH` suffixed by side, ``rule``,
    ``size_*`` (elements), ``same_shape``. Sorted by ``order``.

    Args:
        benchmark, target: records of both sides.
        matches: what belongs together.
        alike: columns that are known to be the same on both sides, row by row.
    """
    columns: dict[str, pl.Series] = {}
    presence: dict[str, pl.Series] = {}
    for side, frame in zip(SIDES, (benchmark, target), strict=True):
        rows = None if matches is None else getattr(matches, side)
        if rows is not None:
            frame = frame[rows]
            presence[side] = rows.is_not_null()
        for name in (*BOTH, "sketch"):
            columns[f"{name}_{side}"] = frame.get_column(name)
        for name in COMMON:
            if side == "benchmark":
                columns[name] = frame.get_column(name)
            elif matches is not None:
                columns[name] = columns[name].zip_with(
                    presence["benchmark"], frame.get_column(name)
                )
    shapes = columns["shape_benchmark"], columns["shape_target"]
    height = len(columns["name"])
    columns["size_benchmark"] = elements(shapes[0])
    if "shape" in alike or _equal(*shapes):
        columns["same_shape"] = pl.Series([True]).new_from_index(0, height)
        columns["size_target"] = columns["size_benchmark"]
    else:
        columns["same_shape"] = shapes[0].eq_missing(shapes[1])
        columns["size_target"] = elements(shapes[1])
    nothing = pl.Series([None], dtype=pl.String)
    columns["rule"] = nothing.new_from_index(0, height) if matches is None else matches.rule
    table = pl.DataFrame(columns)
    if matches is None:
        return table.with_columns(order=pl.col("order_benchmark"))
    return _in_order(table)


def _equal(left: pl.Series, right: pl.Series) -> bool:
    """Whether two series of lists are equal row by row; much quicker than comparing every row."""
    if not left.list.len().equals(right.list.len()):
        return False
    flat = (side.explode(empty_as_null=False, keep_nulls=False) for side in (left, right))
    return next(flat).equals(next(flat))


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
    product: pl.Expr = pl.when(pl.col("shape").is_not_null()).then(1.0)
    for axis in range(int(shapes.list.len().max() or 0)):  # type: ignore[arg-type]
        length = pl.col("shape").list.get(axis, null_on_oob=True)
        product = product * length.cast(pl.Float64).fill_null(1.0)
    return shapes.alias("shape").to_frame().select(product).to_series()
