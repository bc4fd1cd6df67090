"""Within a step a model that nothing updates has one set of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.diagnose.gate import held
from rlprobe.stages import ACTOR_UPDATE, LOG_PROB
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

ITEM = "weights within a step"
WEIGHT = "model.layers.1.mlp.down_proj.weight"


def aligned(align: Align, benchmark: dict[tuple[int, str, str], int] | None = None,
            target: dict[tuple[int, str, str], int] | None = None) -> Diagnosis:  # fmt: skip
    """Steps from which parameters are read, by (step, stage, parameter), on either side."""
    sides = [Device(split=split, faults={"steps read": read or {}})
             for split, read in ((False, benchmark), (True, target))]  # fmt: skip
    return align(sides[1], benchmark=sides[0], repeat=False).diagnose()


def state(found: Diagnosis) -> str:
    (item,) = [item for item in found.gate if item.item == ITEM]
    return item.state


def test_a_step_whose_stages_agree_is_said(align: Align) -> None:
    found = aligned(align)
    assert found.verdict == "aligned", found.sentence
    assert state(found) == "open"


@pytest.mark.parametrize("stage", [LOG_PROB, ACTOR_UPDATE])
def test_one_weight_that_stayed_behind_is_named_with_its_stage_and_step(
    align: Align, stage: str
) -> None:
    found = aligned(align, target={(1, stage, WEIGHT): 0})
    assert found.verdict == "not_comparable"
    assert state(found) == "shut"
    assert found.first is not None and found.cause is not None
    assert (found.first.stage, found.first.module, found.first.step) == (
        stage, WEIGHT.removesuffix(".weight"), 1)  # fmt: skip
    assert found.cause.class_ == "stale_weights"
    assert f"{stage} has those of step 0" in found.sentence + str(found.cause.evidence)


def test_other_weights_for_the_time_of_a_stage_are_weights_and_no_older_ones(align: Align) -> None:
    found = aligned(align, target={(0, LOG_PROB, WEIGHT): 7, (0, LOG_PROB, "lm_head.weight"): 7})
    assert found.verdict == "not_comparable"
    assert found.cause is not None and found.cause.class_ == "weights"


def test_what_the_benchmark_does_as_well_is_its_way(align: Align) -> None:
    read = {(1, LOG_PROB, WEIGHT): 0}
    found = aligned(align, benchmark=read, target=read)
    assert found.verdict == "aligned", found.sentence
    assert state(found) == "open"


def read(*digests: str, stage: str = LOG_PROB) -> Any:
    """A run whose stage was entered several times, each with one parameter of these bytes."""
    rows = [
        {"step": 0, "stage": stage, "role": "actor", "rank": 0, "name": WEIGHT, "dtype": "f",
         "local_shape": [2], "offset": None, "digest": digest}
        for digest in digests
    ]  # fmt: skip
    table = pl.DataFrame(rows, schema_overrides={"offset": pl.String})
    return SimpleNamespace(weights=lambda: table)


@pytest.mark.parametrize(
    ("benchmark", "target", "state"),
    [
        (("a", "a"), ("a", "a"), "open"),
        (("a", "a"), ("a", "b"), "shut"),
        # an update came between: what it makes of weights is judged as changes
        (("a", "b"), ("a", "c"), None),
        (("a",), ("a",), None),
    ],
)
@pytest.mark.parametrize("stage", [LOG_PROB, ACTOR_UPDATE])
def test_a_stage_that_is_entered_twice_is_held_to_both_readings(
    benchmark: tuple[str, ...], target: tuple[str, ...], state: str | None, stage: str
) -> None:
    """Adapters on and off: only the first reading was compared with the other side's."""
    evidence: Any = SimpleNamespace(
        benchmark=read(*benchmark, stage=stage), target=read(*target, stage=stage)
    )
    item, shut = held.check(evidence)
    assert (None if item is None else item.state) == state
    assert (shut is not None) == (state == "shut")
