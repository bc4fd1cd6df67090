"""Is an argument that names the device told from one that changes what is computed?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlprobe.judge import reasons
from tests.msprobe.dumps import call, scalar, tensor
from tests.unit.diagnose.test_diagnose_dumps import diagnosed, model


def named(value: Any, kind: str | None = None, off: float = 0.0) -> dict[str, Any]:
    """A call that is given the name before the model runs."""
    made = tensor((1.0 + off, -1.0, 0.25, 2.0))
    return {"Torch.zeros.0.forward": call([scalar(4), scalar(value, kind)], [made])} | model()


@pytest.mark.parametrize(
    ("benchmark", "target", "kind"),
    [
        ("cuda:0", "npu:0", "torch.device"),
        ("cuda:3", "npu:1", "torch.device"),
        ("cuda", "npu", None),
        ("cpu", "npu:0", "torch.device"),
        # of a device without a number, and of a number without a device
        ("cuda:None", "npu:None", "torch.device"),
        ("cuda:None", "npu:0", None),
        (0, "npu:0", "torch.device"),
        ("nccl", "hccl", None),
        ("cuda:nccl", "npu:hccl", None),
    ],
)
def test_names_of_devices_differ_by_intent(
    tmp_path: Path, benchmark: Any, target: Any, kind: str | None
) -> None:
    code, found = diagnosed(tmp_path, named(benchmark, kind), named(target, kind))
    assert (code, found["verdict"]) == (0, "aligned"), found["sentence"]
    assert found["extent"]["actor_update"]["0"]["excused"] == {reasons.DEVICE: 1}


def test_what_is_made_on_the_device_is_judged(tmp_path: Path) -> None:
    sides = named("cuda:0", "torch.device"), named("npu:0", "torch.device", off=0.5)
    _, found = diagnosed(tmp_path, *sides)
    assert found["verdict"] == "diverged" and found["first"]["operator"] == "Torch.zeros"


@pytest.mark.parametrize(
    ("benchmark", "target", "kind"),
    [
        ("mean", "sum", None),
        ("cuda", "flash_attention_2", None),
        ("nccl", "npu:0", None),
        ("cudagraph", "npugraph", None),
        ("torch.float32", "torch.bfloat16", "torch.dtype"),
        (0, 1, None),
    ],
)
def test_other_arguments_are_differences(
    tmp_path: Path, benchmark: Any, target: Any, kind: str | None
) -> None:
    _, found = diagnosed(tmp_path, named(benchmark, kind), named(target, kind))
    assert found["verdict"] == "diverged", found["sentence"]
