"""records.parquet and summary.json of one stage."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from rlprobe import said
from rlprobe.compare import lacking, measures
from rlprobe.compare.bounds import SIDES
from rlprobe.compare.lacking import Lacking
from rlprobe.compare.match.recompute import RECOMPUTE
from rlprobe.compare.tensors.figures import FIGURES
from rlprobe.compare.unchanged import Unchanged
from rlprobe.dumps import results
from rlprobe.dumps.results import FORMAT, RECORDS, SUMMARY
from rlprobe.dumps.schema import SLOTS
from rlprobe.files import Followed, replace_text, written
from rlprobe.formats import mark
from rlprobe.said import Said, of_side, say

#: Names of unmatched records listed in the summary, per side; all are in the records.
LISTED = 50

#: Columns of records.parquet, in this order.
SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "rank": pl.Int32,
    "order": pl.Int32,
    "name": pl.String,
    "module": pl.String,
    "op": pl.String,
    "call": pl.Int32,
    "direction": pl.String,
    "slot": pl.String,
    "index": pl.String,
    "status": pl.String,
    "reason": pl.String,
    "rule": pl.String,
    **{
        f"{name}_{side}": kind
        for name, kind in (
            ("name", pl.String),
            ("rank", pl.Int32),
            ("order", pl.Int32),
            ("dtype", pl.String),
            ("shape", pl.List(pl.Int64)),
            ("requires_grad", pl.Boolean),
            ("max", pl.Float64),
            ("min", pl.Float64),
            ("mean", pl.Float64),
            ("norm", pl.Float64),
            ("value", pl.String),
            ("digest", pl.String),
            ("data", pl.String),
            ("data_name", pl.String),
        )
        for side in ("benchmark", "target")
    },
    "max_diff": pl.Float64,
    "min_diff": pl.Float64,
    "mean_diff": pl.Float64,
    "norm_diff": pl.Float64,
    "identical": pl.Boolean,
    "error": pl.Float64,
    "error_kind": pl.String,
    "error_uncertainty": pl.Float64,
    **FIGURES,
    "noise": pl.Float64,
    "ratio": pl.Float64,
}


@cache
def _compared(across_dtypes: bool) -> pl.Expr:
    """Whether a record counts as compared: something of it was measured, in one shape and type."""
    status = pl.col("status")
    alike = status == measures.MATCHED
    if across_dtypes:
        alike = alike | (status == measures.DTYPE)
    return (alike & pl.col("error_kind").is_not_null()) | (status == measures.NONFINITE)


@cache
def _repeated() -> pl.Expr:
    """Whether a record is of one side alone as activation recomputation repeats its call."""
    status = pl.col("status")
    alone = (status == measures.BENCHMARK_ONLY) | (status == measures.TARGET_ONLY)
    return alone & pl.col("rule").eq_missing(RECOMPUTE)


def completed(table: pl.DataFrame) -> pl.DataFrame:
    """The table with exactly the columns of :data:`SCHEMA`; what was not measured is null."""
    missing = [
        pl.lit(None, kind).alias(name) for name, kind in SCHEMA.items() if name not in table.columns
    ]
    return table.with_columns(missing).select(
        pl.col(name).cast(kind) for name, kind in SCHEMA.items()
    )


@dataclass
class Summary:
    """What summary.json says, gathered process by process."""

    pair: str
    stage: str
    notes: list[Said] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    #: Records with content on each side, and those of them that were measured.
    records: Counter[str] = field(default_factory=Counter)
    measured: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    #: Of those compared: known to be equal bit by bit, and not seen to differ.
    identical: int = 0
    unseen: int = 0
    #: Records of which both sides have a checksum of one kind (``compared``), those whose checksums
    #: differ, and those that have one of another kind on either side (``unlike``).
    checksums: Counter[str] = field(default_factory=Counter)
    #: Why records were not compared: how many, and the first of them.
    lacking: dict[str, Lacking] = field(default_factory=dict)
    #: Whether records of unlike dtypes count as compared: one side runs in another precision.
    across_dtypes: bool = False
    max_error: float | None = None
    #: By step of which anything was measured: the largest error, and the record that has it.
    worst: dict[int, tuple[float, str | None]] = field(default_factory=dict)
    #: Records of slots of no known name.
    slots: Counter[str] = field(default_factory=Counter)
    #: Records whose tensor file a side names, while it has no directory of such files.
    without_tensors: Counter[str] = field(default_factory=Counter)
    #: Records of both sides whose tensor one side alone kept.
    kept_alone: Counter[str] = field(default_factory=Counter)
    steps: set[int] = field(default_factory=set)
    ranks: dict[str, set[int]] = field(
        default_factory=lambda: {"benchmark": set(), "target": set()}
    )
    unmatched: dict[str, list[str]] = field(default_factory=lambda: {"benchmark": [], "target": []})
    nonfinite: dict[str, dict[str, Any] | None] = field(
        default_factory=lambda: {"benchmark": None, "target": None}
    )
    #: Key data and token sketches joined by sample; None where a side has none.
    samples: dict[str, Any] | None = None
    #: By side: key of the run that was compared, and sha256 of its manifest; none of dumps.
    of: dict[str, dict[str, str]] = field(default_factory=dict)
    #: What vouches for each table beside summary.json (:func:`rlprobe.dumps.results.describe`).
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def joined(self) -> int:
        """Rows of key data that were joined by sample."""
        keys = {} if self.samples is None else self.samples["keys"]
        return sum(int(found["matched"]) for found in keys.values())

    def add(self, table: pl.DataFrame) -> None:
        """Count one process's rows (columns of :data:`SCHEMA`)."""
        for status, count in table.get_column("status").value_counts().iter_rows():
            self.counts[status] += count
        used = table.get_column("rule").drop_nulls()
        for rule, count in used.value_counts().iter_rows():
            self.rules[rule] += count
        measured, repeated = pl.col("measured"), pl.col("repeated")
        unseen = (pl.col("error") == 0) | (pl.col("error_uncertainty") >= 1)
        seen = table.select(
            *("identical", "error", "error_uncertainty"),
            measured=_compared(self.across_dtypes),
            repeated=_repeated(),
            # a null argument has nothing to compare, a repeated call nothing new
            **{f"has_{side}": pl.col(f"dtype_{side}").is_not_null() for side in SIDES},
        )
        numbers = seen.select(
            measured.sum().alias("compared"),
            (pl.col("identical") & measured).sum().alias("identical"),
            (~pl.col("identical") & measured & unseen).fill_null(False).sum().alias("unseen"),
            pl.col("error").filter(pl.col("error").is_finite()).max().alias("max_error"),
            **{f"records_{side}": (pl.col(f"has_{side}") & ~repeated).sum() for side in SIDES},
        ).row(0, named=True)
        self.compared += numbers["compared"]
        self.identical += numbers["identical"]
        self.unseen += numbers["unseen"]
        self._count_checksums(table)
        self._count_kept_alone(table)
        if numbers["compared"] < table.height:
            rest = seen.select(~measured & ~repeated).to_series()
            self._count_lacking(table.select(lacking.COLUMNS).filter(rest))
        for side in ("benchmark", "target"):
            self.records[side] += numbers[f"records_{side}"]
            self.measured[side] += numbers["compared"]
            self._list(table, side)
        if numbers["max_error"] is not None:
            self.max_error = max(self.max_error or 0.0, numbers["max_error"])
        if numbers["compared"]:
            self._remember_worst(table, numbers["max_error"] or 0.0)
        self.steps.update(table.get_column("step").unique())
        slots = table.get_column("slot").value_counts().iter_rows()
        self.slots.update({slot: count for slot, count in slots if slot not in SLOTS})

    def finish(self) -> None:
        """Note what only the whole says."""
        if self.checksums["unlike"]:
            self.notes.append(
                say(
                    "records whose checksums are of two kinds, which say nothing of each other: "
                    "{count}; dump both sides with one summary_mode",
                    count=f"{self.checksums['unlike']:,}",
                )
            )
        for side, count in sorted(self.without_tensors.items()):
            self.notes.append(
                say(
                    "1 record names a tensor file of the {side}, which has no dump_tensor_data "
                    "beside its dump.json, or an empty one: its elements were not compared, its "
                    "statistics are where both sides have them",
                    side=of_side(side),
                )
                if count == 1
                else say(
                    "{count} records name tensor files of the {side}, which has no "
                    "dump_tensor_data beside its dump.json, or an empty one: their elements were "
                    "not compared, their statistics are where both sides have them",
                    count=f"{count:,}",
                    side=of_side(side),
                )
            )
        for side, count in sorted(self.kept_alone.items()):
            self.notes.append(
                say(
                    "records whose tensor the {side} alone kept, so that their elements were not "
                    "compared: {count}; dump the other side with task tensor as well",
                    side=of_side(side),
                    count=f"{count:,}",
                )
            )
        if self.slots:
            # polars counts in no order, and two runs are to say the same
            often = sorted(self.slots.items(), key=lambda slot: (-slot[1], slot[0]))[:6]
            known = ", ".join(f"{lacking.short(s)} ({n:,})" for s, n in often)
            self.notes.append(
                say(
                    "records of slots that msprobe knows nothing of, compared like any other: "
                    "{known}",
                    known=known,
                )
            )

    def _count_checksums(self, table: pl.DataFrame) -> None:
        b, t = (table.get_column(f"digest_{side}") for side in ("benchmark", "target"))
        if b.null_count() == len(b) or t.null_count() == len(t):
            return
        same_kind = (b.str.slice(0, 4) == t.str.slice(0, 4)).fill_null(False)
        self.checksums["compared"] += int(same_kind.sum())
        self.checksums["unlike"] += int((b.is_not_null() & t.is_not_null() & ~same_kind).sum())
        self.checksums["differ"] += int((same_kind & (b != t).fill_null(False)).sum())

    def _remember_worst(self, table: pl.DataFrame, error: float) -> None:
        step = table.item(0, "step")  # of one process's rows all are of one
        if error > self.worst.get(step, (-1.0,))[0]:
            own = table.filter(pl.col("error") == error) if error else table.head(0)
            self.worst[step] = error, own.item(0, "name") if own.height else None

    def _count_kept_alone(self, table: pl.DataFrame) -> None:
        kept = [table.get_column(f"data_name_{side}").is_not_null() for side in SIDES]
        if all(column.any() for column in kept) or not any(column.any() for column in kept):
            return  # one record's file may be missing on purpose; whole sides are meant
        both = table.get_column("status") == measures.MATCHED
        unequal = both & ~table.get_column("identical")
        for side, column in zip(SIDES, kept, strict=True):
            if count := int((column & unequal).sum()):
                self.kept_alone[side] += count

    def _count_lacking(self, rows: pl.DataFrame) -> None:
        named = lacking.named(rows)
        for reason, count, *first in named.iter_rows():
            found = self.lacking.get(reason)
            self.lacking[reason] = (
                Lacking(count, *first)
                if found is None
                else found._replace(records=found.records + count)
            )

    def _list(self, table: pl.DataFrame, side: str) -> None:
        self.ranks[side].update(table.get_column(f"rank_{side}").drop_nulls().unique())
        room = LISTED - len(self.unmatched[side])
        if room > 0 and self.counts[f"{side}_only"]:
            only = table.filter(pl.col("status") == f"{side}_only").get_column("name")
            self.unmatched[side].extend(only.head(room))
        if self.nonfinite[side] is None and self.counts[measures.NONFINITE]:
            first = table.filter(
                (pl.col("status") == measures.NONFINITE) & pl.col("reason").is_in([side, "both"])
            ).head(1)
            if first.height:
                self.nonfinite[side] = first.select("step", "rank", "order", "name").row(
                    0, named=True
                )

    @property
    def of_key_data_alone(self) -> bool:
        """Whether neither side has records of the stage, while both have key data."""
        return self.samples is not None and not any(self.records.values())

    def coverage(self, side: str) -> float:
        """Share of a side's records with content that were measured; 0 when it has none."""
        total = self.records[side]
        return min(1.0, self.measured[side] / total) if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "pair": self.pair,
            "stage": self.stage,
            "of": self.of,
            "counts": {status: self.counts[status] for status in measures.STATUSES},
            "coverage": {side: self.coverage(side) for side in ("benchmark", "target")},
            "compared": self.compared,
            "identical": self.identical,
            "no_difference_seen": self.unseen,
            "checksums": {key: self.checksums[key] for key in ("compared", "differ")},
            "not_compared": [
                {"reason": reason, **found._asdict()} for reason, found in self.lacking.items()
            ],
            "steps": sorted(self.steps),
            "ranks": {side: sorted(ranks) for side, ranks in self.ranks.items()},
            "unmatched": self.unmatched,
            "nonfinite": self.nonfinite,
            "rules": dict(sorted(self.rules.items())),
            "max_error": self.max_error,
            "samples": self.samples,
            "notes": [str(note) for note in self.notes],
            "messages": said.kept(self.notes)[1],
            "tables": dict(sorted(self.tables.items())),
        }


def write_table(directory: Path, name: str, table: pl.DataFrame, summary: Summary) -> None:
    """Write a table beside summary.json, which will vouch for it.

    Raises:
        OSError: the directory cannot be written.
    """
    with written(directory / name) as temporary:
        table.write_parquet(temporary, compression="zstd", metadata=mark(results.kind(name)))
        described = results.describe(temporary, table.height)
    summary.tables[name] = described


def write_stage(
    directory: Path,
    tables: Iterable[pl.DataFrame],
    summary: Summary,
    unchanged: Unchanged | None = None,
) -> None:
    """Write records and summary, each whole or not at all, while the next table is measured.

    Tables of :func:`write_table` come before it.

    Args:
        unchanged: what of the tables may be copied, known once the first is there.

    Raises:
        OSError: the directory cannot be written.
    """
    with written(directory / RECORDS) as records:
        # an open file: a path may be opened by another thread after this one has given up
        with Followed(records) as followed, records.open("wb") as file:
            _write(file, iter(tables), summary, unchanged or Unchanged())
        # the counts of the statuses are those of the rows
        rows = sum(summary.counts.values())
        described = results.describe(records, rows, followed.digest)
        summary.tables[RECORDS] = described
    summary.finish()
    # last: where the summary stands, the tables that it vouches for stand too
    replace_text(directory / SUMMARY, results.sealed(summary.as_dict()))
    for name in results.TABLES.keys() - summary.tables.keys():
        (directory / name).unlink(missing_ok=True)  # of an earlier comparison


#: Quick to write, and small enough: the values of both sides hardly compress.
_PARQUET: dict[str, Any] = {"compression": "lz4", "row_group_size": 1 << 17, "statistics": False}


def _write(
    file: BinaryIO, tables: Iterator[pl.DataFrame], summary: Summary, unchanged: Unchanged
) -> None:
    metadata = mark(results.kind(RECORDS))
    begun = list(itertools.islice(tables, 1))
    tables = itertools.chain(begun, tables)
    with unchanged.writer(file, SCHEMA, metadata) as copying:
        if copying is None:
            _source(tables, summary).sink_parquet(
                file, engine="streaming", metadata=metadata, **_PARQUET
            )
            return
        with ThreadPoolExecutor(1) as beside:
            adding: Future[None] | None = None
            for table in tables:
                summary.add(table)
                if adding is not None:
                    adding.result()
                adding = beside.submit(copying.add, table)
            if adding is not None:
                adding.result()
        copying.finish()


def _source(tables: Iterable[pl.DataFrame], summary: Summary) -> pl.LazyFrame:
    """The tables as one lazy frame of which only one is in memory at a time."""
    from polars.io.plugins import register_io_source

    def batches(
        with_columns: list[str] | None,
        predicate: pl.Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[pl.DataFrame]:
        for table in tables:
            summary.add(table)
            yield table

    return register_io_source(batches, schema=SCHEMA)
