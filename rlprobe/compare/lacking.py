"""Why records were not compared, in words that are the same for every record it happened to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import polars as pl

from rlprobe import terminal
from rlprobe.compare import measures
from rlprobe.terminal import counted, spelled

#: Reasons of records both sides have; what stands in ``reason`` is used where it is one for many.
SHAPES, DTYPES, TYPES = "shapes differ", "dtypes differ", "types of scalars differ"
LAYOUTS = "shapes differ, the number of elements does not"
UNREADABLE = "cannot be read"
NO_SUCH = {
    measures.BENCHMARK_ONLY: "the target has no such record",
    measures.TARGET_ONLY: "the benchmark has no such record",
}
#: What :func:`named` reads.
COLUMNS = (
    "name",
    "status",
    "reason",
    "error_kind",
    *(f"{name}_{side}" for name in ("shape", "dtype") for side in ("benchmark", "target")),
)
#: Characters of a name in a message; the whole name is in the records.
NAME = 96


class Lacking(NamedTuple):
    """Records that were not compared for one reason."""

    records: int
    #: Name of the first, and what it has on either side.
    first: str
    detail: str | None


def named(rows: pl.DataFrame) -> pl.DataFrame:
    """Columns reason, count, first, detail of rows that were not compared (records' columns)."""
    shapes = [
        pl.lit("[") + pl.col(f"shape_{side}").cast(pl.List(pl.String)).list.join(", ") + "]"
        for side in ("benchmark", "target")
    ]
    status = pl.col("status")
    none = pl.col("reason").is_in(list(measures.NONE_THERE.values())).fill_null(False)
    # that a number of it is not finite says nothing of why it was not compared
    why = pl.when(~pl.col("reason").is_in(["benchmark", "target", "both"])).then("reason")
    scalars = pl.col("shape_benchmark").is_null() & pl.col("shape_target").is_null()
    reason = (
        pl.when(none)
        .then("reason")
        .when((status == measures.SHAPE) & (pl.col("reason") == measures.LAYOUT).fill_null(False))
        .then(pl.lit(LAYOUTS))
        .when(status == measures.SHAPE)
        .then(pl.lit(SHAPES))
        .when(status == measures.UNREADABLE)
        .then(pl.lit(UNREADABLE))
        .when(status.is_in(list(NO_SUCH)))
        .then(pl.coalesce(why, status.replace_strict(NO_SUCH, default=None)))
        .when((status == measures.DTYPE) & scalars)
        .then(pl.lit(TYPES))
        .when((status == measures.DTYPE) & pl.col("error_kind").is_not_null())
        .then(pl.lit(DTYPES))
        .otherwise(pl.coalesce("reason", pl.lit("nothing was measured")))
    )
    detail = (
        pl.when(none)
        .then(None)
        .when(status == measures.SHAPE)
        .then(
            shapes[0].fill_null(pl.lit("a scalar"))
            + " against "
            + shapes[1].fill_null(pl.lit("a scalar"))
        )
        .when(status == measures.UNREADABLE)
        .then("reason")
        .when(status == measures.DTYPE)
        .then(
            pl.col("dtype_benchmark").fill_null("None")
            + " against "
            + pl.col("dtype_target").fill_null("None")
        )
    )
    # a null argument on both sides, or on the only one, has nothing to compare
    content = pl.col("dtype_benchmark").is_not_null() | pl.col("dtype_target").is_not_null()
    return (
        rows.filter(content)
        .select(reason=reason, name="name", detail=detail)
        .group_by("reason", maintain_order=True)
        .agg(count=pl.len(), first=pl.col("name").first(), detail=pl.col("detail").first())
    )


def short(name: str, room: int = NAME) -> str:
    """A name that fits a line: its beginning and its end."""
    return terminal.short(name, room)


def said(found: Iterable[tuple[str, Lacking]]) -> list[str]:
    """A line for each reason, the commonest first; one that holds for many steps is one line."""
    lines = []
    for reason, lacking in sorted(_of_steps(found), key=lambda item: -item[1].records):
        many = counted(lacking.records, "record")
        detail = f" ({short(lacking.detail, 2 * NAME)})" if lacking.detail else ""
        lines.append(f"{many}: {reason}; first: {short(lacking.first)}{detail}")
    return lines


def _of_steps(found: Iterable[tuple[str, Lacking]]) -> list[tuple[str, Lacking]]:
    """Reasons with those put together that differ by a rank's or a step's number alone."""
    return _put_together(_put_together(found, "step"), "rank")


def _put_together(found: Iterable[tuple[str, Lacking]], word: str) -> list[tuple[str, Lacking]]:
    number = re.compile(rf"\b{word} (\d+)\b")
    alike: dict[tuple[str, ...], list[tuple[str, Lacking]]] = {}
    for reason, lacking in found:
        parts = number.split(reason)
        # of two numbers it is not known which is meant
        key: tuple[str, ...] = (parts[0], parts[2]) if len(parts) == 3 else (reason,)
        alike.setdefault(key, []).append((reason, lacking))
    put = []
    for key, several in alike.items():
        if len(several) == 1:
            put += several
            continue
        numbers = sorted({int(number.split(reason)[1]) for reason, _ in several})
        records = sum(lacking.records for _, lacking in several)
        said = spelled(numbers, word).join(key)
        put.append((said, several[0][1]._replace(records=records)))
    return put
