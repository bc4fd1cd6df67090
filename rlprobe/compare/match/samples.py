"""Which record of one side's rollouts is which of the other's: those of one name."""

from __future__ import annotations

import polars as pl

from rlprobe.compare.match.pairs import Matches


def match(benchmark: pl.Series, target: pl.Series) -> Matches:
    """Pair records by name alone: no rule for modules means anything of samples.

    Args:
        benchmark, target: names; one that stands several times is paired in order.
    """
    sides = [
        pl.DataFrame({"name": names})
        .with_row_index("row")
        .with_columns(again=pl.int_range(pl.len()).over("name"))
        for names in (benchmark, target)
    ]
    both = sides[0].join(
        sides[1], on=["name", "again"], how="full", suffix="_target", maintain_order="left_right"
    )
    rule = pl.Series("rule", [None], dtype=pl.String).new_from_index(0, both.height)
    return Matches(both.get_column("row"), both.get_column("row_target"), rule)
