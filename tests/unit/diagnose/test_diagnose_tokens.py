"""Do token sketches name the sample and token at which a block parts?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from rlprobe.compare.samples.run import TOKEN_SKETCHES
from rlprobe.compare.samples.sketches import SCHEMA
from rlprobe.diagnose import tokens
from rlprobe.errors import DumpError

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


@pytest.fixture
def results(tmp_path: Path) -> Compared:
    table = pl.DataFrame(
        [(0, order, "x", s, 0, t, 3, 0, 0, e, 0.17) for order, s, t, e in ROWS],
        schema=SCHEMA,
        orient="row",
    )
    place = tmp_path / "target" / STAGE
    place.mkdir(parents=True)
    table.write_parquet(place / TOKEN_SKETCHES)
    return Compared(tmp_path)


def test_the_first_token_that_stands_out_of_the_worst_sample(results: Compared) -> None:
    assert tokens.place(results, STAGE, 0, 0, 15) == ("b", 1)  # type: ignore[arg-type]


def test_a_token_of_the_prompt_has_no_place_in_the_response(results: Compared) -> None:
    assert tokens.place(results, STAGE, 0, 0, 25) == ("a", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "step", "rank"), [("x", 0, 0), (STAGE, 1, 0), (STAGE, 0, 1)])
def test_nothing_where_nothing_was_joined(
    results: Compared, stage: str, step: int, rank: int
) -> None:
    assert tokens.place(results, stage, step, rank, 0) is None  # type: ignore[arg-type]


def test_a_damaged_table_is_named(results: Compared) -> None:
    (results.directory / "target" / STAGE / TOKEN_SKETCHES).write_bytes(b"PAR1")
    with pytest.raises(DumpError, match="compare again"):
        tokens.place(results, STAGE, 0, 0, 0)  # type: ignore[arg-type]
