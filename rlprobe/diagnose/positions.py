"""Whether the rows of two batches stand in the same places.

A trainer may reorder samples, or split a batch into other micro-batches. Activations of whole
micro-batches are then of other samples, and a difference between them says nothing. What does not
depend on the order remains to be judged: gradients after all micro-batches, changes of parameters,
and key data, which is joined by sample.
"""

from __future__ import annotations

import polars as pl

from rlprobe.diagnose import execution
from rlprobe.diagnose.inputs import BENCHMARK, TARGET, Results

REORDERED = "rows stand in another order"
SPLIT = "micro-batches are split differently"
#: Share of activations whose shapes differ in their leading sizes only, for a different split.
_MANY = 0.3


def difference(results: Results, stage: str, step: int, rows: pl.DataFrame) -> str | None:
    """How the two batches of a stage differ in the places of their rows; None where they don't.

    Args:
        results: where the runs' proofs are found.
        stage: canonical name.
        step: captured step, from 0.
        rows: the stage's rows in execution order.
    """
    if _split(rows):
        return SPLIT
    orders = []
    for role in (BENCHMARK, TARGET):
        run = results.run(role)
        proof = [] if run is None else run.mock_proof() or []
        orders.append(
            [
                (entry["rank"], sample)
                for entry in proof
                if entry["stage"] == stage and entry["step"] == step
                for sample in entry["samples"]
            ]
        )
    # Other samples altogether are the gate's business.
    same_set = sorted(s for _, s in orders[0]) == sorted(s for _, s in orders[1])
    return REORDERED if same_set and orders[0] != orders[1] else None


def _split(rows: pl.DataFrame) -> bool:
    """Whether many activations differ in size, each in its leading dimensions only."""
    moving = rows.filter(
        (pl.col("phase") == execution.FORWARD)
        & pl.col("slot").is_in(["input", "output"])
        & (pl.col("shape_benchmark").list.len() >= 2)
    )
    if moving.is_empty():
        return False
    other = moving.filter(
        (pl.col("status") == "shape")
        & (pl.col("shape_benchmark").list.len() == pl.col("shape_target").list.len())
        & (pl.col("shape_benchmark").list.last() == pl.col("shape_target").list.last())
    )
    return other.height > _MANY * moving.height


def only_what_has_no_place(rows: pl.DataFrame) -> pl.DataFrame:
    """Judge only what does not depend on which rows a micro-batch holds."""
    return rows.with_columns(judged=pl.col("judged") & (pl.col("phase") >= execution.GRADIENTS))
