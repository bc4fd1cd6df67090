"""Disturbances written blind (tests/blind_faults/lawless.py): nothing false is asserted of any."""

from __future__ import annotations

import pytest

from rlprobe.diagnose.diagnosis import ALIGNED, UNKNOWN
from tests.blind_faults import lawless
from tests.blind_faults.second import lawless as second
from tests.sampled import every_second
from tests.unit.diagnose.conftest import Align

ANSWERS = lawless.answers() | second.answers()
CASES = lawless.CASES | second.CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", every_second(CASES))
def test_nothing_false_is_asserted(align: Align, name: str) -> None:
    answer = ANSWERS[name]
    found = align(CASES[name].device(), repeat=False).diagnose()
    assert found.verdict != ALIGNED, "it has an effect"
    assert found.cause is not None and found.first is not None
    assert found.first.stage == answer.stage
    assert found.first.module in answer.modules
    assert found.cause.class_ in answer.may_say | {UNKNOWN}, found.cause
