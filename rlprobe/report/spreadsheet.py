"""``records.csv``: the page's records for a spreadsheet, with all their digits."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from rlprobe.files import replace_bytes
from rlprobe.judge import tables
from rlprobe.report.payload import Records

NAME = "records.csv"
#: What a spreadsheet takes for the beginning of a formula. Names come from dumps.
_FORMULA = r"^[=+\-@\t\r]"


def write(path: Path, records: Records) -> None:
    """Write the records that the page shows; columns of :data:`rlprobe.judge.tables.SCHEMA`, after
    their stage.

    Texts that a spreadsheet would compute begin with an apostrophe.
    """
    wanted = ["stage", *(name for name in tables.SCHEMA if name != "stage")]
    rows = records.rows
    shown = rows.select(name for name in wanted if name in rows.columns)
    texts = [name for name, kind in shown.schema.items() if kind == pl.String]
    shown = shown.with_columns(
        pl.when(pl.col(name).str.contains(_FORMULA))
        .then(pl.lit("'") + pl.col(name))
        .otherwise(pl.col(name))
        .alias(name)
        for name in texts
    )
    replace_bytes(path, shown.write_csv().encode())
