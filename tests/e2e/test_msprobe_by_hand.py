"""Do msprobe's own tools read our trees?"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rlprobe import stages
from tests.e2e.conftest import Aligned, command

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.msprobe]


def _rows(folder: Path) -> list[dict[str, str]]:
    tables = sorted(folder.glob("*.csv"))
    assert len(tables) == 1, list(folder.iterdir())
    with tables[0].open(newline="") as file:
        return list(csv.DictReader(file))


def test_msprobe_compare_matches_every_row_of_a_stage(aligned: Aligned, tmp_path: Path) -> None:
    place = f"dump/{stages.ACTOR_UPDATE}/step0/rank0/dump.json"
    done = command(
        "msprobe", "compare",
        "-tp", aligned.run("target") / place,
        "-gp", aligned.run("benchmark") / place,
        "-o", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    rows = _rows(tmp_path)
    assert len(rows) > 100
    assert all(row["Bench Name"] not in ("", "N/A") for row in rows)


def test_compare_distributed_takes_step_directories(aligned: Aligned, tmp_path: Path) -> None:
    step = f"dump/{stages.LOG_PROB}/step0"
    code = (
        "import sys; from msprobe.pytorch.compare.distributed_compare import compare_distributed; "
        "compare_distributed(sys.argv[1], sys.argv[2], sys.argv[3])"
    )
    done = command(
        "python", "-c", code,
        aligned.run("target") / step, aligned.run("benchmark") / step, tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert len(_rows(tmp_path)) > 50


def test_single_comparator_reads_the_key_data(aligned: Aligned, tmp_path: Path) -> None:
    code = (
        "import sys; from msprobe.core import SingleComparator; "
        "SingleComparator.compare(sys.argv[1], sys.argv[2], sys.argv[3])"
    )
    sides = [aligned.run(role) / "dump" for role in ("benchmark", "target")]
    out = tmp_path / "out"
    done = command("python", "-c", code, *sides, out)
    assert done.returncode == 0, done.stdout
    tables = list(out.rglob("*.xlsx"))
    assert tables, done.stdout


def test_the_official_table_is_there_for_every_stage(aligned: Aligned) -> None:
    for stage in stages.TRAINING_STAGES:
        if stage == stages.TEACHER:
            continue
        folder = aligned.results / "compare/target" / stage
        assert (folder / "official.xlsx").stat().st_size > 1000
        with (folder / "official.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) > 20
        assert "NormRelativeErr" in rows[0]
