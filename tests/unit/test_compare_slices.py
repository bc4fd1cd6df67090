"""Records read and measured slice by slice: the same result, and each process's own rows."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from rlprobe.compare import compare as comparison
from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.stage_sources import Process
from rlprobe.dumps import records
from rlprobe.errors import StoreError
from rlprobe.files import digest
from tests.msprobe import dumps
from tests.unit.compare_helpers import list_files

STAGE = "actor_update"


def run(root: Path, *ranks: dict[str, object]) -> Path:
    """A run as the store has it, as far as compare looks; one dump.json content per rank."""
    for rank, content in enumerate(ranks):
        dumps.write(root / f"dump/{STAGE}/step0/rank{rank}", content)
    (root / "records").mkdir()
    frame = records.build(root / "dump" / STAGE, STAGE)
    records.write(frame, root / "records" / f"{STAGE}.parquet")
    list_files(root)
    return root


def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of the same records in the same order, with other values."""
    contents = [dumps.random_pair(seed, 7) for seed in (1, 2, 3)]
    for sides_ in contents:
        for side in sides_:
            # what one side alone has would have them matched by rules
            side.popitem()
    return run(tmp_path / "b", *(b for b, _ in contents)), run(
        tmp_path / "t", *(t for _, t in contents)
    )


def results(benchmark: Path, target: Path, out: Path) -> pl.DataFrame:
    compare(sides.resolve(str(benchmark)), sides.resolve(str(target)), out, Options())
    return pl.read_parquet(out / STAGE / "records.parquet")


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.slow
def test_any_slice_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    both = pair(tmp_path)
    whole = results(*both, tmp_path / "whole")
    assert (whole.get_column("name_benchmark") == whole.get_column("name_target")).all()
    monkeypatch.setattr(comparison, "_SLICE", rows)
    assert results(*both, tmp_path / "sliced").equals(whole)
    assert whole.get_column("rank").n_unique() == 3
    assert whole.height > 3 * 7


def test_each_process_has_its_own_rows_whatever_is_asked_for(tmp_path: Path) -> None:
    benchmark, _ = pair(tmp_path)
    frame = records.read(benchmark / "records" / f"{STAGE}.parquet")
    stage = sides.resolve(str(benchmark)).stages[STAGE]
    for rank in (0, 1, 2):
        mine = frame.filter(pl.col("rank") == rank)
        for read_names_first in (False, True):
            table = stage.table(Process(0, rank))
            if read_names_first:
                assert table.names.equals(mine.get_column("name"))
            assert table.height == mine.height
            columns = ["order", "name", "norm"]
            assert table.rows(columns).equals(mine.select(columns))
            assert table.rows(columns, 3, 4).equals(mine.select(columns).slice(3, 4))
            # past the end are the next process's rows, not this one's
            assert table.rows(columns, mine.height - 2, 9).equals(mine.select(columns).tail(2))


def test_rows_of_a_process_that_do_not_stand_together_are_refused(tmp_path: Path) -> None:
    benchmark, _ = pair(tmp_path)
    table = benchmark / "records" / f"{STAGE}.parquet"
    frame = records.read(table)
    records.write(pl.concat([frame.tail(1), frame.head(-1)]), table)
    manifest = benchmark / "manifest.json"
    said = json.loads(manifest.read_text())
    own = next(file for file in said["files"] if file["path"] == f"records/{STAGE}.parquet")
    own |= {"sha256": digest(table).sha256, "size": digest(table).size}
    manifest.write_text(json.dumps(said))
    with pytest.raises(StoreError, match="step 0, rank 2 do not stand together"):
        sides.resolve(str(benchmark))


def test_a_table_cut_short_after_it_was_opened_is_named(tmp_path: Path) -> None:
    benchmark, _ = pair(tmp_path)
    path = benchmark / "records" / f"{STAGE}.parquet"
    table = sides.resolve(str(benchmark)).stages[STAGE].table(Process(0, 0))
    content = path.read_bytes()
    path.write_bytes(b"PAR1" + bytes(len(content) - 8) + content[-4:])
    with pytest.raises(StoreError, match="not a readable record table"):
        table.rows(["name"])
