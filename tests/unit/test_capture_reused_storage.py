"""FSDP frees a parameter's storage and another takes its address: whose numbers are recorded?"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rlprobe.capture.statistics import Statistics  # noqa: E402


def test_a_tensor_at_a_freed_parameters_address_is_measured_anew() -> None:
    statistics = Statistics(with_sketch=False)
    first = torch.full((64, 64), 3.0)
    statistics.leaf(first, lasting=True)
    address = first.data_ptr()
    first.untyped_storage().resize_(0)
    kept = []
    for _ in range(1000):
        second = torch.full((64, 64), 5.0)
        if second.data_ptr() == address:
            break
        kept.append(second)
    else:
        pytest.skip("the allocator did not give the address again")
    leaf = statistics.leaf(second, lasting=True)
    statistics.resolve()
    assert leaf["Max"] == 5.0
