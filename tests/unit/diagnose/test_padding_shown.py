"""Differences at padding, shown by sketches of tokens: each ground is asked for."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlprobe.judge.excuse import reduce
from rlprobe.judge.excuses import padding_shown

#: A block of two in two micro-batches: everything differs at padding in both.
ROWS: list[dict[str, Any]] = [
    {"micro_batch": micro, "module": module, "name": f"{module}.{micro}", "error": error,
     "sequence": sequence}
    for micro in (0, 1)
    for sequence, (module, error) in enumerate(
        [
            ("layers.0.attn", 4e-4), ("layers.0", 5e-4),
            ("layers.1.attn", 3e-3), ("layers.1", 1e-3), ("norm", 9e-4),
        ]
    )
]  # fmt: skip


def stage(**changed: float) -> pl.DataFrame:
    rows = [row | {"error": changed.get(row["name"], row["error"])} for row in ROWS]
    return pl.DataFrame(rows).with_columns(
        rank_benchmark=pl.lit(0),
        floor=pl.lit(5e-6),
        beyond=pl.col("error") > 5e-6,
        judged=pl.lit(True),
        slot=pl.lit("output"),
        status=pl.lit("matched"),
        reason=pl.lit(None, pl.String),
        excused_by=pl.lit(None, pl.String),
        unjudged_because=pl.lit(None, pl.String),
    )


def calls(name: str = "", **changed: float) -> pl.DataFrame:
    """Tokens of the blocks' calls; those of one changed."""
    usual = {"tokens": 80, "positions": 94, "together": 7e-7, "largest": 2e-6}
    named = [f"layers.{layer}.{micro}" for layer in (0, 1) for micro in (0, 1)]
    rows = [
        {"name": n, "rank_benchmark": 0} | usual | (changed if n == name else {}) for n in named
    ]
    return pl.DataFrame(rows)


def left(rows: pl.DataFrame, known: pl.DataFrame | None) -> int:
    """How many records are beyond their floor after excuses."""
    return int(reduce(rows, padding_shown.excuses(rows, known)).get_column("beyond").sum())


def test_what_differs_at_padding_alone_is_excused_in_every_record() -> None:
    assert left(stage(), calls()) == 0


@pytest.mark.parametrize(
    "known",
    [
        None,  # a token is not known
        calls("layers.0.1", largest=1e-4),  # one token differs too
        calls("layers.1.0", together=6e-6),  # all differ a little
        calls("layers.0.0", positions=80),  # no padding in that micro-batch
        calls().filter(pl.col("name") != "layers.0.0"),  # a block of which nothing is known
    ],
)
def test_without_a_ground_nothing_is(known: pl.DataFrame | None) -> None:
    assert left(stage(), known) == len(ROWS)


@pytest.mark.parametrize(
    "changed",
    [
        {"layers.1.attn.0": 0.5},  # more than its block's output says of it
        {"layers.0.0": 1e-7},  # the block agrees, padding with it: its attention does not
        {"norm.1": 0.3},
    ],
)
def test_a_record_that_padding_does_not_explain_keeps_all_of_them(
    changed: dict[str, float],
) -> None:
    rows = stage(**changed)
    assert left(rows, calls()) == rows.get_column("beyond").sum() > 0


def test_a_block_is_not_its_neighbour_of_a_longer_number() -> None:
    """``layers.1`` holds nothing of ``layers.10``, which stands behind it."""
    rows = stage().with_columns(
        pl.col("module", "name").str.replace("layers.1.attn", "layers.10.attn")
    )
    known = calls()
    # held against the block before it, whose record differs less
    assert left(rows, known) == 0
    rows = rows.with_columns(
        error=pl.when(pl.col("module") == "layers.10.attn").then(0.1).otherwise("error")
    )
    assert left(rows, known) == len(ROWS)
