"""How far two matched records are apart, from what both sides know of them.

``error`` is the relative L2 difference ``||t - b|| / ||b||`` (relative to ``||t||`` where the
benchmark is zero). Where it comes from is ``error_kind``:

- ``digest``: equal content digests, so 0;
- ``tensor``: from the tensors themselves (:mod:`rlprobe.compare.tensors`);
- ``sketch``: from linear sketches, unbiased, one standard deviation of ``1 / sqrt(2 k)``;
- ``statistics``: a lower bound, because statistics cannot see more. With d = t - b of n elements,
  ``||d||`` is at least ``| ||t|| - ||b|| |``, ``|max t - max b|``, ``|min t - min b|`` and
  ``|mean t - mean b| * sqrt(n)``.

Differences are target minus benchmark, as msprobe's are.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Accumulation error of two sketches relative to the norm: below it they see no difference.
#: (``sqrt(2) * rlprobe.sketch.DEFAULT_FLOOR``, spelled out because numpy's import is not free.)
SKETCH_FLOOR = math.sqrt(2.0) * 1.8e-7
#: Digests that identify content: sha256, and msprobe's CRC-32 (not its xor, which is blind to
#: order and to values that occur twice).
CONTENT_DIGESTS = ("sha256:", "crc32:")
STATISTICS = ("max", "min", "mean", "norm")
DIGEST, TENSOR, SKETCH, STATISTIC = "digest", "tensor", "sketch", "statistics"

MATCHED, BENCHMARK_ONLY, TARGET_ONLY = "matched", "benchmark_only", "target_only"
DTYPE, SHAPE, NONFINITE, UNREADABLE = "dtype", "shape", "nonfinite", "unreadable"
STATUSES = (MATCHED, BENCHMARK_ONLY, TARGET_ONLY, DTYPE, SHAPE, NONFINITE, UNREADABLE)

_SKETCH_ROWS = 1 << 12


def measure(table: pl.DataFrame) -> pl.DataFrame:
    """Add status, reason, ``*_diff``, error, error_kind, error_uncertainty and identical.

    ``table`` is :func:`rlprobe.compare.match.pairs.side_by_side`'s; its sketches are consumed.
    """
    table = table.with_columns(_number("benchmark"), _number("target")).with_columns(
        *_status(), *(_difference(name) for name in STATISTICS)
    )
    table = _exact_integers(table)
    table = table.with_columns(_scalar_difference()).with_columns(
        statistics=_statistics_error(), same_digest=_same_digest()
    )
    table = table.with_columns(_sketch_error(table))
    return table.with_columns(*_error()).drop(
        "statistics",
        "same_digest",
        "sketch_error",
        "sketch_benchmark",
        "sketch_target",
        "number_benchmark",
        "number_target",
        "size_target",
        "same_shape",
    )


def _number(side: str) -> pl.Expr:
    """A scalar's value as a number; null for tensors and texts."""
    value = pl.col(f"value_{side}")
    number = (
        pl.when(value.is_in(["True", "False"]))
        .then((value == "True").cast(pl.Float64))
        .otherwise(value.cast(pl.Float64, strict=False))
    )
    return pl.when(pl.col(f"shape_{side}").is_null()).then(number).alias(f"number_{side}")


def _nonfinite(side: str) -> pl.Expr:
    """Whether a side's extremes are not finite.

    Mean and norm do not count: a finite mask of -3.4e38 overflows both.
    """
    found = pl.lit(False)
    for name in ("max", "min", "number"):
        found = found | (~pl.col(f"{name}_{side}").is_finite()).fill_null(False)
    return found


def _status() -> list[pl.Expr]:
    benchmark, target = _nonfinite("benchmark"), _nonfinite("target")
    only_b, only_t = pl.col("order_target").is_null(), pl.col("order_benchmark").is_null()
    same_dtype = pl.col("dtype_benchmark").eq_missing(pl.col("dtype_target"))
    layout = pl.col("size_benchmark") == pl.col("size_target")
    status = (
        pl.when(only_b)
        .then(pl.lit(BENCHMARK_ONLY))
        .when(only_t)
        .then(pl.lit(TARGET_ONLY))
        .when(~pl.col("same_shape"))
        .then(pl.lit(SHAPE))
        .when(benchmark | target)
        .then(pl.lit(NONFINITE))
        .when(~same_dtype)
        .then(pl.lit(DTYPE))
        .otherwise(pl.lit(MATCHED))
    )
    reason = (
        pl.when(benchmark & target)
        .then(pl.lit("both"))
        .when(benchmark)
        .then(pl.lit("benchmark"))
        .when(target)
        .then(pl.lit("target"))
        .when(~only_b & ~only_t & ~pl.col("same_shape") & layout)
        .then(pl.lit("layout"))
    )
    return [status.alias("status"), reason.alias("reason")]


def _difference(name: str) -> pl.Expr:
    b, t = pl.col(f"{name}_benchmark"), pl.col(f"{name}_target")
    # equal infinities differ by nothing; inf - inf would say NaN
    return pl.when(b == t).then(0.0).otherwise(t - b).alias(f"{name}_diff")


def _exact_integers(table: pl.DataFrame) -> pl.DataFrame:
    """Differences of extremes that a float64 cannot tell apart (int64 near 2**62)."""
    exact = pl.col("shape_benchmark").is_not_null() & (
        pl.col("value_benchmark") != pl.col("value_target")
    )
    rows = (
        table.with_row_index("row").filter(exact).select("row", "value_benchmark", "value_target")
    )
    if rows.is_empty():
        return table
    extremes = [(_extremes(b), _extremes(t)) for _, b, t in rows.iter_rows()]
    fixed = rows.select(
        "row",
        *(
            pl.Series(
                name,
                [float(t[key] - b[key]) if b and t else None for b, t in extremes],
                dtype=pl.Float64,
            )
            for name, key in (("max_exact", "Max"), ("min_exact", "Min"))
        ),
    )
    return (
        table.with_row_index("row")
        .join(fixed, on="row", how="left", maintain_order="left")
        .with_columns(
            max_diff=pl.coalesce("max_exact", "max_diff"),
            min_diff=pl.coalesce("min_exact", "min_diff"),
        )
        .drop("row", "max_exact", "min_exact")
    )


def _extremes(text: str) -> dict[str, int] | None:
    """What :mod:`rlprobe.dumps.dumpjson` keeps of an integer tensor; None for any other text."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    exact = isinstance(found, dict) and all(type(found.get(key)) is int for key in ("Max", "Min"))
    return found if exact else None


def _scalar_difference() -> pl.Expr:
    """A scalar's difference is its maximum's."""
    b, t = pl.col("number_benchmark"), pl.col("number_target")
    difference = pl.when(b == t).then(0.0).otherwise(t - b)
    return pl.coalesce("max_diff", difference).alias("max_diff")


def _statistics_error() -> pl.Expr:
    """The largest lower bound of the L2 difference, relative to the norm."""
    bounds = [
        pl.col("max_diff").abs(),
        pl.col("min_diff").abs(),
        pl.col("norm_diff").abs(),
        pl.col("mean_diff").abs() * pl.col("size_benchmark").sqrt(),
    ]
    # NaN arises where both statistics overflowed to unlike infinities; it bounds nothing
    bound = pl.max_horizontal([b.fill_nan(None) for b in bounds])
    scales = []
    for side in ("benchmark", "target"):
        norm = pl.col(f"norm_{side}")
        extreme = pl.max_horizontal(
            pl.col(f"max_{side}").abs(),
            pl.col(f"min_{side}").abs(),
            pl.col(f"number_{side}").abs(),
        )
        scales.append(pl.when(norm.is_finite() & (norm > 0)).then(norm).otherwise(extreme))
    scale = pl.when(scales[0] > 0).then(scales[0]).otherwise(scales[1])
    text = (
        pl.col("shape_benchmark").is_null()
        & pl.col("shape_target").is_null()
        & pl.col("number_benchmark").is_null()
        & pl.col("value_benchmark").is_not_null()
        & pl.col("value_target").is_not_null()
    )
    same_text = pl.col("value_benchmark") == pl.col("value_target")
    return (
        pl.when(text)
        .then(pl.when(same_text).then(0.0).otherwise(1.0))
        .when(bound == 0)
        .then(0.0)
        .otherwise(bound / scale)
    )


def _same_digest() -> pl.Expr:
    digest = pl.col("digest_benchmark")
    content = (digest == pl.col("digest_target")) & pl.any_horizontal(
        digest.str.starts_with(prefix) for prefix in CONTENT_DIGESTS
    )
    files = pl.col("data_benchmark") == pl.col("data_target")
    return (
        (content.fill_null(False) | files.fill_null(False))
        & pl.col("same_shape")
        & (pl.col("dtype_benchmark") == pl.col("dtype_target"))
    ).fill_null(False)


def _same_xor() -> pl.Expr:
    digest = pl.col("digest_benchmark")
    same = (digest == pl.col("digest_target")) & digest.str.starts_with("xor:")
    return (same & pl.col("same_shape")).fill_null(False)


def _sketch_error(table: pl.DataFrame) -> pl.Series:
    """Relative L2 difference estimated from sketches; null where one is missing or overflowed."""
    left, right = table.get_column("sketch_benchmark"), table.get_column("sketch_target")
    if left.null_count() == len(left) or right.null_count() == len(right):
        return pl.Series("sketch_error", [None], dtype=pl.Float64).new_from_index(0, len(left))
    import numpy as np

    result = np.full(table.height, np.nan)
    usable = (
        left.is_not_null()
        & right.is_not_null()
        & table.get_column("same_shape")
        & (left.list.len() == right.list.len()).fill_null(False)
    )
    rows = usable.arg_true()
    norms = table.get_column("norm_benchmark").to_numpy()
    for start in range(0, len(rows), _SKETCH_ROWS):
        block = rows[start : start + _SKETCH_ROWS]
        b, t = (_matrix(side.gather(block)) for side in (left, right))
        if b is None or t is None:
            continue
        index = block.to_numpy()
        with np.errstate(all="ignore"):
            difference = np.subtract(t, b, dtype=np.float64)
            distance = np.sqrt(np.einsum("ij,ij->i", difference, difference))
            scale = norms[index].copy()
            # rare: without a norm of the benchmark, its sketch's, and without that the target's
            for side in (b, t):
                lacking = np.flatnonzero(~(np.isfinite(scale) & (scale > 0)))
                wide = side[lacking].astype(np.float64)
                scale[lacking] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
            result[index] = np.where(distance == 0, 0.0, distance / scale)
    return pl.Series("sketch_error", result).fill_nan(None)


def _matrix(sketches: pl.Series) -> npt.NDArray[np.float32] | None:
    """Sketches as rows; None where their lengths differ."""
    if sketches.is_empty():
        return None
    width = int(sketches.list.len()[0])
    if (sketches.list.len() != width).any():
        return None
    flat = sketches.explode(empty_as_null=False, keep_nulls=False).to_numpy()
    rows: npt.NDArray[np.float32] = flat.reshape(len(sketches), width)
    return rows


def _error() -> list[pl.Expr]:
    single = pl.col("order_benchmark").is_null() | pl.col("order_target").is_null()
    sketch = pl.col("sketch_error")
    sketched = sketch.is_not_null() & sketch.is_finite()
    same = pl.col("same_digest")
    # Different checksums with equal statistics: they differ, by how much nobody can say.
    unknown = (
        (pl.col("digest_benchmark") != pl.col("digest_target")).fill_null(False)
        & (pl.col("statistics").fill_null(0.0) == 0)
        & (pl.col("dtype_benchmark") == pl.col("dtype_target"))
    )
    statistics = pl.col("statistics").fill_nan(None)
    # what is not finite on one side only is no number away from the other side
    apart = (pl.col("status") == NONFINITE) & (pl.col("reason") != "both")
    error: pl.Expr = (
        pl.when(single)
        .then(None)
        .when(same)
        .then(0.0)
        .when(apart)
        .then(None)
        .when(sketched)
        .then(pl.max_horizontal(sketch, pl.lit(SKETCH_FLOOR)))
        .when(unknown)
        .then(None)
        .otherwise(statistics)
    )
    kind: pl.Expr = (
        pl.when(single)
        .then(None)
        .when(same)
        .then(pl.lit(DIGEST))
        .when(apart)
        .then(pl.lit(STATISTIC))
        .when(sketched)
        .then(pl.lit(SKETCH))
        .when(unknown)
        .then(pl.lit(DIGEST))
        .when(statistics.is_not_null())
        .then(pl.lit(STATISTIC))
    )
    xor = _same_xor()
    error = pl.when(error.is_null() & xor).then(0.0).otherwise(error)
    kind = pl.when(kind.is_null() & xor).then(pl.lit(DIGEST)).otherwise(kind)
    k = pl.col("sketch_benchmark").list.len()
    uncertainty = (
        pl.when(same)
        .then(0.0)
        .when(sketched)
        .then(pl.when(sketch < SKETCH_FLOOR).then(1.0).otherwise(1 / (2 * k).sqrt()))
    )
    reason = pl.coalesce(
        "reason",
        pl.when(~single & unknown & ~sketched)
        .then(pl.lit("checksums differ, statistics are equal: only tensors can tell how much"))
        .when(~single & sketched & ~same & (sketch < SKETCH_FLOOR))
        .then(pl.lit("no difference seen by the sketch"))
        .when(xor & pl.col("statistics").is_null())
        .then(pl.lit("equal xor checksums: blind to order and to values that occur in pairs")),
    )
    differing = (pl.col("digest_benchmark") != pl.col("digest_target")).fill_null(False)
    identical = ~single & (
        same
        | (
            (pl.col("statistics") == 0)
            & ~differing
            & (sketch.is_null() | (sketch == 0))
            & pl.col("same_shape")
        )
    )
    return [
        identical.fill_null(False).alias("identical"),
        error.alias("error"),
        kind.alias("error_kind"),
        uncertainty.alias("error_uncertainty"),
        reason.alias("reason"),
    ]
