"""Records that are known to differ while nothing says by how much: no agreement, and no divergence.

Checksums that differ without statistics beside them, statistics that differ where nothing says
relative to what, and values that are not finite on both sides and are not the same ones.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from rlprobe import stages
from rlprobe.compare import measures
from rlprobe.judge.analysis import Step

_SAID = (measures.CHECKSUMS_DIFFER, measures.NO_STATISTICS["scale"])
_OTHER = "not finite on both sides, and not the same"


class Unsized(NamedTuple):
    """Such records of one stage."""

    stage: str
    records: int
    #: Name of the first in execution order, and how it differs.
    first: str
    why: str


def found(step: Step) -> list[Unsized]:
    """Such records of every stage, in the order of a step."""
    apart = (
        (pl.col("status") == measures.NONFINITE)
        & (pl.col("reason") == "both")
        & pl.col("error").is_null()
        & pl.col("error_kind").is_not_null()
    )
    mine = pl.col("unjudged_because").is_not_null() & (pl.col("reason").is_in(_SAID) | apart)
    listed = []
    for name in sorted(step.findings, key=stages.order):
        rows = step.findings[name].stage.rows.filter(mine.fill_null(False))
        if rows.height:
            first = rows.row(0, named=True)
            why = first["reason"] if first["reason"] in _SAID else _OTHER
            listed.append(Unsized(name, rows.height, str(first["name"]), why))
    return listed
