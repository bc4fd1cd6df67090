"""Sample and token at which a block's outputs part, from token sketches joined by sample."""

from __future__ import annotations

import polars as pl

from rlprobe.compare.samples.run import TOKEN_SKETCHES
from rlprobe.compare.samples.sketches import SCHEMA
from rlprobe.diagnose.inputs import TARGET, Results
from rlprobe.errors import DumpError

#: A token stands out from this share of its sample's largest error on.
_SHARE = 0.1


def place(
    results: Results, stage: str, step: int, rank: int, order: int
) -> tuple[str, int | None] | None:
    """Where the first block from a record on parts most; None where no sketches tell.

    Args:
        results: what was compared.
        stage: canonical name.
        step: captured step, from 0.
        rank: the benchmark's process.
        order: execution order of the record in question on the benchmark.

    Returns:
        The sample, and the first token of its response that stands out; None for the token where
        it is one of the prompt.

    Raises:
        DumpError: the table is damaged.
    """
    path = results.compared(TARGET, stage) / TOKEN_SKETCHES
    if not path.is_file():
        return None
    try:
        tokens = pl.read_parquet(path, columns=list(SCHEMA))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DumpError(f"{path} is not readable: {error}; compare again") from error
    later = tokens.filter(
        (pl.col("step") == step)
        & (pl.col("rank_benchmark") == rank)
        & (pl.col("order") >= order)
        & (pl.col("error") > 0)
    )
    block = later.filter(pl.col("order") == pl.col("order").min())
    if block.is_empty():
        return None
    worst = block.sort("error", descending=True, nulls_last=True).row(0, named=True)
    own = block.filter(
        (pl.col("sample") == worst["sample"])
        & (pl.col("occurrence") == worst["occurrence"])
        & (pl.col("error") >= _SHARE * worst["error"])
    ).sort("token")
    token, response_at = own.select("token", "response_at").row(0)
    return worst["sample"], token - response_at if token >= response_at else None
