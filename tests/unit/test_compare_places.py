"""Directories of any name: what a shell takes for a pattern is a name like any other here."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import rlprobe
from rlprobe.cli import main
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor

NAME = "Functional.linear.0.forward"


def dump(directory: Path, top: float) -> str:
    leaf = tensor((top, -1.0, 0.25, 9.0))
    dumps.write(directory / "actor_update/step0/rank0", {NAME: call([tensor()], [leaf])})
    return str(directory)


@pytest.mark.parametrize("name", ["run[gpu]", "run*", "run ]["])
def test_results_and_dumps_may_be_called_like_a_pattern(tmp_path: Path, name: str) -> None:
    sides = [dump(tmp_path / f"{side} {name}", top) for side, top in (("b", 1.0), ("t", 3.0))]
    # what the name would stand for as a pattern
    beside = tmp_path / name.replace("[gpu]", "g").translate({ord(c): "a" for c in "*?{},![]"})
    assert main(["compare", *sides[::-1], "-o", str(beside), "-q"]) == 0
    out = tmp_path / name
    assert (
        main(["compare", *sides, "-o", str(out), "--table", "csv", "--json", str(out) + ".j"]) == 0
    )
    rows = pl.read_parquet(out / "actor_update/records.parquet", glob=False)
    assert rows.filter(name=f"{NAME}.output.0")["max_diff"].to_list() == [2.0]
    assert main(["diagnose", str(out)]) == 0
    verdict = json.loads((out / "diagnosis.json").read_text())
    assert verdict["verdict"] == "diverged" and verdict["first"]["operator"] == "Functional.linear"
    assert main(["report", str(out)]) == 0
    assert (out / "report.html").is_file()


def test_the_python_call_takes_such_names_too(tmp_path: Path) -> None:
    sides = [dump(tmp_path / f"{side}[1]", top) for side, top in (("b", 1.0), ("t", 3.0))]
    found = rlprobe.compare_dumps(*sides, out=str(tmp_path / "o*"))
    assert found.first is not None and found.first["name"] == f"{NAME}.output.0"
