"""Records read and measured slice by slice: the same result, and each process's own rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.compare import compare as comparison
from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.match import pairs
from rlprobe.compare.stage_sources import Process
from rlprobe.documents import parquetfile
from rlprobe.dumps import records
from rlprobe.dumps.results import table as results_table
from rlprobe.errors import StoreError
from rlprobe.files import digest
from rlprobe.formats import mark
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


def stored(root: Path, content: dict[str, object], rows: int, ranks: int = 1) -> Path:
    """The same with ``rows`` records a row group."""
    found = run(root, *[content] * ranks)
    table = found / "records" / f"{STAGE}.parquet"
    frame = records.read(table)
    frame.write_parquet(table, compression="lz4", row_group_size=rows, metadata=mark("records"))
    list_files(found)
    return found


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of columns that are copied, as often as any are."""
    found: list[int] = []

    class Writer(parquetfile.Writer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(len(args[3]))

    monkeypatch.setattr(parquetfile, "Writer", Writer)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_columns_that_both_tables_hold_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int], seed: int
) -> None:
    contents = dumps.random_pair(seed, 9)
    for side in contents:
        side.popitem()
    both = [stored(tmp_path / n, c, 5) for n, c in zip("bt", contents, strict=True)]
    whole = results(both[0], both[1], tmp_path / "whole")
    assert copied == []
    monkeypatch.setattr(comparison, "_SLICE", 5)
    assert results(both[0], both[1], tmp_path / "sliced").equals(whole)
    assert copied == [len(pairs.COMMON) + 2 * len(pairs.BOTH) + 1]
    # the table is vouched for like any other, and its summary says the same
    found = results_table(tmp_path / "sliced" / STAGE, "records.parquet")
    assert found is not None
    assert found.collect().equals(whole)
    told = [
        json.loads((tmp_path / n / STAGE / "summary.json").read_text()) for n in ("whole", "sliced")
    ]
    for one in told:
        del one["tables"], one["digest"]
    assert told[0] == told[1]


def test_a_run_and_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """Every column is the same on both sides, and read once."""
    content, _ = dumps.random_pair(5, 9)
    both = [stored(tmp_path / name, content, 5) for name in "bt"]
    whole = results(both[0], both[1], tmp_path / "whole")
    monkeypatch.setattr(comparison, "_SLICE", 5)
    assert results(both[0], both[1], tmp_path / "sliced").equals(whole)
    assert len(copied) == 1


@pytest.mark.parametrize("column", ["dtype", "shape", "requires_grad", "value", "digest", "norm"])
def test_one_row_that_differs_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int], column: str
) -> None:
    content, _ = dumps.random_pair(6, 9)
    both = [stored(tmp_path / name, content, 5) for name in "bt"]
    table = both[1] / "records" / f"{STAGE}.parquet"
    frame = records.read(table)
    row = frame.get_column(column).is_not_null().arg_true().last()
    changed = {
        "dtype": pl.lit("torch.float16"),
        "shape": pl.lit([1, 2, 3], pl.List(pl.Int64)),
        "requires_grad": ~pl.col("requires_grad"),
        "value": pl.lit("8"),
        "digest": pl.lit("sha256:0"),
        "norm": pl.col("norm") * 2,
    }[column]
    there = pl.int_range(pl.len()) == (frame.height - 1 if row is None else row)
    frame = frame.with_columns(pl.when(there).then(changed).otherwise(column).alias(column))
    frame.write_parquet(table, compression="lz4", row_group_size=5, metadata=mark("records"))
    list_files(both[1])
    whole = results(both[0], both[1], tmp_path / "whole")
    monkeypatch.setattr(comparison, "_SLICE", 5)
    assert results(both[0], both[1], tmp_path / "sliced").equals(whole)
    one, other = (whole.get_column(f"{column}_{side}") for side in pairs.SIDES)
    assert int(one.ne_missing(other).sum()) == 1
    assert len(copied) == 1


def test_names_are_read_where_their_bytes_tell_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    contents = dumps.random_pair(4, 9)
    for side in contents:
        side.popitem()
    both = [stored(tmp_path / n, c, 5) for n, c in zip("bt", contents, strict=True)]
    table = both[1] / "records" / f"{STAGE}.parquet"
    frame = records.read(table)
    whole = results(both[0], both[1], tmp_path / "whole")
    monkeypatch.setattr(comparison, "_SLICE", 5)
    how: dict[str, Any] = {"row_group_size": 5, "metadata": mark("records")}
    frame.write_parquet(table, compression="zstd", **how)
    list_files(both[1])
    assert results(both[0], both[1], tmp_path / "zstd").equals(whole)
    assert len(copied) == 1
    # one name of another length, and one that changes no length
    for old, new in (("ward", "wards"), ("ward", "warp")):
        last = pl.col("order") == pl.col("order").max()
        name = pl.when(last).then(pl.col("name").str.replace(old, new)).otherwise("name")
        changed = frame.with_columns(name=name)
        assert not changed.equals(frame)
        changed.write_parquet(table, compression="lz4", **how)
        list_files(both[1])
        monkeypatch.setattr(comparison, "_SLICE", 5)
        sliced = results(both[0], both[1], tmp_path / "sliced")
        monkeypatch.setattr(comparison, "_SLICE", 1 << 17)
        assert results(both[0], both[1], tmp_path / "other").equals(sliced)
        assert not sliced.equals(whole)
    assert len(copied) == 1


def test_other_row_groups_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    contents = dumps.random_pair(1, 9)
    for side in contents:
        side.popitem()
    benchmark = stored(tmp_path / "b", contents[0], 5)
    whole = results(benchmark, stored(tmp_path / "t", contents[1], 5), tmp_path / "whole")
    monkeypatch.setattr(comparison, "_SLICE", 5)
    # of another length on one side; and not a dump's
    other = stored(tmp_path / "t4", contents[1], 4)
    assert results(benchmark, other, tmp_path / "sliced").equals(whole)
    dump = tmp_path / "t" / "dump" / STAGE
    assert results(benchmark, dump, tmp_path / "plain").equals(whole)
    # of several processes some rows of a group may be another's
    ranks = [stored(tmp_path / f"{n}2", c, 5, 2) for n, c in zip("bt", contents, strict=True)]
    doubled = results(ranks[0], ranks[1], tmp_path / "ranks")
    assert doubled.filter(pl.col("rank") == 0).equals(whole)
    assert copied == []


def test_a_table_in_another_form_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """What polars reads as the same may stand there otherwise."""
    contents = dumps.random_pair(2, 9)
    for side in contents:
        side.popitem()
    both = [stored(tmp_path / n, c, 5) for n, c in zip("bt", contents, strict=True)]
    whole = results(both[0], both[1], tmp_path / "whole")
    monkeypatch.setattr(comparison, "_SLICE", 5)
    monkeypatch.setattr(parquetfile, "layout", unreadable_from(both[0]))
    assert results(both[0], both[1], tmp_path / "sliced").equals(whole)
    assert copied == []


def unreadable_from(run: Path) -> Any:
    layout = parquetfile.layout

    def found(file: Any) -> parquetfile.Layout:
        if str(getattr(file, "name", "")).startswith(str(run)):
            raise ValueError("another form")
        return layout(file)

    return found


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
