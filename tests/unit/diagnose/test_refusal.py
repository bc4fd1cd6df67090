"""Sides that are laid out otherwise: does the diagnosis say why its cause is not observed?"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlprobe.cli import main
from rlprobe.diagnose import diagnosis
from rlprobe.judge import analysis
from rlprobe.refine import suspects
from rlprobe.said import say
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device


@pytest.mark.parametrize("otherwise", [True, False])
def test_the_reason_stands_among_the_evidence(
    align: Align, monkeypatch: pytest.MonkeyPatch, otherwise: bool
) -> None:
    real = analysis.first_of

    def first_of(step: Any) -> Any:
        found = real(step)
        if found is None or not otherwise:
            return found
        stage = dataclasses.replace(found.stage, laid_out=say("none"))
        return dataclasses.replace(found, stage=stage)

    made = align(Device(faults={"temperature": 1.1}))
    monkeypatch.setattr(analysis, "first_of", first_of)
    main(["diagnose", str(made.results)])
    found = diagnosis.current(made.results)
    assert found.verdict == "diverged" and found.cause is not None
    said = " ".join(found.cause.evidence)
    assert ("align once more with one layout on both sides" in said) == otherwise
    plan = suspects.find(made.results, 16)
    assert (plan.suspects is None) == otherwise
    assert ("no counterpart on the other" in plan.reason) == otherwise
