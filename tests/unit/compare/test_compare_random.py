"""Random dump pairs: every figure is what exact arithmetic gives, every record accounted for.

``RLPROBE_FUZZ_PAIRS`` sets how many, ``RLPROBE_FUZZ_SEED`` the first; ``make soak`` takes others.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import polars as pl
import pytest

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.insufficiency import insufficient
from tests.unit.compare import random_pairs

pytestmark = pytest.mark.slow

PAIRS = int(os.environ.get("RLPROBE_FUZZ_PAIRS", "120"))
FIRST = int(os.environ.get("RLPROBE_FUZZ_SEED", "1"))
GROUPS = 8


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_pairs_are_what_exact_arithmetic_says(tmp_path: Path, group: int) -> None:
    wrong = []
    for seed in range(FIRST + group, FIRST + PAIRS, GROUPS):
        directory = tmp_path / "pair"
        try:
            check(seed, directory)
        except Exception as error:  # noqa: BLE001 - disagreements and tracebacks are all listed
            wrong.append(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}")
        shutil.rmtree(directory, ignore_errors=True)
    assert not wrong, f"{len(wrong)} of {PAIRS // GROUPS} pairs:\n" + "\n".join(wrong[:10])


def check(seed: int, directory: Path) -> None:
    """Write the pair of this seed, compare it, and judge every row and the summary.

    Raises:
        AssertionError: a value is wrong; it says which, of what.
    """
    made = random_pairs.pair(seed)
    made.write(directory)
    both = [sides.resolve(str(directory / side)) for side in "bt"]
    options = Options()
    (summary,) = compare(both[0], both[1], directory / "out", options)
    (stage,) = (directory / "out").glob("*/records.parquet")
    rows = {row["name"]: row for row in pl.read_parquet(stage).iter_rows(named=True)}
    assert set(rows) == set(made.checks)
    for name, right in made.checks.items():
        try:
            right(rows[name])
        except AssertionError as error:
            shown = {key: value for key, value in rows[name].items() if value is not None}
            raise AssertionError(f"{name}: {error}\n{shown}") from error
    said = json.loads(stage.with_name("summary.json").read_text())
    _accounted(said, list(rows.values()))
    assert (insufficient([summary], options.coverage, options.stages) is None) == (
        said["compared"] > 0 and min(said["coverage"].values()) >= options.coverage
    )


def _accounted(said: dict[str, object], rows: list[dict[str, object]]) -> None:
    """The summary counts every record once."""
    compared = [
        row for row in rows
        if row["status"] == "nonfinite"
        or (row["status"] == "matched" and row["error_kind"] is not None)
    ]  # fmt: skip
    assert said["compared"] == len(compared)
    assert said["identical"] == sum(bool(row["identical"]) for row in compared)
    lacking = said["not_compared"]
    assert isinstance(lacking, list)
    assert len(compared) + sum(found["records"] for found in lacking) == len(rows)
    errors = [row["error"] for row in rows if row["error"] is not None]
    assert said["max_error"] == (max(errors) if errors else None)  # type: ignore[type-var]
    coverage = said["coverage"]
    assert isinstance(coverage, dict)
    for side in ("benchmark", "target"):
        there = [row for row in rows if row[f"order_{side}"] is not None]
        assert coverage[side] == (len(compared) / len(there) if there else 0)
