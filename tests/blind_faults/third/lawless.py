"""Thirty disturbances of the numpy transformer without a law, as ``answers.yaml`` places them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

from tests.blind_faults import lawless
from tests.blind_faults.lawless import Case
from tests.blind_faults.third.harms import HARMS, Harm

ANSWERS = Path(__file__).with_name("answers.yaml")


def answers() -> dict[str, lawless.Answer]:
    """The answers, by name of the case."""
    return lawless.answers(ANSWERS)


def _case(name: str, stage: str, word: str) -> Case:
    def make(drawn: np.random.Generator) -> dict[str, Harm]:
        return {word: HARMS[name](drawn)}

    return Case(stage, make)


CASES: dict[str, Case] = {
    name: _case(name, answer["stage"], answer["at"])
    for name, answer in yaml.safe_load(ANSWERS.read_text(encoding="utf-8"))["lawless"].items()
}
