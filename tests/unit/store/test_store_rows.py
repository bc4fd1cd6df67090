"""Tables of a run from elsewhere: digests say whose they are, and nothing of what is in them."""

from __future__ import annotations

import json

import polars as pl
import pytest

from rlprobe import formats
from rlprobe.errors import StoreError
from rlprobe.store import listing, parts


@pytest.fixture
def told(committed, monkeypatch):
    """A run whose table says something else, with every digest as it should be then."""
    run = committed(ranks=2)
    monkeypatch.setattr(listing, "checked", lambda path, name: path / name)

    def change(name: str, column: str, value: pl.Expr) -> None:
        path = run.path / name
        table = pl.read_parquet(path)
        changed = table.with_columns(second(value, column).alias(column)).cast(table.schema)
        path.unlink()
        kind = name.partition("/")[0].removesuffix(".parquet")
        changed.write_parquet(path, metadata=formats.mark(kind))

    return run, change


def second(value: pl.Expr, column: str) -> pl.Expr:
    """The column with another value in its second row."""
    return pl.when(pl.int_range(pl.len()) == 1).then(value).otherwise(pl.col(column))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((name, pl.lit(None)) for name in ("step", "stage", "role", "rank", "name", "dtype")),
        *((name, pl.lit(None)) for name in ("shape", "local_shape", "complete")),
        ("rank", pl.lit(-1)),
        ("step", pl.lit(-(2**31))),
        ("shape", pl.concat_list(pl.lit(2), pl.lit(None))),
        ("local_shape", pl.concat_list(pl.lit(-8), pl.lit(2))),
        ("sketch", pl.concat_list(pl.lit(1.0), pl.lit(None))),
        ("sketch", pl.concat_list(pl.lit(1.0))),
    ],
)
def test_a_row_of_weights_that_capture_does_not_write_is_refused(told, column, value):
    run, change = told
    change("weights.parquet", column, value)
    with pytest.raises(StoreError, match=r"weights.parquet: 1 of 4 rows are no parts of param"):
        run.weights()


@pytest.mark.parametrize("column", ["digest", "norm", "sketch", "offset"])
def test_what_may_be_unknown_of_a_weight_may_be_null(told, column):
    run, change = told
    change("weights.parquet", column, pl.lit(None))
    assert run.weights()[column].null_count() >= 1


def test_a_row_of_gradients_is_held_to_the_same():
    good = pl.DataFrame(
        [(0, "actor_update", "actor", 0, "w", [2], [1], None, True)],
        schema=parts.GRADIENTS,
        orient="row",
    )
    assert parts.require(good, "here").equals(good)
    assert parts.require(good.clear(), "here").is_empty()
    for column in set(parts.GRADIENTS) - {"offset"}:
        odd = good.with_columns(pl.lit(None, good.schema[column]).alias(column))
        with pytest.raises(StoreError, match="here: 1 of 1 rows are no parts of parameters"):
            parts.require(odd, "here")


def test_gradients_of_before_copies_were_recorded_are_read(committed, monkeypatch):
    run = committed(ranks=2)
    monkeypatch.setattr(listing, "checked", lambda path, name: path / name)
    monkeypatch.setattr(type(run), "has", lambda self, name: True)
    row = (0, "actor_update", "actor", 0, "w", [2], [1], None, True)
    old = pl.DataFrame([row], schema=parts.GRADIENTS, orient="row")
    mark = formats.mark("gradients")
    old.write_parquet(run.path / "gradients.parquet", metadata=mark)
    assert run.gradients()["kept"].to_list() == [None]
    (run.path / "gradients.parquet").unlink()
    odd = old.with_columns(kept=pl.lit(3))
    odd.write_parquet(run.path / "gradients.parquet", metadata=mark)
    with pytest.raises(StoreError, match="column 'kept' is Int32"):
        run.gradients()


@pytest.mark.parametrize(
    "joined",
    [None, {}, ["actor"], [{"rank": 0, "step": 1}], [{"role": "a", "rank": None, "step": 1}],
     [{"role": "a", "rank": 0, "step": "1"}], [{"role": "a", "rank": 0, "step": 1, "states": "9"}],
     [{"role": "a", "rank": 0, "step": 1, "rounded": 7}]],
)  # fmt: skip
def test_what_was_loaded_of_another_state_is_checked(told, monkeypatch, joined):
    run, _ = told
    (run.path / "joined.json").write_text(json.dumps({"format": 1, "joined": joined}))
    monkeypatch.setattr(type(run), "has", lambda self, name: True)
    with pytest.raises(StoreError, match=r"joined.json is damaged"):
        run.joined()
