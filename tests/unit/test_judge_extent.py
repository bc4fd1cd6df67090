"""Are arguments that are None on both sides counted as quantities that nobody judged?"""

from __future__ import annotations

from typing import Any

import polars as pl

from rlprobe.judge import extent, reasons
from rlprobe.judge.tables import SCHEMA


def _row(**known: Any) -> dict[str, Any]:
    row = dict.fromkeys(SCHEMA) | {"step": 0, "status": "matched", "judged": False}
    return row | {"unjudged_because": reasons.NO_NUMBERS} | known


def test_nothing_on_both_sides_is_no_quantity_and_a_tensor_without_numbers_is() -> None:
    tensor = {"dtype_benchmark": "torch.float32", "shape_benchmark": [2]}
    rows = [
        _row(),
        _row(**tensor, dtype_target="torch.float32", shape_target=[2]),
        _row(**tensor),
        _row(status="target_only", unjudged_because=reasons.NO_PARTNER),
        _row(judged=True, unjudged_because=None, error=0.0),
    ]
    found = extent.of({"stage": pl.DataFrame(rows, schema=SCHEMA)})["stage"][0]
    assert (found.recorded, found.judged) == (4, 1)
    assert found.unjudged == {reasons.NO_PARTNER: 1, reasons.NO_NUMBERS: 2}
