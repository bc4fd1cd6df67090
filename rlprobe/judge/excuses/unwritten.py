"""Memory that nothing has written yet: an empty tensor, or what a collective is about to fill.

``torch.empty`` gives whatever the memory held, and a collective is handed the tensor that it will
write as an argument, which a dump of functions records before the call. Two correct devices have
nothing in common there, NaN on one side included. What is written later is judged where it is read.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge.excuse import Excuse
from rlprobe.judge.reasons import UNWRITTEN

#: Functions whose result is memory as it was.
_EMPTY = (
    "empty", "empty_like", "empty_strided", "empty_permuted", "empty_quantized",
    "empty_with_format", "new_empty", "new_empty_strided",
)  # fmt: skip
#: Arguments that a collective writes: by place or by name (torch.distributed's signatures).
_FILLED: dict[str, tuple[str, ...]] = {
    "all_gather": ("0", "tensor_list"),
    "all_gather_into_tensor": ("0", "output_tensor"),
    "_all_gather_base": ("0", "output_tensor"),
    "reduce_scatter": ("0", "output"),
    "reduce_scatter_tensor": ("0", "output"),
    "_reduce_scatter_base": ("0", "output"),
    "all_to_all": ("0", "output_tensor_list"),
    "all_to_all_single": ("0", "output"),
    "gather": ("1", "gather_list"),
    "scatter": ("0", "tensor"),
    "recv": ("0", "tensor"),
    "irecv": ("0", "tensor"),
    "broadcast": ("0", "tensor"),
    "batch_isend_irecv": ("0", "p2p_op_list"),
}


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """Leave out what was recorded before anything was written there.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
    """
    kind, name = (pl.col("op").str.splitn(".", 2).struct.field(f"field_{n}") for n in (0, 1))
    empty = name.is_in(_EMPTY) & (pl.col("slot") == "output")
    argument = pl.col("index").str.split(".").list.first()
    filled = pl.any_horizontal(
        (name == called) & argument.is_in(arguments) for called, arguments in _FILLED.items()
    )
    buffer = kind.str.contains("(?i)distributed$") & (pl.col("slot") == "input") & filled
    function = pl.col("module").is_null() & (pl.col("direction") == "forward")
    mine = function & (empty | buffer).fill_null(False) & ~(pl.col("error") == 0).fill_null(False)
    if not rows.select(mine.any()).item():
        return []
    return [Excuse(UNWRITTEN, mine, nonfinite=True)]
