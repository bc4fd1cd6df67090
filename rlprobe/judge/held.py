"""How large a parameter is whose change is judged, where no call says it.

A module's weights are recorded as it is called with them. Where it computes with several parameters
as one (queries, keys and values of Megatron; slime), it is called with none of them, while their
gradients and changes stand by themselves. Their digests know their norms.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge import digested
from rlprobe.judge.inputs import Results
from rlprobe.judge.noise_updates import CHANGE
from rlprobe.roles import BENCHMARK

#: Of a change: the benchmark's norm of its parameter as its model entered the stage; null where it
#: is recorded beside the module's calls, or not known.
COLUMN = "held"
_KEY = ["module", "index"]


def with_norms(parts: list[pl.DataFrame], results: Results, stage: str, step: int) -> None:
    """Add :data:`COLUMN` to the rows of a stage, in place.

    Args:
        parts: frames of compare's rows.
        results: where the benchmark is found.
        stage: canonical name.
        step: captured step, from 0.

    Raises:
        StoreError: a table of weights is damaged.
    """
    untold = [_untold(part) for part in parts]
    run = results.run(BENCHMARK) if any(not names.is_empty() for names in untold) else None
    table = None if run is None else run.weights()
    if table is None:
        parts[:] = [part.with_columns(pl.lit(None, pl.Float64).alias(COLUMN)) for part in parts]
        return
    names = pl.concat(untold).unique().to_series().implode()
    here = table.filter(
        (pl.col("stage") == stage) & (pl.col("step") == step) & pl.col("name").is_in(names)
    ).unique(["rank", "name"], keep="first", maintain_order=True)
    found = digested.norms(here).with_columns(own="norm")
    changed = pl.when(pl.col("slot") == CHANGE).then(pl.col(COLUMN)).alias(COLUMN)
    parts[:] = [
        digested.beside(part, found, BENCHMARK, COLUMN).with_columns(changed) for part in parts
    ]


def _untold(part: pl.DataFrame) -> pl.DataFrame:
    """Names of parameters with a change and no call that was given them."""
    given = part.filter((pl.col("slot") == "parameters") & (pl.col("direction") == "forward"))
    changed = part.filter(pl.col("slot") == CHANGE)
    alone = changed.join(given.select(_KEY), on=_KEY, how="anti", nulls_equal=True)
    return alone.select(pl.concat_str(*_KEY, separator=".").alias("name")).drop_nulls()
