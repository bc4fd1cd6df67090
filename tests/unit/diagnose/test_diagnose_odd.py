"""Odd disturbances: no class may be named that is not true of them, and unknown is no miss."""

from __future__ import annotations

import pytest

from rlprobe.diagnose.diagnosis import ALIGNED, CONSISTENT, OBSERVED, UNKNOWN
from tests.sampled import every_second
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.odd import Odd, family
from tests.unit.diagnose.transformer import Device

FAMILY = family()
#: Laws that statistics obey for certain: to call these unknown would be a loss.
NAMED = {
    "bf16 by chance", "channels interleaved", "gradient transposed", "negative activations lost",
    "answers clipped", "the future leaks", "positions of rows shifted", "positions stretched",
    "a weight in int8", "embeddings swapped",
}  # fmt: skip


def test_the_family_is_as_large_as_it_says() -> None:
    lawless = [odd for odd in FAMILY if odd.truth in ("unknown", "nondeterministic")]
    assert len(lawless) >= 30 and len({odd.name for odd in FAMILY}) == len(FAMILY)
    assert {odd.name for odd in FAMILY} >= NAMED


@pytest.mark.slow
@pytest.mark.parametrize("odd", every_second(FAMILY), ids=lambda odd: odd.name)
def test_no_wrong_class_is_asserted(align: Align, odd: Odd) -> None:
    device = Device(split=True, faults=odd.faults(), stage=odd.stage)
    found = align(device, repeat=False).diagnose()
    assert found.verdict != ALIGNED, "it has an effect"
    assert found.cause is not None
    assert found.cause.class_ in (odd.truth, UNKNOWN), found.cause
    if odd.name in NAMED:
        assert found.cause.class_ == odd.truth, found.cause
        assert found.cause.known in (CONSISTENT, OBSERVED)
