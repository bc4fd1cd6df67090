"""Our table equals the real ``msprobe compare``'s, row by row and column by column.

Left out are only rows where msprobe drops the other side's record, which is a trap of its own
(tests/msprobe/test_msprobe_traps.py): there its numbers are not numbers.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.msprobe import table
from tests.forked import Forked
from tests.msprobe import dumps, tensors

pytestmark = [pytest.mark.msprobe, pytest.mark.slow]
pytest.importorskip("torch")
pytest.importorskip("msprobe")

HERE = Path(__file__).parent


def _statistics(directory: Path, forked: Forked) -> None:
    for side, data in zip("bt", dumps.random_pair(11, 150), strict=True):
        dumps.write(directory / side, data, stack=True)


def _checksums(directory: Path, forked: Forked) -> None:
    for side, data in zip("bt", dumps.random_pair(12, 60, checksums=True), strict=True):
        dumps.write(directory / side, data)


def _xor(directory: Path, forked: Forked) -> None:
    for side, word in (("b", "0xfe1511780746a372"), ("t", "0xfe1511780746a373")):
        leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 2]}
        data = {
            "Functional.linear.0.forward": dumps.call(
                [{**leaf, "md5": "0x0000000000000036"}, {**leaf, "shape": [], "md5": 0.0}],
                [{**leaf, "md5": word}, {**leaf, "shape": [], "md5": 4.5}],
            )
        }
        dumps.write(directory / side, data)


def _others(directory: Path, forked: Forked) -> None:
    """Arguments that are no tensors and no plain values of Python."""
    for side, other in (("b", 0), ("t", 1)):
        group = {"type": "torch.ProcessGroup", "group_ranks": [0, 1 + other], "group_id": "a"}
        kwargs = {
            "group": group,
            "src": dumps.scalar(other),
            "memory_format": {
                "type": "torch.memory_format",
                "format": ["contiguous_format", "channels_last"][other],
            },
            "eps": dumps.scalar(0.5 + other / 8, "float64"),
            "count": dumps.scalar(3 + other, "int64"),
            "kept": dumps.scalar(True, "bool_"),
        }
        data = {
            "Distributed.broadcast.0.forward": {
                **dumps.call([dumps.tensor()], [dumps.tensor()]), "input_kwargs": kwargs,
            }
        }  # fmt: skip
        dumps.write(directory / side, data)


def _tensors(directory: Path, forked: Forked) -> None:
    tensors.write_pair(directory / "b", directory / "t", seed=5)


def _real(task: str, mode: str) -> Callable[[Path, Forked], None]:
    """Dumps that msprobe itself makes of a small model; the target has one weight scaled."""

    def make(directory: Path, forked: Forked) -> None:
        directory.mkdir(parents=True)
        for side, scale in (("b", "1"), ("t", "1.05")):
            made = directory / f"made-{side}"
            done = forked.run(HERE / "dump_model.py", made, task, mode, scale)
            assert done.returncode == 0, done.stdout
            (process,) = (made / "step0").iterdir()
            process.rename(directory / side)

    return make


PAIRS: dict[str, Callable[[Path, Forked], None]] = {
    "statistics": _statistics,
    "md5": _checksums,
    "xor": _xor,
    "others": _others,
    "tensor": _tensors,
    "real-statistics": _real("statistics", "statistics"),
    "real-md5": _real("statistics", "md5"),
    "real-tensor": _real("tensor", "statistics"),
}


@pytest.fixture(scope="module")
def results(
    forked: Forked, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[Any], pl.DataFrame]]:
    """Per pair, msprobe's rows and ours."""
    root = tmp_path_factory.mktemp("exact")
    jobs = []
    for name, make in PAIRS.items():
        make(root / name, forked)
        jobs.append([str(root / name / s / "dump.json") for s in "tb"] + [str(root / name / "out")])
    (root / "pairs.json").write_text(json.dumps(jobs))
    done = forked.run(HERE / "run_msprobe.py", root / "pairs.json")
    assert done.returncode == 0, done.stdout
    found = {}
    for name in PAIRS:
        (written,) = (root / name / "out").glob("compare_result_*.csv")
        with written.open(newline="") as file:
            theirs = list(csv.DictReader(file))
        benchmark, target = (sides.resolve(str(root / name / side)) for side in "bt")
        compare(benchmark, target, root / name / "ours", Options(jobs=2))
        records = pl.read_parquet(root / name / "ours" / "*" / "records.parquet")
        found[name] = (theirs, table.table(records))
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_columns_are_msprobes(results: Any, name: str) -> None:
    theirs, ours = results[name]
    assert ours.columns == [column for column in theirs[0] if column != "NPU_Stack_Info"]


@pytest.mark.parametrize("name", PAIRS)
def test_every_target_row_is_there_in_the_same_order(results: Any, name: str) -> None:
    theirs, ours = results[name]
    names = [n for n in ours["NPU Name"] if n != "N/A"]
    assert names == [row["NPU Name"] for row in theirs]


@pytest.mark.parametrize("name", PAIRS)
def test_every_cell_is_equal(results: Any, name: str) -> None:
    theirs, ours = results[name]
    rows = [row for row in ours.iter_rows(named=True) if row["NPU Name"] != "N/A"]
    different = [
        (row["NPU Name"], column, row[column], mine[column])
        for row, mine in zip(theirs, rows, strict=True)
        if row["Bench Name"] != "N/A"
        for column in ours.columns
        if not _equal(column, row[column], mine[column])
    ]
    assert not different, f"{len(different)} cells, first {different[:5]}"


def test_the_generated_pairs_reach_every_verdict(results: Any) -> None:
    """Otherwise equality above would prove little."""
    theirs, _ = results["statistics"]
    assert {row["Result"] for row in theirs} == {"pass", "warning", "error"}
    said = " ".join(row["Err_message"] for row in theirs)
    for words in ("nan/inf", "greater than 0.5", "Required_Grad", "scalar", "dtype", "shape", "10"):
        assert words in said
    assert {row["Result"] for row in results["tensor"][0]} >= {"pass", "error", "warning"}


def _equal(column: str, theirs: str, ours: str) -> bool:
    left, right = _number(theirs), _number(ours)
    if left is None or right is None:
        return theirs.strip() == ours.strip()
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    if column == "EucDist":  # a sum in another order
        return math.isclose(left, right, rel_tol=1e-12)
    return left == right


def _number(text: str) -> float | None:
    try:
        return float(text.strip().removesuffix("%"))
    except ValueError:
        return None
