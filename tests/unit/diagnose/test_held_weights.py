"""Within a step a model that nothing updates has one set of weights."""

from __future__ import annotations

import pytest

from rlprobe.diagnose.diagnosis import Diagnosis
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
