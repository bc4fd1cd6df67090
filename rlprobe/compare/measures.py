"""How far two matched records are apart, from what both sides know of them.

``error`` is the relative L2 difference ``||t - b|| / ||b||`` (relative to ``||t||`` where the
benchmark is zero). Where it comes from is ``error_kind``:

- ``digest``: equal content digests, so 0; unequal ones beside equal statistics, so unknown;
- ``tensor``: from the tensors themselves (:mod:`rlprobe.compare.tensors`);
- ``sketch``: from linear sketches, unbiased, one standard deviation of ``1 / sqrt(2 k)``;
- ``statistics``: a lower bound (:mod:`rlprobe.compare.bounds`), because statistics cannot see more;
  of scalars the difference itself, and 1 where texts differ.

It is null where nothing was measured, and then ``reason`` says why. ``identical`` means that every
bit is known to be equal: by digest, or element by element. Statistics and sketches that agree are
"no difference seen". Differences are target minus benchmark, as msprobe's are.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import polars as pl

from rlprobe.compare import bounds, scalars
from rlprobe.dumps.schema import UNREADABLE_DTYPE
from rlprobe.sketch_floors import UNSEEN as UNSEEN_SKETCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

#: Digests that identify content: sha256, and msprobe's CRC-32 (not its xor, which is blind to
#: order and to values that occur twice).
CONTENT_DIGESTS = ("sha256:", "crc32:")
STATISTICS = bounds.STATISTICS
DIGEST, TENSOR, SKETCH, STATISTIC = "digest", "tensor", "sketch", "statistics"

MATCHED, BENCHMARK_ONLY, TARGET_ONLY = "matched", "benchmark_only", "target_only"
DTYPE, SHAPE, NONFINITE, UNREADABLE = "dtype", "shape", "nonfinite", "unreadable"
STATUSES = (MATCHED, BENCHMARK_ONLY, TARGET_ONLY, DTYPE, SHAPE, NONFINITE, UNREADABLE)

#: Reasons of rows in which nothing was measured, or nothing could be seen.
UNSEEN = "no difference seen"
WITHIN_ROUNDING = "statistics differ by no more than their own rounding"
IMPOSSIBLE_NORM = "a norm is impossible beside its extremes and says nothing; nothing else differs"
UNSEEN_BY_SKETCH = "no difference seen by the sketch"
CHECKSUMS_DIFFER = "checksums differ; there are no statistics"
CHECKSUMS_DIFFER_ONLY = "checksums differ, statistics are equal: only tensors can tell how much"
#: Reason of a record whose shape differs and whose number of elements does not.
LAYOUT = "layout"
CHECKSUMS_CONTRADICT = "checksums are equal, extremes are not: one of them is wrong"
#: What one side holds a value of is None on the other: an argument not given, a result not made.
NONE_THERE = {
    "benchmark": "the benchmark has None where the target has a value",
    "target": "the target has None where the benchmark has a value",
}
OVERFLOWED = "the norm overflowed on one side only: statistics say nothing of the difference"
XOR_EQUAL = (
    "equal xor checksums, which are blind to order and to values that occur in pairs; there are no "
    "statistics"
)
CHECKSUMS_UNLIKE = (
    "checksums of two kinds, which say nothing of each other; there are no statistics on both sides"
)
NO_STATISTICS = {
    "both": "neither side has statistics",
    "benchmark": "the benchmark has no statistics",
    "target": "the target has no statistics",
    "common": "no statistic is on both sides",
    "scale": "statistics differ, and neither norm nor extremes say relative to what",
}

_SKETCH_ROWS = 1 << 12


def measure(table: pl.DataFrame) -> pl.DataFrame:
    """Add status, reason, ``*_diff``, error, error_kind, error_uncertainty and identical.

    ``table`` is :func:`rlprobe.compare.match.pairs.side_by_side`'s; its sketches are consumed.
    """
    table = table.with_columns(*_status(table), *(bounds.difference(name) for name in STATISTICS))
    table = scalars.exact(table)
    table = table.with_columns(**bounds.statistics_error(table), **_digests(table))
    table = table.with_columns(_sketch_error(table))
    table = table.with_columns(**_conditions())
    return table.with_columns(*_error(), _reason(table)).drop(
        "usable",
        "empty",
        "sketched",
        "contradiction",
        "same",
        "unknown",
        "apart",
        "statistics",
        "moved",
        "impossible_norm",
        "scalar_error",
        "same_digest",
        "same_xor",
        "differing",
        "sketch_error",
        "sketch_benchmark",
        "sketch_target",
        "same_scalar",
        "size_target",
        "same_shape",
    )


@cache
def _nonfinite(side: str) -> pl.Expr:
    """Whether a side's extremes, or the number it is, are not finite.

    A mean or norm that overflowed does not count: a finite mask of -3.4e38 overflows both.
    """
    found = scalars.nonfinite(side) | bounds.impossible(side)
    for name in ("max", "min"):
        found = found | (~pl.col(f"{name}_{side}").is_finite()).fill_null(False)
    return found


def _status(table: pl.DataFrame) -> list[pl.Series]:
    """Status and reason; those of an ordinary record are told without looking further."""
    status = pl.Series("status", [MATCHED]).new_from_index(0, table.height)
    reason = pl.Series("reason", [None], dtype=pl.String).new_from_index(0, table.height)
    rows = (~table.select(_ordinary()).to_series()).arg_true()
    if not len(rows):
        return [status, reason]
    some = _told(table.select(_NEEDED)[rows])
    return [column.scatter(rows, some.get_column(column.name)) for column in (status, reason)]


#: What :func:`_told` looks at.
_NEEDED = [
    *(
        f"{name}_{side}"
        for name in ("order", "dtype", "size", "shape", "value", *STATISTICS)
        for side in ("benchmark", "target")
    ),
    "same_shape",
]


@cache
def _ordinary() -> pl.Expr:
    """Of one type and shape on both sides, readable, and nothing that is not finite: matched."""
    finite = [
        pl.col(f"{name}_{side}").is_finite().fill_null(True)
        for name in STATISTICS
        for side in ("benchmark", "target")
    ]
    return pl.all_horizontal(
        pl.col("order_benchmark").is_not_null(),
        pl.col("order_target").is_not_null(),
        pl.col("same_shape"),
        pl.col("dtype_benchmark").eq_missing(pl.col("dtype_target")),
        pl.col("dtype_benchmark").ne_missing(pl.lit(UNREADABLE_DTYPE)),
        pl.col("value_benchmark").is_null() & pl.col("value_target").is_null(),
        *finite,
    )


def _told(rows: pl.DataFrame) -> pl.DataFrame:
    """Status and reason of rows that :func:`_ordinary` says nothing of, from :data:`_NEEDED`."""
    return rows.with_columns(_odd()).select(_extraordinary())


@cache
def _odd() -> list[pl.Expr]:
    """Per side, whether it is there, readable and finite; columns, as conditions repeat them."""
    return [
        expression.alias(f"{what}_{side}")
        for side, other in (("benchmark", "target"), ("target", "benchmark"))
        for what, expression in (
            ("unreadable", (pl.col(f"dtype_{side}") == UNREADABLE_DTYPE).fill_null(False)),
            ("alone", pl.col(f"order_{other}").is_null()),
            ("nonfinite", _nonfinite(side)),
        )
    ] + [pl.col("dtype_benchmark").eq_missing(pl.col("dtype_target")).alias("same_dtype")]


@cache
def _extraordinary() -> list[pl.Expr]:
    benchmark, target = pl.col("nonfinite_benchmark"), pl.col("nonfinite_target")
    only_b, only_t = pl.col("alone_benchmark"), pl.col("alone_target")
    same_dtype = pl.col("same_dtype")
    layout = pl.col("size_benchmark") == pl.col("size_target")
    odd = pl.col("unreadable_benchmark"), pl.col("unreadable_target")
    status = (
        pl.when(odd[0] | odd[1])
        .then(pl.lit(UNREADABLE))
        .when(only_b)
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
        pl.when(odd[0])
        .then(pl.lit("benchmark: ") + pl.col("value_benchmark"))
        .when(odd[1])
        .then(pl.lit("target: ") + pl.col("value_target"))
        .when(benchmark & target)
        .then(pl.lit("both"))
        .when(benchmark)
        .then(pl.lit("benchmark"))
        .when(target)
        .then(pl.lit("target"))
        .when(~only_b & ~only_t & pl.col("dtype_benchmark").is_null() & ~same_dtype)
        .then(pl.lit(NONE_THERE["benchmark"]))
        .when(~only_b & ~only_t & pl.col("dtype_target").is_null() & ~same_dtype)
        .then(pl.lit(NONE_THERE["target"]))
        .when(~only_b & ~only_t & ~pl.col("same_shape") & layout)
        .then(pl.lit(LAYOUT))
    )
    return [status.alias("status"), reason.alias("reason")]


def _digests(table: pl.DataFrame) -> dict[str, pl.Expr]:
    """``same_digest``: the content is known to be equal; ``same_xor``; ``differing`` checksums."""
    never = pl.lit(False)
    b, t = pl.col("digest_benchmark"), pl.col("digest_target")
    same = pl.col("same_shape") & (pl.col("dtype_benchmark") == pl.col("dtype_target"))
    sides = [table.get_column(f"{name}_benchmark") for name in ("digest", "data")]
    digests, files = (side.null_count() < len(side) for side in sides)
    content = xor = differing = never
    if digests:
        content = (b == t) & pl.any_horizontal(b.str.starts_with(p) for p in CONTENT_DIGESTS)
        xor = (b == t) & b.str.starts_with("xor:") & same
        # checksums of two kinds say nothing of one another
        differing = (b != t) & (b.str.slice(0, 4) == t.str.slice(0, 4)) & same
    stored = (pl.col("data_benchmark") == pl.col("data_target")) if files else never
    equal = (content.fill_null(False) | stored.fill_null(False)) & same
    return {
        "same_digest": equal.fill_null(False),
        "same_xor": xor.fill_null(False),
        "differing": differing.fill_null(False),
    }


def _sketch_error(table: pl.DataFrame) -> pl.Series:
    """Relative L2 difference estimated from sketches; null where one is missing or overflowed."""
    left, right = table.get_column("sketch_benchmark"), table.get_column("sketch_target")
    if left.null_count() == len(left) or right.null_count() == len(right):
        return pl.Series("sketch_error", [None], dtype=pl.Float64).new_from_index(0, len(left))
    import numpy as np

    # Imported here: tables without sketches need no numpy.
    from rlprobe import sketch

    result = np.full(table.height, np.nan)
    usable = (
        left.is_not_null()
        & right.is_not_null()
        & table.get_column("same_shape")
        & (left.list.len() == right.list.len()).fill_null(False)
    )
    norms = table.get_column("norm_benchmark").to_numpy()
    for block in _of_one_length(usable, left.list.len()):
        b, t = (_matrix(side.gather(block)) for side in (left, right))
        index = block.to_numpy()
        with np.errstate(all="ignore"):
            distance = sketch.distances(b, t)
            scale = norms[index].copy()
            # rare: without a norm of the benchmark, its sketch's, and without that the target's
            for side in (b, t):
                lacking = np.flatnonzero(~(np.isfinite(scale) & (scale > 0)))
                scale[lacking] = sketch.norms(side[lacking])
            result[index] = np.where(distance == 0, 0.0, distance / scale)
    return pl.Series("sketch_error", result).fill_nan(None)


def _of_one_length(usable: pl.Series, lengths: pl.Series) -> Iterator[pl.Series]:
    """Row numbers, a block at a time, of sketches that are all of one length."""
    for length in lengths.filter(usable & (lengths > 0)).unique():
        rows = (usable & (lengths == length)).arg_true()
        for start in range(0, len(rows), _SKETCH_ROWS):
            yield rows[start : start + _SKETCH_ROWS]


def _matrix(sketches: pl.Series) -> npt.NDArray[np.float32]:
    """Sketches of one length as rows."""
    flat = sketches.explode(empty_as_null=False, keep_nulls=False).to_numpy()
    rows: npt.NDArray[np.float32] = flat.reshape(len(sketches), -1)
    return rows


@cache
def _conditions() -> dict[str, pl.Expr]:
    """What is known of each record; columns that are looked at and dropped again."""
    status = pl.col("status")
    matched, nonfinite = status == MATCHED, status == NONFINITE
    usable = matched | nonfinite | (status == DTYPE)
    extremes = pl.any_horizontal(
        (pl.col(f"{name}_diff") != 0).fill_null(False) for name in ("max", "min")
    )
    contradiction = pl.col("same_digest") & extremes & usable & ~nonfinite
    sketch = pl.col("sketch_error")
    return {
        "usable": usable,
        "empty": matched & (pl.col("size_benchmark") == 0).fill_null(False),
        "sketched": (sketch.is_not_null() & sketch.is_finite()).fill_null(False),
        "contradiction": contradiction,
        "same": pl.col("same_digest") & ~contradiction & usable,
        # Different checksums with equal statistics: they differ, by how much nobody can say.
        "unknown": pl.col("differing") & (pl.col("statistics") == 0).fill_null(False) & matched,
        # what is not finite on one side only is no number away from the other side
        "apart": (nonfinite & (pl.col("reason") != "both")).fill_null(False),
    }


@cache
def _error() -> list[pl.Expr]:
    """The columns that measure a record, from what :func:`_conditions` knows."""
    usable, empty, same = pl.col("usable"), pl.col("empty"), pl.col("same")
    sketched, unknown, apart = pl.col("sketched"), pl.col("unknown"), pl.col("apart")
    sketch, statistics = pl.col("sketch_error"), pl.col("statistics")
    error = (
        pl.when(~usable)
        .then(None)
        .when(same | empty)
        .then(0.0)
        .when(apart)
        .then(None)
        .when(sketched)
        .then(pl.max_horizontal(sketch, pl.lit(UNSEEN_SKETCH)))
        .when(unknown)
        .then(None)
        .otherwise(statistics)
    )
    # opposite infinities differ, however little can be said of the rest
    by_statistics = statistics.is_not_null() | ((pl.col("status") == NONFINITE) & pl.col("moved"))
    kind = (
        pl.when(~usable)
        .then(None)
        .when(same)
        .then(pl.lit(DIGEST))
        .when(empty)
        .then(pl.lit(TENSOR))
        .when(apart)
        .then(pl.lit(STATISTIC))
        .when(sketched)
        .then(pl.lit(SKETCH))
        .when(unknown)
        .then(pl.lit(DIGEST))
        .when(by_statistics)
        .then(pl.lit(STATISTIC))
    )
    k = pl.col("sketch_benchmark").list.len()
    uncertainty = (
        pl.when(same | empty)
        .then(0.0)
        .when(usable & sketched & ~apart)
        .then(pl.when(sketch < UNSEEN_SKETCH).then(1.0).otherwise(1 / (2 * k).sqrt()))
    )
    return [
        (same | empty | (pl.col("same_scalar") & usable)).alias("identical"),
        error.alias("error"),
        kind.alias("error_kind"),
        uncertainty.alias("error_uncertainty"),
    ]


#: Reasons by number: conditions on numbers are quicker than on texts.
_REASONS = (
    None,
    CHECKSUMS_CONTRADICT,
    UNSEEN_BY_SKETCH,
    CHECKSUMS_DIFFER_ONLY,
    WITHIN_ROUNDING,
    UNSEEN,
    IMPOSSIBLE_NORM,
)
_UNMEASURED = len(_REASONS)


@cache
def _number_of_reason() -> pl.Expr:
    plain = pl.col("usable") & ~pl.col("same") & ~pl.col("empty")
    sketched, statistics = pl.col("sketched"), pl.col("statistics")

    def number(reason: str) -> pl.Expr:
        return pl.lit(_REASONS.index(reason), pl.UInt8)

    return (
        pl.when(pl.col("contradiction"))
        .then(number(CHECKSUMS_CONTRADICT))
        .when(plain & sketched & (pl.col("sketch_error") < UNSEEN_SKETCH))
        .then(number(UNSEEN_BY_SKETCH))
        .when(plain & ~sketched & pl.col("unknown"))
        .then(number(CHECKSUMS_DIFFER_ONLY))
        .when(plain & ~sketched & statistics.is_null())
        .then(pl.lit(_UNMEASURED, pl.UInt8))
        .when(plain & ~sketched & (statistics == 0) & pl.col("impossible_norm"))
        .then(number(IMPOSSIBLE_NORM))
        .when(plain & ~sketched & (statistics == 0) & pl.col("moved"))
        .then(number(WITHIN_ROUNDING))
        .when(plain & ~sketched & (statistics == 0) & ~pl.col("same_scalar"))
        .then(number(UNSEEN))
        .otherwise(pl.lit(0, pl.UInt8))
    )


def _reason(table: pl.DataFrame) -> pl.Series:
    """Why a record's error is what it is; what its status gave as reason stands."""
    numbers = table.select(_number_of_reason()).to_series()
    reason = pl.Series("reason", [*_REASONS, None], dtype=pl.String).gather(numbers)
    rows = (numbers == _UNMEASURED).arg_true()
    if len(rows):
        reason = reason.scatter(rows, table[rows].select(_unmeasured()).to_series())
    given = table.get_column("reason")
    return (
        reason if given.null_count() == len(given) else given.zip_with(given.is_not_null(), reason)
    )


@cache
def _unmeasured() -> pl.Expr:
    """Why a record that both sides have was not measured."""
    nothing = [
        pl.all_horizontal(pl.col(f"{name}_{side}").is_null() for name in (*STATISTICS, "value"))
        for side in ("benchmark", "target")
    ]
    kinds = [pl.col(f"digest_{side}").str.slice(0, 4) for side in ("benchmark", "target")]
    return (
        pl.when(bounds.overflow())
        .then(pl.lit(OVERFLOWED))
        .when(pl.col("moved"))
        .then(pl.lit(NO_STATISTICS["scale"]))
        .when(pl.col("differing"))
        .then(pl.lit(CHECKSUMS_DIFFER))
        .when(pl.col("same_xor"))
        .then(pl.lit(XOR_EQUAL))
        .when((kinds[0] != kinds[1]).fill_null(False))
        .then(pl.lit(CHECKSUMS_UNLIKE))
        # an argument that is None on both sides has nothing to compare
        .when(pl.col("dtype_benchmark").is_null() & pl.col("dtype_target").is_null())
        .then(None)
        .when(nothing[0] & nothing[1])
        .then(pl.lit(NO_STATISTICS["both"]))
        .when(nothing[0])
        .then(pl.lit(NO_STATISTICS["benchmark"]))
        .when(nothing[1])
        .then(pl.lit(NO_STATISTICS["target"]))
        .otherwise(pl.lit(NO_STATISTICS["common"]))
        .alias("reason")
    )
