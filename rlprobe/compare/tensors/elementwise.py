"""Elementwise figures for the records whose tensors both sides kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import polars as pl

from rlprobe.compare import measures
from rlprobe.compare.tensors import arithmetic
from rlprobe.compare.tensors.distance import distance
from rlprobe.compare.tensors.figures import FIGURES, Distance
from rlprobe.dumps.tensors.source import TensorSource
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError

#: Reasons that are not of statistics or checksums alone, and stand beside elements.
_STANDS = (measures.LAYOUT, measures.CHECKSUMS_CONTRADICT)
#: Columns added or overwritten for the rows measured.
RESULT: dict[str, Any] = {
    "row": pl.UInt32,
    "t_status": pl.String,
    "t_reason": pl.String,
    "t_error": pl.Float64,
    "t_identical": pl.Boolean,
    **FIGURES,
}


def measure(
    table: pl.DataFrame, benchmark: TensorSource | None, target: TensorSource | None, jobs: int
) -> pl.DataFrame:
    """Read what is worth reading and overwrite error, status and reason of those rows.

    Rows of equal digests are not read. A file that one side promises and cannot give makes the
    record ``unreadable``, with the reason. Where a side has no file at all, what statistics say of
    a record stands.

    Args:
        table: rows of :func:`rlprobe.compare.measures.measure`.
        jobs: threads.
    """
    rows = _worth_reading(table, benchmark, target)
    if rows.is_empty():
        return table
    sources = benchmark, target
    # up to 8 bytes an element; what the types are is seen when the files are opened
    arithmetic.expect(int(8 * rows.get_column("size_benchmark").fill_null(0).sum()))

    def one(row: dict[str, Any]) -> dict[str, Any]:
        return _figures(row, sources)

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, rows.iter_rows(named=True)))
    return applied(table, found, (measures.SHAPE, measures.DTYPE))


def lacking(*sources: TensorSource | None) -> list[bool]:
    """Of each side, whether it has no tensor file at all."""
    return [source is None or source.empty for source in sources]


def applied(
    table: pl.DataFrame, found: Sequence[Mapping[str, Any]], kept: Sequence[str]
) -> pl.DataFrame:
    """Overwrite the rows that were measured.

    Args:
        table: rows of :func:`rlprobe.compare.measures.measure`.
        found: ``row`` (its number) and what :func:`described` gives; nothing where it was not read.
        kept: statuses that stand whatever the elements say, unless they could not be read.
    """
    figures = pl.DataFrame(found, schema=RESULT)
    names = [name for name in figures.columns if not name.startswith("t_") and name != "row"]
    read = pl.col("t_status").is_not_null()
    unmeasured = pl.col("t_status").is_in([measures.UNREADABLE, measures.SHAPE, measures.DTYPE])
    # why statistics or checksums saw nothing says nothing of elements
    stands = pl.when(pl.col("reason").is_in(_STANDS)).then("reason")
    # of another type or not, what is not finite is said first, as it is of statistics
    nonfinite = (pl.col("status") == measures.DTYPE) & (pl.col("t_status") == measures.NONFINITE)
    kept_status = pl.col("status").is_in(kept) & ~nonfinite.fill_null(False)
    return (
        table.drop([name for name in names if name in table.columns])
        .with_row_index("row")
        .join(figures, on="row", how="left", maintain_order="left")
        .with_columns(
            status=pl.when(unmeasured | (read & ~kept_status)).then("t_status").otherwise("status"),
            reason=pl.when(read).then(pl.coalesce("t_reason", stands)).otherwise("reason"),
            error=pl.when(read).then("t_error").otherwise("error"),
            error_kind=pl.when(unmeasured)
            .then(None)
            .when(read)
            .then(pl.lit(measures.TENSOR))
            .otherwise("error_kind"),
            error_uncertainty=pl.when(read & ~unmeasured)
            .then(0.0)
            .when(unmeasured)
            .then(None)
            .otherwise("error_uncertainty"),
            identical=pl.when(read).then("t_identical").otherwise("identical"),
        )
        .drop("row", "t_status", "t_reason", "t_error", "t_identical")
    )


def _worth_reading(
    table: pl.DataFrame, benchmark: TensorSource | None, target: TensorSource | None
) -> pl.DataFrame:
    """Rows of which a side names a tensor file and whose content is not known to be equal."""
    named = [pl.col(f"data_name_{side}").is_not_null() for side in ("benchmark", "target")]
    wanted = named[0] & named[1]
    if benchmark is None and target is None:
        return table.head(0).with_row_index("row")
    both = pl.col("order_benchmark").is_not_null() & pl.col("order_target").is_not_null()
    if any(lacking(benchmark, target)):
        both &= (pl.col("status") == measures.MATCHED) & pl.col("error_kind").is_null()
    known_equal = pl.col("error_kind").is_in([measures.DIGEST, measures.TENSOR]) & pl.col(
        "identical"
    )
    rows = table.with_row_index("row").filter(both & wanted & ~known_equal.fill_null(False))
    return rows.select(
        "row",
        "data_name_benchmark",
        "data_name_target",
        "size_benchmark",
        "shape_benchmark",
        "shape_target",
        "dtype_benchmark",
        "dtype_target",
    )


def _figures(
    row: dict[str, Any], sources: tuple[TensorSource | None, TensorSource | None]
) -> dict[str, Any]:
    empty = dict.fromkeys(RESULT)
    empty["row"] = row["row"]
    if row["size_benchmark"] == 0 and row["shape_benchmark"] == row["shape_target"]:
        # msprobe writes no file for a tensor without elements
        return empty
    tensors: list[TensorFile] = []
    problems: dict[str, str] = {}
    for side, source in zip(("benchmark", "target"), sources, strict=True):
        try:
            if source is None:
                raise TensorFileError("it has no dump_tensor_data directory")
            name, shape, dtype = (row[f"{key}_{side}"] for key in ("data_name", "shape", "dtype"))
            tensors.append(source.open(name, shape, dtype))
        except TensorFileError as error:
            problems[side] = str(error)
    if problems:
        reason = "; ".join(f"{side}: {problem}" for side, problem in problems.items())
        if len(problems) == len(sources) and len(set(problems.values())) == 1:
            reason = f"both sides: {problems[side]}"
        return {**empty, **unmeasured(measures.UNREADABLE, reason)}
    benchmark, target = tensors
    if _squeezed(benchmark.shape) != _squeezed(target.shape):
        return empty
    try:
        return {**empty, **described(distance(benchmark, target))}
    except TensorFileError as error:
        # one side is complex, or packs two numbers in an element
        return {**empty, **unmeasured(measures.DTYPE, str(error))}


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def unmeasured(status: str, reason: str) -> dict[str, Any]:
    """Columns of :data:`RESULT` for a record that could not be measured."""
    return {"t_status": status, "t_reason": reason, "t_identical": False}


def described(d: Distance) -> dict[str, Any]:
    """A distance as columns of :data:`RESULT`."""
    unlike = max(d.nonfinite_benchmark, d.nonfinite_target) > d.nonfinite_same
    any_bad = d.nonfinite_benchmark or d.nonfinite_target
    reason = None
    if any_bad:
        sides = [
            name
            for name, count in (
                ("benchmark", d.nonfinite_benchmark),
                ("target", d.nonfinite_target),
            )
            if count
        ]
        reason = "both" if len(sides) == 2 else sides[0]
    return {
        "t_status": measures.NONFINITE if any_bad else measures.MATCHED,
        "t_reason": reason,
        # an element that is not finite on one side only is no number away from the other
        "t_error": None if unlike else d.error,
        "t_identical": d.identical,
        "euclidean": d.euclidean,
        "cosine": d.cosine,
        "max_abs_err": d.max_abs_err,
        "max_abs_index": d.max_abs_index,
        "max_rel_err": d.max_rel_err,
        "ulp_max": d.ulp_max,
        "within_1e3": d.within_1e3,
        "within_5e3": d.within_5e3,
        "saturated": d.saturated,
    }
