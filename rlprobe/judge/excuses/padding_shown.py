"""Differences at padding alone, as sketches of every token show.

Where a kernel lets padding attend, only padding differs, though by less in one micro-batch than in
another: the results' floor (:mod:`rlprobe.judge.excuses.padding_only`) cannot tell. Sketches of
tokens can (``capture.token_sketch``): they are of every block's output, a token each. Each of these
must hold, or nothing is excused:

- There is padding, where the difference is: the block put out more positions in that micro-batch
  than its samples have tokens.
- Every token of the step's samples was sketched and joined, on both sides, and none differs beyond
  the block's floor: neither all of a call, nor, with the many there are, one by itself. What the
  block's record differs by is then at padding, as there is nothing else.
- Row by row: a record within the block, or behind it, differs by E where the block's output
  differs by B and its tokens by b. What of E is at tokens reaches the block's tokens as the rest
  reaches its padding, so at tokens the record differs by about E b / B, of which b is round-off
  already: no more than a single value may. One that differs where nothing of it reaches the output
  of its block is more than that.

Behind the last block nothing is sketched; what follows it is held against its tokens, and results,
losses and gradients agree. A difference there that reaches no result, beside one at padding, is
not told from it: the item of the gate says that these records were not judged.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge.excuse import Excuse
from rlprobe.judge.outcomes import tail
from rlprobe.judge.reasons import PADDING_ONLY

_CALL = ["rank_benchmark", "micro_batch"]


def excuses(rows: pl.DataFrame, calls: pl.DataFrame | None) -> list[Excuse]:
    """Excuse everything that is beyond its floor, or nothing.

    Args:
        rows: all ranks' rows of a stage whose results agree, and which parts in attention.
        calls: of :func:`rlprobe.judge.tokens.of_calls`; None where not every token is known.
    """
    if calls is None:
        return []
    blocks = _blocks(rows, calls)
    if blocks.is_empty() or not _tokens_agree(blocks):
        return []
    beyond = rows.filter(pl.col("judged") & pl.col("beyond") & (pl.col("slot") != "parameters"))
    if beyond.height != _at_padding(beyond, blocks):
        return []
    return [Excuse(PADDING_ONLY, pl.col("beyond") & (pl.col("slot") != "parameters"))]


def _blocks(rows: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Blocks' outputs, with what is known of their tokens."""
    return (
        rows.filter(pl.col("judged") & (pl.col("slot") == "output"))
        .select(*_CALL, "name", "sequence", block="module", whole="error", allowed="floor")
        .join(calls, on=["rank_benchmark", "name"])
    )


def _tokens_agree(blocks: pl.DataFrame) -> bool:
    """Whether no token differs beyond what its block's may, all of a call or one by itself."""
    return all(
        together <= allowed and largest <= tail(tokens) * allowed
        for together, largest, tokens, allowed in blocks.select(
            "together", "largest", "tokens", "allowed"
        ).iter_rows()
    )


def _at_padding(beyond: pl.DataFrame, blocks: pl.DataFrame) -> int:
    """How many records differ at padding alone."""
    known = blocks.filter(pl.col("positions") > pl.col("tokens"))
    keyed = beyond.with_row_index("_row").select(
        "_row", *_CALL, "module", "sequence", "error", "floor"
    )
    held = ("error", "floor", "whole", "together", "tokens")
    around = (
        keyed.join(known.drop("sequence"), on=_CALL)
        .filter(
            (pl.col("module") == pl.col("block"))
            | pl.col("module").str.starts_with(pl.col("block") + ".")
        )
        .select("_row", *held)
    )
    before = (
        keyed.join(around, on="_row", how="anti")
        .join(known, on=_CALL, suffix="_block")
        .filter(pl.col("sequence_block") < pl.col("sequence"))
        .sort("sequence_block")
        .unique("_row", keep="last")
        .select("_row", *held)
    )
    shown = [
        row
        for row, error, floor, whole, together, tokens in pl.concat([around, before]).iter_rows()
        if whole > 0 and error * together <= tail(tokens) * floor * whole
    ]
    return len(set(shown))
