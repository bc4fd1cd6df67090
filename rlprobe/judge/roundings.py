"""Factors that a device rounds before it multiplies them: TF32 and HF32.

Both keep the exponent of fp32. TF32 has 10 explicit bits of significand and rounds to nearest
(NVIDIA A100 architecture white paper, 2020): 2**-11. HF32 has 11 (Huawei CANN documentation,
environment variable ENABLE_HF32_EXECUTION: the range of float32, a mantissa of 11 bits against 10
of FP16) and rounds to nearest or towards zero (Ascend C API, ``asc_enable_hf32_trans``): 2**-11 in
the worse mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlprobe.judge.roundoff import UNIT

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: torch's ``float32_matmul_precision`` -> the format that factors may be rounded to.
_PRECISION = {"high": 2.0**-11, "medium": UNIT["torch.bfloat16"]}


def products(*runs: Run | None) -> float:
    """Unit round-off of the coarsest factors that any process of the runs may use; 0 for none."""
    return max(
        (_of(process) for run in runs if run is not None for process in run.environment().values()),
        default=0.0,
    )


def _of(process: dict[str, Any]) -> float:
    if process.get("device") == "cpu":
        return 0.0
    switches = process.get("switches") or {}
    variables = process.get("variables") or {}
    if str(variables.get("NVIDIA_TF32_OVERRIDE")) == "0":
        return 0.0
    found = _PRECISION.get(str(switches.get("float32_matmul_precision")), 0.0)
    tf32 = switches.get("allow_tf32_matmul") is True
    tf32 = tf32 or str(variables.get("NVIDIA_TF32_OVERRIDE")) == "1"
    rounds = tf32 or switches.get("allow_hf32_matmul") is True
    return max(found, _PRECISION["high"] if rounds else 0.0)
