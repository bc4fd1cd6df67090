"""Do token sketches name the sample and token at which a block parts?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from rlprobe.compare.samples.sketches import SCHEMA
from rlprobe.dumps import results as tables
from rlprobe.dumps.results import TOKEN_SKETCHES
from rlprobe.errors import DumpError
from rlprobe.judge import tokens
from tests.unit.compare_helpers import put_table

STAGE = "actor_update"
#: order, sample, token, error; three tokens of a prompt each.
ROWS = [
    (10, "a", 1, 9.0),  # before the record in question
    *((20, "a", t, 1e-7) for t in range(6)),
    *((20, "b", t, e) for t, e in enumerate([0.0, 0.0, 1e-7, 1e-4, 0.02, 0.05])),
    (30, "a", 0, 5.0),  # a later block
]


@dataclass
class Compared:
    """Of the results, only where a comparison is."""

    directory: Path

    def compared(self, pair: str, stage: str) -> Path:
        return self.directory / pair / stage

    def table(self, pair: str, stage: str, name: str) -> pl.LazyFrame | None:
        return tables.table(self.compared(pair, stage), name)


@pytest.fixture
def results(tmp_path: Path) -> Compared:
    table = pl.DataFrame(
        [(0, order, "x", s, 0, t, 3, 0, 0, e, 0.17) for order, s, t, e in ROWS],
        schema=SCHEMA,
        orient="row",
    )
    place = tmp_path / "target" / STAGE
    put_table(place, TOKEN_SKETCHES, table)
    return Compared(tmp_path)


def test_the_first_token_that_stands_out_of_the_worst_sample(results: Compared) -> None:
    assert tokens.where(results, STAGE, 0, 0, 15) == ("b", 1)  # type: ignore[arg-type]


def test_a_token_of_the_prompt_has_no_place_in_the_response(results: Compared) -> None:
    assert tokens.where(results, STAGE, 0, 0, 25) == ("a", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "step", "rank"), [("x", 0, 0), (STAGE, 1, 0), (STAGE, 0, 1)])
def test_nothing_where_nothing_was_joined(
    results: Compared, stage: str, step: int, rank: int
) -> None:
    assert tokens.where(results, stage, step, rank, 0) is None  # type: ignore[arg-type]


def test_a_damaged_table_is_named(results: Compared) -> None:
    (results.directory / "target" / STAGE / TOKEN_SKETCHES).write_bytes(b"PAR1")
    with pytest.raises(DumpError, match="compare again"):
        tokens.where(results, STAGE, 0, 0, 0)  # type: ignore[arg-type]


def sequences(path: Path, lines: list[list[float]], calls: int = 1) -> Compared:
    """One block's outputs in as many calls, a sample each line; and an earlier block's, equal."""
    block = "Module.layers.{layer}.Block.forward.{call}.output.0"
    rows = [
        (0, 10 * call + 5 * layer, block.format(layer=layer, call=call), f"s{at}", 0, token, 3, 0,
         0, error * layer, 0.17)
        for call in range(calls)
        for layer in (0, 1)
        for at, line in enumerate(lines)
        for token, error in enumerate(line)
    ]  # fmt: skip
    place = path / "target" / STAGE
    put_table(place, TOKEN_SKETCHES, pl.DataFrame(rows, schema=SCHEMA, orient="row"))
    return Compared(path)


def profile(compared: Compared, **given: int) -> tokens.Profile:
    found = tokens.profile(compared, STAGE, 0, 0, 0, **given)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_what_sees_too_much_leaves_the_last_token_alone(tmp_path: Path) -> None:
    falling = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 1e-6]
    found = profile(sequences(tmp_path, [falling, [*falling[:-3], 1e-6]]))
    assert found.first > 1 and found.last < 1e-3 and found.onset is None


def test_a_window_leaves_what_is_in_it_alone(tmp_path: Path) -> None:
    found = profile(sequences(tmp_path, [[1e-6] * 8 + [0.1] * 20]))
    assert found.onset == 8


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_token_that_is_not_finite_is_none_that_agrees(tmp_path: Path, at: int) -> None:
    compared = sequences(tmp_path, [[0.1] * 9, [0.1] * 9])
    place = tmp_path / "target" / STAGE
    unknown = pl.when((pl.col("token") == at) & (pl.col("sample") == "s1")).then(None)
    changed = pl.read_parquet(place / TOKEN_SKETCHES).with_columns(error=unknown.otherwise("error"))
    put_table(place, TOKEN_SKETCHES, changed)
    assert tokens.profile(compared, STAGE, 0, 0, 0) is None  # type: ignore[arg-type]


def test_all_calls_of_the_block_before_weights_change_count(tmp_path: Path) -> None:
    compared = sequences(tmp_path, [[0.1] * 9], calls=3)
    place = tmp_path / "target" / STAGE
    third = pl.col("name").str.contains("forward.2.")
    wild = pl.when(third & (pl.col("token") == 0)).then(9.0).otherwise("error")
    changed = pl.read_parquet(place / TOKEN_SKETCHES).with_columns(error=wild)
    put_table(place, TOKEN_SKETCHES, changed)
    assert profile(compared, passes=2).first == pytest.approx(1.0)
    assert profile(compared, passes=3).first > 10


def test_two_tokens_have_no_profile(tmp_path: Path) -> None:
    compared = sequences(tmp_path, [[0.1, 0.2]])
    assert tokens.profile(compared, STAGE, 0, 0, 0) is None  # type: ignore[arg-type]
