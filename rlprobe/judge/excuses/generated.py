"""What was generated differs by what generation is, not by how it is computed.

A token is chosen from probabilities: where two are nearly as likely, round-off decides, and all
that follows is another text. So a text, its tokens, its log-probs and what was made of it (a
reward) say nothing of a device where they differ; where they agree they do. The gate says what
differs.
"""

from __future__ import annotations

import polars as pl

from rlprobe.dumps.schema import ROLLOUT
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.reasons import GENERATED


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """Leave out the fields of samples that differ.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
    """
    mine = (pl.col("op") == ROLLOUT) & (pl.col("error") > 0)
    return [Excuse(GENERATED, mine)] if rows.select(mine.any()).item() else []
