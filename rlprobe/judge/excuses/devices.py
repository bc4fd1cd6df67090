"""Arguments that name the device: ``cuda:0`` on one side is ``npu:0`` on the other, by intent.

So are the libraries by which devices talk to one another (``nccl``, ``hccl``). Such a name is a
text without round-off, and stands among the first arguments of any dump of functions. What a call
makes of it is judged by its results.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge.excuse import Excuse
from rlprobe.judge.reasons import DEVICE

#: What PyTorch calls devices, and communication back ends. Where no number was given msprobe writes
#: ``cuda:None``.
_DEVICE = (
    "^(?:cpu|cuda|npu|xpu|hpu|mps|mtia|musa|mlu|gcu|maca|sdaa|xla|privateuseone|meta)"
    r"(?::(?:\d{1,4}|None))?$"
)
_BACKEND = r"^(?:(?:cpu|cuda|npu):)?(?:nccl|hccl|gloo|mpi|ucc|xccl|lccl|mccl|cncl)$"


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """Leave out arguments that name a device, or a back end, on both sides.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
    """
    # a device may be given as a number alone
    types = [pl.col(f"dtype_{side}") == "torch.device" for side in ("benchmark", "target")]
    named = pl.all_horizontal(types).fill_null(False)
    for names in (_DEVICE, _BACKEND):
        sides = [
            pl.col(f"shape_{side}").is_null() & pl.col(f"value_{side}").str.contains(names)
            for side in ("benchmark", "target")
        ]
        named = named | pl.all_horizontal(sides).fill_null(False)
    mine = (pl.col("error") > 0) & named
    return [Excuse(DEVICE, mine)] if rows.select(mine.any()).item() else []
