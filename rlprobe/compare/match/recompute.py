"""Forward calls that activation recomputation repeats in the backward pass.

With recomputation a layer runs forward again just before its backward, and nothing in a dump says
so: it has twice the forward calls of a side without. A forward of a module is a repetition when
its own backward comes next, before the whole model's next forward ends.
"""

from __future__ import annotations

import polars as pl

#: What summary.json counts it under.
RECOMPUTE = "recompute"
#: Columns that identify a module's calls.
_MODULE = ("module", "op")


def repeated(frame: pl.DataFrame) -> pl.Series:
    """Which rows of one process belong to a recomputation, in the frame's order.

    ``frame`` has module, op, call, direction and order, sorted by order. All False where no module
    encloses the others, so that ends of forward passes are not known.
    """
    nothing = pl.Series([False]).new_from_index(0, frame.height)
    rows = frame.select(
        *_MODULE, "call", "direction", "order", row=pl.int_range(pl.len(), dtype=pl.UInt32)
    )
    modules = rows.filter(pl.col("module").is_not_null())
    forwards = modules.filter(pl.col("direction") == "forward")
    backwards = modules.filter(pl.col("direction") == "backward")
    if forwards.is_empty() or backwards.is_empty():
        return nothing
    top = forwards.get_column("module").unique().sort()
    outermost = min(top, key=lambda path: (len(path.split(".")) if path else 0, path))
    ends = forwards.filter(pl.col("module") == outermost).select("order", end="order").sort("order")
    calls = forwards.group_by(*_MODULE, "call").agg(pl.col("order").max()).sort("order")
    own = backwards.select(*_MODULE, "order", backward="order").sort("order")
    # Sorted above; within groups polars cannot see that, and would warn.
    calls = calls.join_asof(
        own, on="order", by=list(_MODULE), strategy="forward", check_sortedness=False
    ).join_asof(ends, on="order", strategy="forward")
    again = calls.filter(
        (pl.col("module") != outermost)
        & pl.col("backward").is_not_null()
        & (pl.col("end").is_null() | (pl.col("backward") < pl.col("end")))
    ).select(*_MODULE, "call", again=pl.lit(True))
    marked = rows.join(
        again, on=[*_MODULE, "call"], how="left", nulls_equal=True, maintain_order="left"
    ).with_columns(
        again=pl.when(pl.col("direction") == "forward")
        .then(pl.col("again").fill_null(False))
        .otherwise(False)
    )
    # functions inside a repetition come before the module's own record
    inside = (
        pl.when(pl.col("module").is_not_null() & (pl.col("module") != outermost))
        .then("again")
        .backward_fill()
    )
    function = pl.col("module").is_null() & (pl.col("direction") == "forward")
    return marked.select(
        pl.when(function).then(inside.fill_null(False)).otherwise("again").fill_null(False)
    ).to_series()
