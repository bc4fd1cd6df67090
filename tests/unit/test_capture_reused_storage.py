"""FSDP frees a parameter's storage and another takes its address: whose numbers are recorded?"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rlprobe.capture.light.statistics import Statistics  # noqa: E402


def test_a_tensor_at_a_freed_parameters_address_is_measured_anew() -> None:
    statistics = Statistics(with_sketch=False)
    memory = np.full((64, 64), 3.0, dtype=np.float32)
    first = torch.from_numpy(memory)
    statistics.leaf(first, lasting=True)
    # what resharding does: the tensor lives on without this memory, and its version stays
    first.data = torch.empty(0)
    memory[:] = 5.0
    second = torch.from_numpy(memory)
    assert second._version == first._version
    leaf = statistics.leaf(second, lasting=True)
    statistics.resolve()
    assert leaf["Max"] == 5.0
