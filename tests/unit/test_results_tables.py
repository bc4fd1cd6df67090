"""Is a table of results that is gone, cut, emptied or changed ever taken for what was compared?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.compare import writer
from rlprobe.compare.writer import Summary
from rlprobe.dumps import results
from rlprobe.dumps.results import KEY_DATA, RECORDS, SUMMARY
from rlprobe.errors import DumpError
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor

NAME = "Module.layers.0.mlp.Linear.forward.0"


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """A comparison of two dumps with a difference in them."""
    for side, norm in (("b", 4.0), ("t", 4.5)):
        records = {NAME: call([tensor(norm=norm)], [tensor(norm=norm)])}
        dumps.write(tmp_path / side / "actor_update" / "step0" / "rank0", records)
    out = tmp_path / "out"
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(out)]) == 0
    return out / "actor_update"


def rewritten(path: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    frame = pl.read_parquet(path)
    path.unlink()
    change(frame).write_parquet(path)


def emptied(path: Path) -> None:
    rewritten(path, lambda frame: frame.clear())


def without_errors(path: Path) -> None:
    rewritten(path, lambda frame: frame.with_columns(error=pl.lit(None, pl.Float64)))


def without_a_row(path: Path) -> None:
    rewritten(path, lambda frame: frame.head(frame.height - 1))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def of_no_bytes(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE = [emptied, without_errors, without_a_row, flipped, cut, of_no_bytes, Path.unlink]


def test_an_unharmed_table_is_read_with_every_row(compared: Path) -> None:
    table = results.table(compared)
    assert table is not None
    assert table.collect().equals(pl.read_parquet(compared / RECORDS))
    assert results.table(compared, KEY_DATA) is None


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_harmed_table_is_refused_with_what_to_do(
    compared: Path, damage: Callable[[Path], None]
) -> None:
    damage(compared / RECORDS)
    with pytest.raises(DumpError, match=r"records\.parquet .*compare again"):
        results.table(compared)


@pytest.mark.parametrize("damage", [emptied, without_errors, without_a_row, Path.unlink])
def test_results_of_the_first_format_are_held_against_their_counts(
    compared: Path, damage: Callable[[Path], None]
) -> None:
    """They named no table: rows, measured records and the largest error are what there is."""
    said = json.loads((compared / SUMMARY).read_text())
    del said["tables"]
    (compared / SUMMARY).write_text(json.dumps({**said, "format": 1}))
    table = results.table(compared)
    assert table is not None and table.collect().height > 0
    damage(compared / RECORDS)
    with pytest.raises(DumpError, match=r"records\.parquet .*compare again"):
        results.table(compared)


def test_a_summary_that_is_gone_or_of_another_comparison_vouches_for_nothing(
    compared: Path, tmp_path: Path
) -> None:
    shutil.copy(compared / SUMMARY, tmp_path / "kept.json")
    (compared / SUMMARY).unlink()
    with pytest.raises(DumpError, match=r"summary\.json is missing"):
        results.table(compared)
    other = compared.with_name("other")
    writer.write_stage(other, [pl.DataFrame(schema=writer.SCHEMA)], Summary("target", "other"))
    shutil.copy(tmp_path / "kept.json", other / SUMMARY)
    with pytest.raises(DumpError, match="compare again"):
        results.table(other)


def test_a_newer_summary_or_table_names_the_newer_rlprobe(compared: Path) -> None:
    said = json.loads((compared / SUMMARY).read_text())
    said["tables"][RECORDS]["format"] = 7
    (compared / SUMMARY).write_text(results.sealed(said))
    with pytest.raises(DumpError, match="made by a newer rlprobe: its format is 7"):
        results.table(compared)
    (compared / SUMMARY).write_text(json.dumps({**said, "format": 9}))
    with pytest.raises(DumpError, match="made by a newer rlprobe: its format is 9"):
        results.table(compared)


def test_key_data_is_vouched_for_as_records_are(tmp_path: Path) -> None:
    summary = Summary("target", "actor_update")
    writer.write_table(tmp_path, KEY_DATA, pl.DataFrame({"key": ["a"]}), summary)
    writer.write_stage(tmp_path, [pl.DataFrame(schema=writer.SCHEMA)], summary)
    table = results.table(tmp_path, KEY_DATA)
    assert table is not None and table.collect().height == 1
    emptied(tmp_path / KEY_DATA)
    with pytest.raises(DumpError, match=r"key_data\.parquet"):
        results.table(tmp_path, KEY_DATA)


def test_a_comparison_without_key_data_takes_away_what_an_earlier_one_left(tmp_path: Path) -> None:
    summary = Summary("target", "actor_update")
    writer.write_table(tmp_path, KEY_DATA, pl.DataFrame({"key": ["a"]}), summary)
    writer.write_stage(tmp_path, [pl.DataFrame(schema=writer.SCHEMA)], summary)
    again = Summary("target", "actor_update")
    writer.write_stage(tmp_path, [pl.DataFrame(schema=writer.SCHEMA)], again)
    assert not (tmp_path / KEY_DATA).exists()


def test_a_comparison_that_fails_leaves_the_earlier_one(compared: Path) -> None:
    def tables():
        yield pl.DataFrame(schema=writer.SCHEMA)
        raise RuntimeError("measuring failed")

    before = {path.name: path.read_bytes() for path in compared.iterdir()}
    with pytest.raises((RuntimeError, pl.exceptions.ComputeError)):
        writer.write_stage(compared, tables(), Summary("target", "actor_update"))
    assert {path.name: path.read_bytes() for path in compared.iterdir()} == before


def test_every_flip_of_a_summary_shows(compared: Path) -> None:
    data = (compared / SUMMARY).read_bytes()
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1
        (compared / SUMMARY).write_bytes(changed)
        if json.loads(data) == _loaded(bytes(changed)):
            continue  # a space became another
        with pytest.raises(DumpError):
            results.summary(compared)
    (compared / SUMMARY).write_bytes(data)
    assert results.document(compared) == json.loads(data)


def _loaded(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "wrong",
    [{"counts": [1]}, {"compared": "three"}, {"unmatched": {"target": 1}}, {"of": {"target": 3}},
     {"samples": []}, {"steps": ["a"]}],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_a_summary_of_the_right_seal_and_another_form_is_one_message(
    compared: Path, wrong: dict[str, Any]
) -> None:
    """Whoever writes one may seal it too."""
    said = results.document(compared)
    assert said is not None
    (compared / SUMMARY).write_text(results.sealed(said | wrong))
    with pytest.raises(DumpError, match="compare again") as caught:
        results.summary(compared)
    assert next(iter(wrong)) in str(caught.value)
