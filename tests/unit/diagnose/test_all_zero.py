"""Is agreement on zero told from agreement?"""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlprobe.judge import execution, reasons
from rlprobe.judge.excuse import reduce
from rlprobe.judge.excuses import all_zero
from rlprobe.stages import ACTOR_UPDATE
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device


def record(slot: str, norms: tuple[float, float] = (0.0, 0.0), **given: Any) -> dict[str, Any]:
    return {
        "slot": slot, "phase": execution.BACKWARD if slot == "input" else execution.GRADIENTS,
        "update": 0, "status": "matched", "reason": None, "judged": True, "beyond": False,
        "norm_benchmark": norms[0], "norm_target": norms[1], "excused_by": None,
        "unjudged_because": None, **given,
    }  # fmt: skip


def unjudged(*rows: dict[str, Any]) -> list[bool]:
    kinds = {"excused_by": pl.String, "unjudged_because": pl.String, "reason": pl.String}
    table = pl.DataFrame(list(rows), schema_overrides=kinds)
    left = reduce(table, all_zero.excuses(table))
    return [reason == reasons.ALL_ZERO for reason in left.get_column("unjudged_because")]


@pytest.mark.parametrize("slot", list(all_zero.ZERO))
def test_a_kind_that_is_zero_throughout_is_not_judged(slot: str) -> None:
    slot = "input" if slot == "backward" else slot
    assert unjudged(record(slot), record(slot)) == [True, True]
    assert unjudged(record(slot), record(slot, (1.0, 1.0))) == [False, False]
    assert unjudged(record(slot), record(slot, (0.0, 1.0))) == [False, False]


def test_each_update_and_each_kind_is_looked_at_alone() -> None:
    rows = [record("grad_reduced"), record("grad_reduced", (1.0, 1.0), update=1), record("change")]
    assert unjudged(*rows) == [True, False, True]


def test_activations_may_be_zero() -> None:
    assert unjudged(record("output", phase=execution.FORWARD)) == [False]


def test_an_update_that_learns_nothing_is_a_caveat(align: Align) -> None:
    nothing: dict[str, Any] = {"loss gradient": lambda g: 0 * g}
    device = Device(split=True, faults=nothing)
    found = align(device, benchmark=Device(faults=nothing), repeat=False).diagnose()
    item = next(item for item in found.gate if item.item == "judged")
    assert item.state == "caveat" and f"records of {ACTOR_UPDATE}" in item.evidence
    assert found.extent[ACTOR_UPDATE][0].unjudged[reasons.ALL_ZERO] > 100
