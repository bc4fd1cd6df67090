"""docs/compare.md says what every column of records.parquet is: of all of them, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl

from rlprobe.compare import measures
from rlprobe.compare.writer import SCHEMA
from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import compared_data

DOCS = Path(__file__).parents[2] / "docs"
NAME = "Functional.linear.0.forward"


def documented(page: str, title: str) -> list[str]:
    """The names in backticks of a table's first column."""
    text = (DOCS / page).read_text(encoding="utf-8")
    section = text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in rows for name in re.findall(r"`([a-z_0-9*]+)`", cell)]


def test_the_columns_that_are_written_are_those_that_are_documented(tmp_path: Path) -> None:
    data = {NAME: call([tensor()], [tensor()])}
    written = compared_data(tmp_path, data, data).records.columns
    assert written == list(SCHEMA)
    named = documented("compare.md", "Columns of records.parquet")
    assert len(set(named)) == len(named)
    sides = [name.replace("*", side) for name in named for side in ("benchmark", "target")]
    assert set(sides) == set(written)


def test_every_status_is_documented() -> None:
    assert set(documented("compare.md", "Every record once")) >= set(measures.STATUSES)


def test_every_kind_of_error_is_documented() -> None:
    kinds = {measures.DIGEST, measures.TENSOR, measures.SKETCH, measures.STATISTIC}
    assert set(documented("compare.md", "Every record once")) >= kinds


def test_what_the_python_call_returns_is_documented(tmp_path: Path) -> None:
    """Columns that the examples of the page ask for are there."""
    import rlprobe
    from tests.msprobe import dumps

    for side, top in (("b", 1.0), ("t", 2.0)):
        leaf = tensor((top, -top, 0.0, 3 * top))
        dumps.write(tmp_path / side, {NAME: call([tensor()], [leaf])})
    found = rlprobe.compare_dumps(tmp_path / "b", tmp_path / "t")
    assert found.records.columns == ["stage", *SCHEMA]
    assert found.judged.filter(pl.col("beyond")).select("stage", "name", "floor", "within").height
