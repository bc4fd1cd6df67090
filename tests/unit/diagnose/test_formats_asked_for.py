"""Is a stage that computes in another format than was asked for found, where it begins?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlprobe import stages
from tests.resealed import edited
from tests.unit.diagnose.conftest import Align, Alignment
from tests.unit.diagnose.tape import Array
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def bf16(values: Array) -> Array:
    """Rounded to the nearest bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    found: Array = rounded.astype(np.uint32).view(np.float32)
    return found


def autocast(*paths: str, rounds: bool = True) -> dict[str, Any]:
    faults: dict[str, Any] = {f"format {path}": "torch.bfloat16" for path in paths}
    return faults | ({f"output {path}": bf16 for path in paths} if rounds else {})


def asked_for(alignment: Alignment, role: str, **asked: str) -> Alignment:
    """Another device or precision of one side in the plan."""
    with edited(alignment.results / "alignment.json") as plan:
        plan["runs"][role] |= asked
    return alignment


@pytest.mark.parametrize("stage", [stages.REFERENCE, stages.LOG_PROB, stages.ACTOR_UPDATE])
@pytest.mark.parametrize("paths", [(Q, DOWN), (DOWN,)])
def test_it_is_found_at_the_first_module_that_has_it(
    align: Align, stage: str, paths: tuple[str, ...]
) -> None:
    found = align(Device(split=True, faults=autocast(*paths), stage=stage), repeat=False).diagnose()
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    assert (found.first.stage, found.first.module) == (stage, paths[0])
    assert found.cause is not None and found.cause.class_ == "rounding_order"
    assert "torch.float32 on the benchmark and torch.bfloat16" in " ".join(found.cause.evidence)
    item = next(item for item in found.gate if item.item == "precision")
    assert item.state == "caveat" and f"outputs of {stage} are of another format" in item.evidence


@pytest.mark.parametrize("stage", [stages.REFERENCE, stages.LOG_PROB, stages.ACTOR_UPDATE])
def test_a_stage_that_has_it_nearly_everywhere_was_compared(align: Align, stage: str) -> None:
    """An autocast reaches every projection: that they are of another format is what is found."""
    inside = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
              "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
              "mlp.down_proj")  # fmt: skip
    paths = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in inside]
    device = Device(split=True, faults=autocast(*paths), stage=stage)
    found = align(device, repeat=False).diagnose()
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    assert (found.first.stage, found.first.module) == (stage, paths[0])


def test_another_format_with_the_same_numbers_is_one_all_the_same(align: Align) -> None:
    device = Device(faults=autocast("lm_head", rounds=False), stage=stages.LOG_PROB)
    found = align(device, repeat=False).diagnose()
    assert found.verdict == "diverged" and found.first is not None
    assert found.first.module == "lm_head"


@pytest.mark.parametrize("asked", [{"precision": "bf16"}, {"device": "npu"}])
def test_between_unlike_sides_it_is_judged_by_its_error(
    align: Align, asked: dict[str, str]
) -> None:
    """The floor is the coarser side's; a numerically equal output of another format agrees."""
    device = Device(split=True, faults=autocast(DOWN), stage=stages.LOG_PROB)
    found = asked_for(align(device, repeat=False), "target", **asked).diagnose()
    assert found.verdict == "aligned" or found.first is not None
    assert found.cause is None or "asked for one precision" not in " ".join(found.cause.evidence)
    same = Device(faults=autocast(DOWN, rounds=False), stage=stages.LOG_PROB)
    found = asked_for(align(same, repeat=False, name="b"), "target", **asked).diagnose()
    assert found.verdict == "aligned", found.sentence
