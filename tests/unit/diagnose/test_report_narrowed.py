"""Many ranks on one page: the worst of each record, and what is counted is counted over all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.judge import tables
from rlprobe.report import narrowed, payload, scope
from rlprobe.report.narrowed import Narrowed

RANKS, RECORDS, STEPS = 5, 40, 2


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pl.DataFrame:
    """Process by process, as `rlprobe diagnose` writes it, with key data of no rank at the end."""
    draw = random.Random(3)
    rows: list[dict[str, Any]] = []
    for step in range(STEPS):
        for rank in range(RANKS):
            for order in range(RECORDS):
                judged = draw.random() < 0.9
                excess = draw.uniform(0, 1.2) if judged else None
                rows.append({
                    "step": step, "rank": rank, "order": order, "sequence": order,
                    "name": f"Module.layers.{order}.Linear.forward.0.output.0", "slot": "output",
                    "index": "0", "status": "matched", "dtype_benchmark": "torch.float32",
                    "judged": judged, "excess": excess, "error": excess,
                    "beyond": bool(judged and (excess or 0) > 1),
                })  # fmt: skip
    rows.append({"step": 0, "name": "values", "slot": tables.KEY_DATA, "judged": True,
                 "excess": 7.0, "beyond": True, "dtype_benchmark": "x"})  # fmt: skip
    made = pl.DataFrame(rows, schema=tables.SCHEMA)
    made.write_parquet(tmp_path / "t.parquet")
    lazy = pl.scan_parquet(tmp_path / "t.parquet")
    monkeypatch.setattr(tables, "scan_table", lambda *_: (lazy, made.height))
    monkeypatch.setattr(tables, "read_table", lambda *_: made)
    monkeypatch.setattr(narrowed, "PIECE", 37)
    return made


def part(whole: int, rank: int | None) -> narrowed.Part:
    return Narrowed(None, rank, whole).part("actor_update")  # type: ignore[arg-type]


def test_of_each_record_its_worst_rank_is_kept(table: pl.DataFrame) -> None:
    found = part(10, None)
    assert found.narrowed and found.total == table.height
    assert found.rows.height == RECORDS * STEPS + 1
    records = table.filter(pl.col("slot") != tables.KEY_DATA)
    worst = records.group_by("step", "name").agg(pl.col("excess").max()).sort("step", "name")
    kept = found.rows.filter(pl.col("slot") != tables.KEY_DATA).sort("step", "name")
    assert kept["excess"].to_list() == worst["excess"].to_list()
    assert found.rows.filter(pl.col("beyond")).height >= 1


def test_the_rank_that_parts_first_is_kept_whole(table: pl.DataFrame) -> None:
    rows = part(10, 3).rows
    assert rows.filter(pl.col("rank") == 3).height >= RECORDS * STEPS
    own = rows.filter((pl.col("rank") == 3) & (pl.col("step") == 1))
    assert own["order"].to_list() == sorted(own["order"].to_list()), "in the order of execution"


def test_places_are_of_all_ranks_whatever_was_left_out(table: pl.DataFrame) -> None:
    order = ["step", "rank"]
    whole, some = part(10**6, None), part(10, None)
    assert not whole.narrowed
    assert some.places.sort(order, nulls_last=True).equals(
        whole.places.sort(order, nulls_last=True), null_equal=True
    )
    grid = scope.grid(Narrowed(None, None, 10), ["actor_update"])  # type: ignore[arg-type]
    assert grid is not None and grid.steps == [0, 1]
    assert [row.rank for row in grid.rows] == [0, 1, 2, 3, 4, None]
    judged = table.filter((pl.col("rank") == 4) & (pl.col("step") == 1) & pl.col("judged"))
    assert grid.rows[4].cells[1].ratio == judged["excess"].max()


@pytest.mark.parametrize("most", [10, 10**6])
def test_a_stage_of_several_updates_has_a_row_for_each(
    table: pl.DataFrame, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    halves = pl.when(pl.col("slot") != tables.KEY_DATA).then(pl.col("order") % 2)
    two = table.with_columns(update=halves.cast(pl.Int64))
    monkeypatch.setattr(tables, "scan_table", lambda *_: (two.lazy(), two.height))
    monkeypatch.setattr(tables, "read_table", lambda *_: two)
    grid = scope.grid(Narrowed(None, None, most), ["actor_update"])  # type: ignore[arg-type]
    assert grid is not None and grid.updates
    places = [(row.rank, row.update) for row in grid.rows]
    assert places == [(rank, n) for rank in range(5) for n in (0, 1)] + [(None, None)]
    own = two.filter(
        (pl.col("rank") == 2) & (pl.col("update") == 1) & (pl.col("step") == 1) & pl.col("judged")
    )
    assert grid.rows[5].cells[1].ratio == own["excess"].max()


def test_the_records_of_the_page_say_how_many_there_were(table: pl.DataFrame) -> None:
    found = payload.records(Narrowed(None, 3, 10), ["actor_update"])  # type: ignore[arg-type]
    assert found.aggregated and found.total == table.height
    assert found.rows.height == RECORDS * STEPS + 1, "the rank that was kept whole adds none"
    few = payload.records(Narrowed(None, 3, 10), ["actor_update"], 20)  # type: ignore[arg-type]
    assert few.rows.height == 20
    beyond = found.rows.filter(pl.col("beyond")).height
    assert few.rows.filter(pl.col("beyond")).height == min(20, beyond)


@pytest.mark.parametrize("most", [payload.MOST, 20])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_the_record_that_the_page_leads_to_is_on_it(
    table: pl.DataFrame, most: int, rank: int
) -> None:
    """Of another rank it may be worse, and of others the page may be full."""
    own = table.filter(pl.col("rank") == rank).sort("excess", nulls_last=False)
    name = own.filter(pl.col("excess").is_not_null()).item(0, "name")
    step = own.filter(pl.col("name") == name).item(0, "step")
    first = (pl.col("name") == name) & (pl.col("rank") == rank) & (pl.col("step") == step)
    judged = Narrowed(None, rank, 10)  # type: ignore[arg-type]
    found = payload.records(judged, ["actor_update"], most, first)
    without = payload.records(judged, ["actor_update"], most)
    assert found.rows.filter(first).height == 1
    assert found.rows.height == without.rows.height
    assert found.rows.filter((pl.col("name") == name) & (pl.col("step") == step)).height == 1
