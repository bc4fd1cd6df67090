"""Blocks that hold their rows otherwise inside, and compute the same.

A mixture's experts may run one by one on the tokens that chose them, all at once on tokens sorted
by expert, or each on every token (transformers' ``experts_implementation``, fused kernels of a
device). What runs inside then has its rows in another order or number, which is no difference of
what the block computes: what it hands on tells that.

- **Are they other rows?** The same width and another number of rows; or the same shape, largest
  and smallest element, mean and norm, and no agreement element by element: the rows of one tensor
  in two orders.
- **Does the block agree?** Everything that its call was given and handed on is within its floor,
  and what stands inside is so large that, added to the block's result, it would be seen there.

Then nothing below that module can be judged by position. Where the block does not agree, all
records are judged as they are. What is finite on one side only is judged in any case.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge import execution
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.execution import Call
from rlprobe.judge.reasons import RECOMPOSED

#: Relative difference from which tensors of one norm have little in common.
_UNRELATED = 0.1
#: Relative difference of norms and extremes of one tensor's rows in two orders: its last bits, in
#: 16 bits a percent or so.
_SAME = 0.02
#: Multiple of the block's floor that a difference inside must reach, added to its result.
_SEEN = 2.0
_MOVING = pl.col("phase").is_in([execution.FORWARD, execution.BACKWARD]) & pl.col("slot").is_in(
    ["input", "output"]
)


def excuses(rows: pl.DataFrame, calls: list[Call]) -> tuple[list[Excuse], list[str]]:
    """Leave out what cannot be judged by position inside blocks that agree.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
        calls: their calls.

    Returns:
        the excuses, and the blocks (module paths) inside which rows stand otherwise.
    """
    paths = [_path(call, calls) for call in calls]
    rows = rows.with_columns(
        path=pl.Series("path", paths, pl.String).gather(rows.get_column("call_id"))
    )
    moving = rows.filter(_MOVING & pl.col("judged"))
    recorded = set(moving.get_column("path"))
    given, blocks = [], set()
    for (micro_batch, phase, path), found in moving.filter(
        pl.col("beyond") & _other_rows()
    ).group_by("micro_batch", "phase", "path", maintain_order=True):
        block = _around(str(path), recorded)
        here = (pl.col("micro_batch") == micro_batch) & (pl.col("phase") == phase)
        if block is not None and _agrees(moving.filter(here & (pl.col("path") == block)), found):
            blocks.add(block)
            below = [i for i, p in enumerate(paths) if p == path or p.startswith(f"{path}.")]
            given.append(Excuse(RECOMPOSED, here & pl.col("call_id").is_in(below)))
            # what only one side runs inside the block is part of how it composes its result
            inside = [i for i, p in enumerate(paths) if p.startswith(f"{block}.")]
            alone = pl.col("status").is_in(["benchmark_only", "target_only"])
            given.append(Excuse(RECOMPOSED, here & alone & pl.col("call_id").is_in(inside)))
    return given, sorted(blocks)


def _path(call: Call, calls: list[Call]) -> str:
    """A module's path; a functional call's is below the module that made it."""
    if call.module is not None:
        return call.module
    around = calls[call.parent].module if call.parent is not None else None
    return f"{around or ''}.{call.operator}"


def _around(path: str, recorded: set[str]) -> str | None:
    """The innermost recorded module around a path."""
    while "." in path:
        path = path.rpartition(".")[0]
        if path in recorded:
            return path
    return None


def _other_rows() -> pl.Expr:
    """Records of the same numbers' rows in another order, or of another number of rows."""
    shapes = [pl.col(f"shape_{side}") for side in ("benchmark", "target")]
    widths = [shape.list.last() for shape in shapes]
    matrices = pl.all_horizontal(*(shape.list.len() >= 2 for shape in shapes))
    number = (pl.col("status") == "shape") & matrices & (widths[0] == widths[1])
    largest = pl.max_horizontal(pl.col("max_benchmark").abs(), pl.col("min_benchmark").abs())
    # where a floor is as wide as elements differ, it says nothing of these being the same numbers
    apart = pl.min_horizontal("floor", pl.lit(_SAME))
    same = pl.all_horizontal(
        (pl.col("norm_diff").abs() <= apart * pl.col("norm_benchmark")),
        *(pl.col(f"{n}_diff").abs() <= apart * largest for n in ("max", "min", "mean")),
    )
    order = (pl.col("status") == "matched") & same & (pl.col("error") >= _UNRELATED)
    return (number | order).fill_null(False)


def _agrees(block: pl.DataFrame, found: pl.DataFrame) -> bool:
    """Whether a block's records agree, and would not if ``found`` were added to its results."""
    own = block.filter(pl.col("error").is_not_null())
    results = own.filter((pl.col("slot") == "output") & (pl.col("floor") > 0))
    unseen = (results.get_column("floor") * results.get_column("norm_benchmark")).max()
    differs = pl.when(pl.col("status") == "shape").then(1.0).otherwise("error")
    largest = found.select((differs * pl.col("norm_benchmark")).max()).item()
    return (
        isinstance(unseen, float)
        and isinstance(largest, float)
        and not own.get_column("beyond").any()
        and largest > _SEEN * unseen
    )
