"""Are switches that let a device round its factors recorded, and do they widen the bound?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlprobe.judge import roundings

TF32 = 2.0**-11


class _Run:
    def __init__(self, **process: Any) -> None:
        self._process = process

    def environment(self) -> dict[str, dict[str, Any]]:
        return {"actor-rank0": self._process}


@pytest.mark.parametrize(
    ("process", "unit"),
    [
        ({"device": "cuda", "switches": {"allow_tf32_matmul": True}}, TF32),
        ({"device": "cuda", "switches": {"float32_matmul_precision": "high"}}, TF32),
        ({"device": "cuda", "switches": {"float32_matmul_precision": "medium"}}, 2.0**-8),
        ({"device": "cuda", "variables": {"NVIDIA_TF32_OVERRIDE": "1"}}, TF32),
        ({"device": "npu", "switches": {"allow_hf32_matmul": True}}, TF32),
        ({"device": "npu", "switches": {"allow_hf32_matmul": False, "allow_hf32_conv": True}}, 0),
        ({"device": "cuda", "switches": {"allow_tf32_matmul": True},
          "variables": {"NVIDIA_TF32_OVERRIDE": "0"}}, 0),
        ({"device": "cpu", "switches": {"allow_tf32_matmul": True}}, 0),
        ({"device": "npu"}, 0),
    ],
)  # fmt: skip
def test_the_coarsest_factors_of_any_process(process: dict[str, Any], unit: float) -> None:
    plain = _Run(device="cpu")
    assert roundings.products(plain, _Run(**process), None) == unit  # type: ignore[arg-type]


def test_an_npus_switches_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from rlprobe.capture import provenance

    assert not [name for name in provenance.switches() if "hf32" in name]
    npu = SimpleNamespace(
        matmul=SimpleNamespace(allow_hf32=True), conv=SimpleNamespace(allow_hf32=False)
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    found = provenance.switches()
    assert (found["allow_hf32_matmul"], found["allow_hf32_conv"]) == (True, False)
