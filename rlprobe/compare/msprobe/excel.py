"""A table as an Excel workbook: every cell a text, and as many sheets as it takes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import polars as pl

from rlprobe.errors import RlprobeError
from rlprobe.files import written

#: Rows of a sheet below its header, and characters of a cell, that Excel has room for.
ROWS, CHARACTERS = (1 << 20) - 1, 32767
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def require() -> None:
    """Make sure that workbooks can be written here.

    Raises:
        RlprobeError: what writes them is not installed.
    """
    if importlib.util.find_spec("openpyxl") is None:
        raise RlprobeError(
            "an Excel workbook needs openpyxl, which is not installed: `pip install openpyxl`, or "
            "ask for --table csv"
        )


def write(table: pl.DataFrame, path: Path) -> None:
    """Write a table of texts; a cell that begins with ``=`` stays a text and is no formula.

    Raises:
        OSError: the file cannot be written.
    """
    from openpyxl import Workbook  # type: ignore[import-untyped]
    from openpyxl.cell import WriteOnlyCell  # type: ignore[import-untyped]

    book = Workbook(write_only=True)
    for start in range(0, max(1, table.height), ROWS):
        sheet = book.create_sheet(f"records {start // ROWS + 1}")
        sheet.freeze_panes = "A2"
        sheet.append(table.columns)
        for row in table.slice(start, ROWS).iter_rows():
            cells = []
            for value in row:
                cell = WriteOnlyCell(sheet)
                if value is not None:
                    cell.value = _FORBIDDEN.sub("\ufffd", str(value))[:CHARACTERS]
                    # otherwise openpyxl takes a text that begins with = for a formula
                    cell.data_type = "s"
                cells.append(cell)
            sheet.append(cells)
    with written(path) as temporary:
        book.save(temporary)
