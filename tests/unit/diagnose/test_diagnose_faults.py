"""Is a fault found, where it is, and called by its name? And nothing where there is none?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlprobe.stages import ACTOR_UPDATE, LOG_PROB
from tests.resealed import edited
from tests.sampled import every_second
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.planted import FORWARD, SHUT, UPDATE, Planted
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1])
def test_other_kernels_agree(align: Align, seed: int) -> None:
    found = align(Device(split=True, seed=seed), repeat=seed == 0).diagnose()
    assert found.verdict == "aligned", found.sentence
    assert all(s["largest_error"] > 0 for s in found.noise["stages"].values())
    assert all(s["largest_ratio"] < 0.7 for s in found.noise["stages"].values())


@pytest.mark.parametrize(
    ("change", "said"),
    [({"order": [2, 0, 3, 1]}, "another order"), ({"micro": 1}, "split differently"),
     pytest.param({"micro": 4}, "split differently", marks=pytest.mark.long)],
)  # fmt: skip
def test_other_places_of_samples_are_no_difference_and_no_agreement(
    align: Align, change: dict[str, Any], said: str
) -> None:
    """Nothing stands for single calls there, so that little was judged; what parts in it parts."""
    alignment = align(Device(split=True, faults=change), repeat=False)
    found = alignment.diagnose()
    assert found.verdict == "not_comparable", found.sentence
    item = next(item for item in found.gate if item.item == "judged")
    assert item.state == "shut" and "coordinate_sketch" in item.action
    less_asked_for(alignment.results / "alignment.json")
    found = alignment.diagnose()
    assert found.verdict == "aligned", found.sentence
    assert said in " ".join(item.evidence for item in found.gate if item.state == "caveat")
    judged = {stage.stage: stage.records for stage in found.stages}
    assert judged[ACTOR_UPDATE] > 40 and judged[LOG_PROB] == 2  # log-probs and entropies
    wrong = Device(split=True, faults={**change, "learning rate": 1.1e-3})
    found = align(wrong, repeat=False, name="b").diagnose()
    assert found.verdict == "diverged"
    assert next(item.state for item in found.gate if item.item == "judged") == "caveat"


def less_asked_for(plan: Path) -> None:
    with edited(plan) as said:
        said["coverage"] = 0.04


@pytest.mark.parametrize(
    "fault", [*every_second([*FORWARD, *UPDATE]), *SHUT], ids=lambda fault: fault.name
)
def test_a_fault_is_found_and_named(align: Align, fault: Planted) -> None:
    # On other kernels: the fault stands out of real round-off, not out of equality.
    device = Device(split=True, faults=fault.faults, stage=fault.only)
    found = align(device, repeat=False).diagnose()
    assert found.verdict == fault.verdict, found.sentence
    assert found.first is not None and found.cause is not None
    assert (found.first.stage, found.first.module) == (fault.stage, fault.module), found.sentence
    assert found.cause.class_ in fault.causes, found.cause
