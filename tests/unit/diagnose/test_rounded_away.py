"""Are changes of weights that are kept in bf16 held against what such a weight can show?"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.judge import kept, reasons
from rlprobe.judge.excuse import reduce
from rlprobe.judge.excuses import rounded_away
from rlprobe.stages import ACTOR_UPDATE
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest number of 8 significant bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


#: Both sides begin with weights that bf16 holds, and step far enough for some changes to show.
START: dict[str, Any] = {
    "weights": lambda every: {name: bf16(value) for name, value in every.items()},
    "learning rate": 3e-3,
}
KEPT: dict[str, Any] = {**START, "keep": bf16, "kept in": "torch.bfloat16"}


def test_weights_in_bf16_against_fp32_are_aligned_and_what_was_hidden_is_said(align: Align) -> None:
    found = align(Device(faults=KEPT), benchmark=Device(faults=START), repeat=False).diagnose()
    assert found.verdict == "aligned", found.sentence
    item = next(item for item in found.gate if item.item == "changes")
    assert item.state == "caveat" and "the target has nothing finer" in item.evidence
    # norms' weights are near 1, where bf16 takes steps of 0.004 and more
    hidden = found.extent[ACTOR_UPDATE][0].unjudged[reasons.ROUNDED_AWAY]
    assert hidden == 5 and f"{hidden} changes were smaller" in item.evidence


@pytest.mark.parametrize("target", [KEPT, START], ids=["bf16", "fp32"])
def test_a_wrong_learning_rate_is_found_all_the_same(align: Align, target: dict[str, Any]) -> None:
    wrong = {**target, "learning rate": 6e-3}
    found = align(Device(faults=wrong), benchmark=Device(faults=START), repeat=False).diagnose()
    assert found.verdict == "diverged" and found.first is not None
    assert found.first.stage == ACTOR_UPDATE and found.cause.class_ == "optimizer"


def test_where_both_are_fp32_nothing_is_said(align: Align) -> None:
    found = align(Device(faults=START), benchmark=Device(faults=START), repeat=False).diagnose()
    assert found.verdict == "aligned" and "changes" not in {item.item for item in found.gate}


def _rows(*norms: tuple[float, float], rounding: float | None = 1.0) -> pl.DataFrame:
    rows = [
        {"slot": "change", "call": 0, "norm_benchmark": b, "norm_target": t, "judged": True,
         "beyond": True, "status": "matched", "reason": None, "excused_by": None,
         "unjudged_because": None, kept.COLUMN: rounding}
        for b, t in norms
    ]  # fmt: skip
    text = dict.fromkeys(("reason", "excused_by", "unjudged_because"), pl.String)
    return pl.DataFrame(rows, schema_overrides={**text, kept.COLUMN: pl.Float64})


def test_only_what_rounding_could_have_made_whole_is_left_out() -> None:
    rows = _rows((0.0, 0.9), (0.5, 0.0), (0.0, 1.1), (2.0, 0.0))
    left = reduce(rows, rounded_away.excuses(rows))
    assert left.get_column("judged").to_list() == [False, False, True, True]
    unknown = _rows((0.0, 0.9), rounding=None)
    assert rounded_away.excuses(unknown) == []


@pytest.mark.parametrize("target", [KEPT, START], ids=["bf16", "fp32"])
def test_a_step_of_one_modules_weights_names_it(align: Align, target: dict[str, Any]) -> None:
    module = "model.layers.1.mlp.up_proj"
    wrong = {**target, f"step {module}.weight": np.float32(2.5)}
    found = align(Device(faults=wrong), benchmark=Device(faults=START), repeat=False).diagnose()
    assert found.first is not None
    assert (found.first.stage, found.first.module) == (ACTOR_UPDATE, module), found.sentence
    assert found.cause is not None and found.cause.class_ == "optimizer"
