"""Is what runs after the first of several updates in a stage judged, and blamed on what did it?"""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from rlprobe.judge import execution, floors, noise, origin
from rlprobe.judge.excuses import earlier_updates
from rlprobe.judge.stage import Process, _process

HERE = Path(__file__).parent / "two_updates"


def compared(name: str) -> pl.DataFrame:
    return pl.read_parquet(HERE / f"{name}.parquet")


def judged(rows: pl.DataFrame) -> Process:
    rows = rows.with_columns(dense_error=pl.lit(None, pl.Float64))
    return _process(0, floors.with_floor(noise.annotate(rows), {}), one_precision=True)


def late(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.filter(~pl.col("before_update"))


def test_a_benign_device_inherits_and_agrees() -> None:
    rows = judged(compared("split_k")).rows
    held = late(rows).filter(pl.col("judged"))
    assert held.height > 300
    assert set(late(rows)["unjudged_because"].drop_nulls()) == {"as_changes", "no_numbers"}
    assert not held.get_column("beyond").any()
    assert held.select(pl.col("excess").filter(pl.col("excess").is_finite()).max()).item() < 0.6


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("second_update_wrong", None, origin.CLIPPING),
        ("second_critic_gradients_scaled", None, origin.CLIPPING),
        ("second_pass_up_scaled", "model.layers.1.mlp.up_proj", origin.MODULE),
        ("adam_eps", None, origin.OPTIMIZER),
    ],
)
def test_a_fault_is_blamed_on_what_did_it(name: str, module: str | None, kind: str) -> None:
    process = judged(compared(name))
    found = origin.find(process.rows, process.calls)
    assert found is not None and (found.module, found.kind) == (module, kind)
    assert found.row["update"] == 1
    first = process.rows.filter((pl.col("update") == 0) & (pl.col("slot") != "change"))
    assert not first.filter(pl.col("judged")).get_column("beyond").any()


def test_a_wrong_optimizer_excuses_nothing_by_the_change_it_makes() -> None:
    """What counts is what gradients explain, not what the change was seen to differ by."""
    moved = {}
    for name in ("split_k", "adam_eps"):
        rows = floors.with_floor(
            noise.annotate(compared(name)).with_columns(dense_error=pl.lit(None, pl.Float64)), {}
        )
        found = earlier_updates.inherited(execution.timeline(rows)[0])
        assert found is not None and list(found) == [1]
        moved[name] = found[1]
    assert moved["split_k"] < 1e-4 < moved["adam_eps"] < 2e-3


@pytest.mark.parametrize("slot", ["change", "parameters"])
def test_without_the_records_that_tell_it_nothing_after_is_judged(slot: str) -> None:
    left = judged(compared("split_k").filter(pl.col("slot") != slot)).rows
    unjudged = late(left).filter(pl.col("error").is_not_null())
    assert set(unjudged.get_column("unjudged_because")) == {"after_update"}


def test_whole_numbers_inherit_nothing() -> None:
    whole = pl.col("dtype_benchmark").eq("torch.int64")
    rows = compared("split_k")
    differ = whole & (pl.col("call") >= 2)
    rows = rows.with_columns(
        error=pl.when(differ).then(1e-4).otherwise("error"),
        error_uncertainty=pl.when(differ).then(0.09).otherwise("error_uncertainty"),
    )
    found = late(judged(rows).rows).filter(whole & pl.col("judged"))
    assert found.height and found.get_column("beyond").all()


def test_one_update_is_as_it_was() -> None:
    rows = compared("split_k").filter(
        (pl.col("direction") != "update") | (pl.col("call") == 0) | (pl.col("slot") == "change")
    )
    process = judged(rows)
    assert process.rows.get_column("update").unique().to_list() == [0]
    assert process.rows.get_column("before_update").all()


def test_what_is_called_as_one_has_its_parameters_norms_from_their_digests() -> None:
    """Megatron's modules are called with queries, keys and values as one parameter."""
    rows = compared("split_k").with_columns(dense_error=pl.lit(None, pl.Float64))
    fused = pl.col("module").str.contains("[qkv]_proj|gate_proj|up_proj").fill_null(False)
    given = rows.filter(pl.col("slot") == "parameters").unique(["module", "index"], keep="first")
    norms = given.select("module", "index", held="norm_benchmark")
    apart = rows.join(norms, on=["module", "index"], how="left", maintain_order="left").filter(
        ~(fused & (pl.col("slot") == "parameters"))
    )
    assert apart.height < rows.height
    plain, held = (
        floors.with_floor(noise.annotate(table), {}) for table in (rows, apart)
    )  # fmt: skip
    moved = [earlier_updates.inherited(execution.timeline(t)[0]) for t in (plain, held)]
    assert moved[0] == pytest.approx(moved[1]) and moved[0]
    floor = [
        t.filter(pl.col("slot") == "change").get_column("floor").to_list() for t in (plain, held)
    ]
    assert floor[0] == floor[1]
    unknown = apart.with_columns(held=pl.lit(None, pl.Float64))
    left = _process(0, floors.with_floor(noise.annotate(unknown), {}), one_precision=True).rows
    assert "after_update" in set(late(left).get_column("unjudged_because"))


def test_an_update_that_nobody_recorded_shows_in_the_weights_after_it() -> None:
    """Dumps without gradients and changes: what ran on other weights is not judged as if on the
    same."""
    told = judged(compared("split_k")).rows
    left = judged(compared("split_k").filter(pl.col("direction") != "update")).rows
    first = told.filter(pl.col("before_update") & (pl.col("direction") != "update"))
    assert set(left.filter("before_update")["name"]) == set(first["name"])
    unjudged = late(left).filter(pl.col("error").is_not_null())
    assert unjudged.height and set(unjudged["unjudged_because"]) == {"after_update"}
    assert not left.get_column("beyond").any()
    unknown = compared("split_k").filter(
        (pl.col("direction") != "update") & (pl.col("slot") != "parameters")
    )
    assert judged(unknown).rows.get_column("before_update").all()
