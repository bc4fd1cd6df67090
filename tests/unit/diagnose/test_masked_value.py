"""Are masks that say "never" with another number no difference, and other masks one?"""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.judge.excuses import masked_value
from rlprobe.judge.reasons import MASKED_VALUE
from rlprobe.stages import LOG_PROB
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.tape import Array
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

ATTENTION = "model.layers.0.self_attn"
VALUE = "masked value"


def judged(align: Align, benchmark: float, target: float, **faults: Any) -> Diagnosis:
    """A device of other kernels, and of another number in its masks."""
    device = Device(split=True, faults={VALUE: target, **faults})
    return align(device, benchmark=Device(faults={VALUE: benchmark}), repeat=False).diagnose()


def excused(found: Diagnosis) -> int:
    return sum(step.excused.get(MASKED_VALUE, 0) for step in found.extent[LOG_PROB].values())


@pytest.mark.parametrize(
    ("benchmark", "target"), [(-1e4, -1e9), (-1e9, -65504.0), (-3.4e38, -1e9), (-1e9, -3.4e38)]
)
def test_another_number_for_never_is_no_difference(
    align: Align, benchmark: float, target: float
) -> None:
    found = judged(align, benchmark, target)
    assert found.verdict == "aligned", found.sentence
    # two layers and their attention, in each of two micro-batches
    assert excused(found) == 8


def test_a_fault_beside_it_is_found(align: Align) -> None:
    found = judged(align, -1e4, -1e9, **{"output model.layers.1.mlp.down_proj": lambda y: 1.01 * y})
    assert found.verdict == "diverged" and found.first is not None
    assert found.first.module == "model.layers.1.mlp.down_proj"
    assert excused(found) == 8


def seen(tokens: int) -> Any:
    """Lets the last tokens see as much as that many of the first did not."""

    def change(mask: Array) -> Array:
        other = mask.copy()
        hidden = other[0, 0, 0, -1]
        other[0, 0, -1, :tokens] = hidden
        other[0, 0, 0, -tokens:] = 0.0
        return other

    return change


def test_other_tokens_masked_are_a_difference_whatever_the_number(align: Align) -> None:
    """As many of them, so that only what attention makes of the mask tells."""
    found = judged(align, -1e4, -1e9, **{f"mask {ATTENTION}": seen(3)})
    assert found.verdict == "diverged" and found.first is not None and found.cause is not None
    assert found.first.module in ("model", ATTENTION) and found.cause.class_ == "mask"
    assert excused(found) == 0


@pytest.mark.parametrize("value", [-5.0, -100.0])
def test_a_number_that_may_let_tokens_through_is_a_difference(align: Align, value: float) -> None:
    found = judged(align, -1e9, value)
    assert found.verdict == "diverged" and found.cause is not None
    assert found.cause.class_ == "mask" and excused(found) == 0


def record(call: int, sequence: int, **given: Any) -> dict[str, Any]:
    """Of three quarters masked on either side, with the number of its format."""
    return {
        "micro_batch": 0, "call_id": call, "sequence": sequence, "slot": "input",
        "status": "matched", "judged": True, "beyond": True, "error": 1.0,
        "max_benchmark": 0.0, "min_benchmark": -1e4, "mean_benchmark": -7.5e3,
        "max_target": 0.0, "min_target": -1e9, "mean_target": -7.5e8, **given,
    }  # fmt: skip


def taken(*records: dict[str, Any]) -> int:
    """How many records are excused where the call's result agrees and the layer's does not."""
    results = [
        record(0, 10, slot="output", beyond=False),
        record(1, 20, slot="output", beyond=True),
    ]
    rows = pl.DataFrame([*records, *results])
    return sum(rows.filter(excuse.rows).height for excuse in masked_value.excuses(rows))


@pytest.mark.parametrize(
    ("other", "count"),
    [
        ({}, 2),
        ({"mean_target": -7.4e8}, 0),  # another share of tokens
        ({"mean_target": None}, 0),  # nobody knows which share
        ({"max_target": 1.0}, 0),  # no mask
        ({"min_benchmark": -9e3, "mean_benchmark": -6.75e3}, 0),  # may let tokens through
        ({"status": "shape"}, 0),
        ({"micro_batch": 1}, 0),  # nothing of that micro-batch agrees
    ],
)
def test_one_mask_is_excused_wherever_it_goes_once_its_first_use_agrees(
    other: dict[str, Any], count: int
) -> None:
    """The layer hands it to its attention, which completes before the layer does."""
    assert taken(record(1, 0, **other), record(0, 1, **other)) == count


def test_a_mask_whose_first_use_does_not_agree_or_is_not_known_is_judged() -> None:
    assert taken(record(1, 0)) == 0
    assert taken(record(2, 0)) == 0
