"""One module on one side that is several on the other: the parts joined into one record.

``qkv_proj`` against ``q_proj``, ``k_proj`` and ``v_proj``: outputs join along the last dimension,
weights, biases and their gradients along the first, inputs are one and the same. Of joined records
max, min, mean and norm follow from the parts exactly; sketches do not (the elements' places in the
whole are others), and tensors are joined when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import polars as pl

from rlprobe.compare.match.rules import Fuse
from rlprobe.compare.match.state import State
from rlprobe.dumps.apinames import SEPARATOR

_LAYER = re.compile(r"(?<=layers\.)(\d+)")
_GROUP = ("stem", "call", "direction", "slot", "index")


def layer_number(path: str) -> int | None:
    found = _LAYER.search(path)
    return int(found[1]) if found else None


def with_layer_added(path: str, offset: int) -> str:
    return _LAYER.sub(lambda m: str(int(m[1]) + offset), path, count=1)


def fuse(
    state: State, benchmark: pl.DataFrame, target: pl.DataFrame, fuses: Sequence[Fuse]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Match what is left by the fuse rules; joined records are appended to their side."""
    for rule in fuses:
        benchmark = _one_way(state, rule, benchmark, "left")
        target = _one_way(state, rule, target, "right")
    return benchmark, target


def _one_way(state: State, rule: Fuse, frame: pl.DataFrame, parts_side: str) -> pl.DataFrame:
    """Join the parts on one side where the other side has the whole."""
    other = "right" if parts_side == "left" else "left"
    rows: pl.DataFrame = getattr(state, parts_side)
    last = pl.col("path").str.extract(r"([^.]*)$")
    fused: pl.DataFrame = getattr(state, other).filter(last == rule.whole)
    parts = rows.filter(last.is_in(rule.parts))
    if fused.is_empty() or parts.is_empty():
        return frame
    stem = pl.col("path").str.replace(r"[^.]*$", rule.whole)
    number = last.replace_strict({name: n for n, name in enumerate(rule.parts)}, default=None)
    parts = parts.with_columns(stem=stem, part=number)
    values = frame[parts.get_column("row")].select(_VALUES)
    groups = (
        pl.concat([parts, values], how="horizontal")
        .sort("part", maintain_order=True)
        .group_by(_GROUP, maintain_order=True)
        .agg(*_joined(), rows="row", parts=pl.col("part").n_unique(), leaves=pl.len())
        .filter((pl.col("parts") == len(rule.parts)) & (pl.col("leaves") == len(rule.parts)))
        .filter(pl.col("usable"))
    )
    keys = fused.select("row", "op", stem="path", **{name: name for name in _GROUP[1:]})
    both = groups.join(keys, on=list(_GROUP), nulls_equal=True, suffix="_whole").unique(
        _GROUP, keep="first", maintain_order=True
    )
    if both.is_empty():
        return frame
    plain = pl.col("op_whole").str.contains(rule.elementwise.pattern)
    virtual = both.with_columns(
        data_name=pl.when(plain).then("data_name"), module="stem"
    ).with_row_index("_row", offset=frame.height)
    pairs = virtual.select(
        row=pl.col("_row") if parts_side == "left" else pl.col("row"),
        row_target=pl.col("row") if parts_side == "left" else pl.col("_row"),
    )
    used = virtual.get_column("rows").explode()
    setattr(state, parts_side, rows.filter(~pl.col("row").is_in(used.implode())))
    state.add(pairs, pl.lit(rule.name))
    missing = [
        pl.lit(None, frame.schema[name]).alias(name)
        for name in frame.columns
        if name not in virtual.columns
    ]
    added = virtual.with_columns(missing).select(
        pl.col(name).cast(kind) for name, kind in frame.schema.items()
    )
    return pl.concat([frame, added])


_VALUES = (
    "dtype",
    "shape",
    "requires_grad",
    "max",
    "min",
    "mean",
    "norm",
    "data_name",
)


def _joined() -> list[pl.Expr]:
    """One record's values from its parts', per kind of slot."""
    same = pl.col("slot").first() == "input"
    axis_first = (
        pl.col("slot")
        .first()
        .is_in(["parameters", "grad", "grad_reduced", "grad_clipped", "change"])
    )
    sizes = pl.col("shape").list.eval(pl.element().product()).list.first().fill_null(1)
    total = sizes.sum()
    shape = pl.col("shape").first()
    at_front = pl.concat_list(
        pl.col("shape").list.first().sum().cast(pl.Int64).implode(), shape.list.slice(1)
    )
    at_back = pl.concat_list(
        shape.list.head(shape.list.len().cast(pl.Int64) - 1),
        pl.col("shape").list.last().sum().cast(pl.Int64).implode(),
    )
    names = pl.col("data_name")
    usable = (
        pl.when(same)
        .then(_all_equal("max", "min", "norm"))
        .otherwise(pl.col("shape").is_not_null().all() & (pl.col("shape").list.len() > 0).all())
    )
    return [
        usable.alias("usable"),
        pl.col("name").str.join(SEPARATOR),
        pl.col("order").min(),
        pl.col("op").first(),
        pl.when(pl.col("dtype").n_unique() == 1)
        .then(pl.col("dtype").first())
        .otherwise(pl.col("dtype").str.join("; "))
        .alias("dtype"),
        pl.when(same).then(shape).when(axis_first).then(at_front).otherwise(at_back).alias("shape"),
        pl.col("requires_grad").any(),
        pl.col("max").max(),
        pl.col("min").min(),
        pl.when(same)
        .then(pl.col("mean").first())
        .otherwise((pl.col("mean") * sizes).sum() / total)
        .alias("mean"),
        pl.when(same)
        .then(pl.col("norm").first())
        .otherwise((pl.col("norm") ** 2).sum().sqrt())
        .alias("norm"),
        pl.when(names.null_count() > 0)
        .then(None)
        .when(same)
        .then(names.first())
        .otherwise(names.str.join(SEPARATOR))
        .alias("data_name"),
    ]


def _all_equal(*columns: str) -> pl.Expr:
    return pl.all_horizontal((pl.col(name).n_unique() == 1) for name in columns)
