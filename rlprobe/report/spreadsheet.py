"""``records.csv``: the page's records for a spreadsheet, with all their digits."""

from __future__ import annotations

from pathlib import Path

from rlprobe.documents import csvfile
from rlprobe.files import replace_bytes
from rlprobe.judge import tables
from rlprobe.report.payload import Records

NAME = "records.csv"


def write(path: Path, records: Records) -> None:
    """Write the page's records; columns of :data:`rlprobe.judge.tables.SCHEMA`, the stage first."""
    wanted = ["stage", *(name for name in tables.SCHEMA if name != "stage")]
    rows = records.rows
    shown = rows.select(name for name in wanted if name in rows.columns)
    replace_bytes(path, csvfile.guarded(shown).write_csv().encode())
