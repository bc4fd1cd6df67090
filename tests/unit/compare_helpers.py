"""Comparing two small dumps in a test: what is written, what comes out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rlprobe.compare import sides, writer
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.insufficiency import insufficient
from rlprobe.compare.writer import Summary
from rlprobe.dumps import results
from rlprobe.errors import NotComparableError
from rlprobe.files import digest
from tests.msprobe import dumps


@dataclass(frozen=True)
class Result:
    """One stage's outcome."""

    records: pl.DataFrame
    summary: dict[str, Any]
    lack: NotComparableError | None

    def row(self, name: str) -> dict[str, Any]:
        """The one record called so on either side."""
        found = self.records.filter(pl.col("name") == name)
        assert found.height == 1, f"{found.height} rows of {name}"
        return found.row(0, named=True)

    def status(self, name: str) -> str:
        return str(self.row(name)["status"])


def list_files(run: Path) -> None:
    """Write as much of a run's manifest as comparisons look at: its files and their digests."""
    found = [p for p in sorted(run.rglob("*")) if p.is_file()]
    rows = [{"path": p.relative_to(run).as_posix(), **digest(p)._asdict()} for p in found]
    (run / "manifest.json").write_text(json.dumps({"files": rows}))


def put_table(directory: Path, name: str, table: pl.DataFrame) -> None:
    """Put a table into a stage's results as a comparison would have: vouched for."""
    path = directory / results.SUMMARY
    if not path.exists():
        writer.write_stage(directory, [pl.DataFrame(schema=writer.SCHEMA)], Summary("target", "x"))
    summary = Summary("target", "x")
    writer.write_table(directory, name, table, summary)
    said = json.loads(path.read_text())
    said["tables"].update(summary.tables)
    path.write_text(results.sealed(said))


def compared(benchmark: Path, target: Path, out: Path, **options: Any) -> Result:
    """Compare two sides of a single stage."""
    wanted = Options(**options)
    left, right = (sides.resolve(str(side)) for side in (benchmark, target))
    summaries = compare(left, right, out, wanted)
    (directory,) = out.iterdir()
    return Result(
        pl.read_parquet(directory / "records.parquet"),
        json.loads((directory / "summary.json").read_text()),
        insufficient(summaries, wanted.coverage, wanted.stages),
    )


def compared_data(tmp: Path, benchmark: Any, target: Any, **options: Any) -> Result:
    """Compare two dump.json contents."""
    for name, data in (("b", benchmark), ("t", target)):
        dumps.write(tmp / name, data)
    return compared(tmp / "b", tmp / "t", tmp / "out", **options)


#: Dumps as msprobe wrote them, on which a comparison is easily wrong.
CASES = Path(__file__).with_name("compare") / "cases"


def case(name: str, tmp: Path, benchmark: str = "b", target: str = "t") -> Result:
    """One of :data:`CASES` compared."""
    return compared(CASES / name / benchmark, CASES / name / target, tmp / "out")
