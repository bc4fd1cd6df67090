"""What has a partner in one call and layer and none in another was lost; a kernel's own was not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from rlprobe import stages
from rlprobe.diagnose.gate import gaps
from rlprobe.judge.reasons import NO_NUMBERS, NO_PARTNER, OTHER_SHAPE
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

ATTENTION, MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp.experts.act_fn"


def record(module: str, call: int, slot: str = "output", index: str = "0", why: str | None = None,
           rank: int = 0, direction: str = "forward") -> dict[str, Any]:  # fmt: skip
    return {"rank": rank, "name": f"{module}.{direction}.{call}.{slot}.{index}", "op": "Any",
            "direction": direction, "slot": slot, "index": index, "module": module,
            "unjudged_because": why}  # fmt: skip


def said(rows: list[dict[str, Any]], stage: str = stages.ACTOR_UPDATE, more: Any = None,
         misplaced: str | None = None, near_ties: int = 0) -> str:  # fmt: skip
    def finding(own: list[dict[str, Any]]) -> Any:
        table = pl.DataFrame(own, schema_overrides={"unjudged_because": pl.String})
        process = SimpleNamespace(near_ties=near_ties)
        return SimpleNamespace(
            stage=SimpleNamespace(
                rows=table, misplaced=misplaced, laid_out=None, processes=[process]
            )
        )

    findings = {stage: finding(rows)} | {name: finding(own) for name, own in (more or {}).items()}
    step: Any = SimpleNamespace(findings=findings)
    return "; ".join(gaps.check(step))


@pytest.mark.parametrize("why", [NO_PARTNER, OTHER_SHAPE])
def test_one_call_of_several_is_a_gap(why: str) -> None:
    found = said([record("model.norm", call, why=why if call == 2 else None) for call in range(4)])
    assert "1 record " in found and "model.norm.forward.2.output.0" in found


@pytest.mark.parametrize("why", [NO_PARTNER, OTHER_SHAPE])
def test_one_layer_of_several_is_a_gap(why: str) -> None:
    rows = [record(ATTENTION.format(n), 0, why=why if n == 1 else None) for n in range(3)]
    assert "layers.1.self_attn" in said(rows)


def test_what_another_stage_of_the_model_has_is_a_gap_where_it_is_not() -> None:
    own = [record("lm_head", 0, why=NO_PARTNER)]
    assert said(own) == ""
    assert "lm_head" in said(own, more={stages.LOG_PROB: [record("lm_head", 0)]})
    # a critic is another model, which may run on other kernels
    assert said(own, more={stages.VALUES: [record("lm_head", 0)]}) == ""


def test_what_a_kernel_never_has_is_no_gap() -> None:
    weights = [
        record(ATTENTION.format(n), call, index=index, why=NO_PARTNER if index == "1" else None)
        for n in range(2) for call in range(4) for index in ("0", "1")
    ]  # fmt: skip
    assert said(weights) == ""
    experts = [record(MLP.format(n), call, why=OTHER_SHAPE if call < 4 else NO_PARTNER)
               for n in range(2) for call in range(16)]  # fmt: skip
    assert said(experts) == ""
    masks = [record(ATTENTION.format(n), c, "input", "attention_mask", OTHER_SHAPE)
             for n in range(2) for c in range(3)]  # fmt: skip
    assert said([*weights, *experts, *masks]) == ""
    weights[-1]["unjudged_because"] = None
    assert "self_attn" in said(weights), "one that has a partner shows that the others lost theirs"


@pytest.mark.parametrize("slot", ["grad", "grad_clipped", "change"])
@pytest.mark.parametrize("why", [NO_PARTNER, OTHER_SHAPE])
def test_a_parameter_that_alone_has_none_is_a_gap(slot: str, why: str) -> None:
    """A single call of a single layer: what other parameters have shows that it was lost."""
    rows = [record(name, 0, slot, "weight", direction="update") for name in ("norm", "lm_head")]
    assert said(rows) == ""
    lone = record("embed_tokens", 0, slot, "bias", why, direction="update")
    assert "embed_tokens" in said([*rows, lone])
    assert said([lone, record("embed_tokens", 0)]) == "", "where none has any, none was lost"


def test_other_micro_batches_and_other_ranks_are_no_gaps() -> None:
    rows = [record("model.norm", call, why=NO_PARTNER if call > 1 else None) for call in range(4)]
    assert said(rows) and said(rows, misplaced="micro-batches are split differently") == ""
    lone = [record("model.norm", 0), record("model.norm", 0, why=NO_PARTNER, rank=1)]
    assert said(lone) == ""


def test_experts_may_have_no_token_where_a_choice_fell_the_other_way() -> None:
    rows = [record("model.layers.0.mlp.experts.3", call, why=OTHER_SHAPE if call else None)
            for call in range(3)]  # fmt: skip
    assert said(rows) and said(rows, near_ties=1) == ""
    assert said([record("model.norm", call, why=NO_PARTNER if call else None)
                 for call in range(2)], near_ties=1)  # fmt: skip


def test_a_function_may_be_called_more_often_by_another_kernel_and_a_loss_may_not() -> None:
    calls = [record("m", call, why=NO_PARTNER if call > 1 else None) for call in range(4)]
    for row in calls:
        row["module"] = None
    assert said(calls) == ""
    for row in calls:
        row |= {"slot": "loss", "name": f"loss.pg_loss.{row['name'].split('.')[2]}.debug"}
    assert "loss.pg_loss.2.debug" in said(calls)


def test_what_is_there_and_has_no_numbers_is_no_gap() -> None:
    assert said([record("model.norm", c, why=NO_NUMBERS if c else None) for c in range(3)]) == ""


@pytest.mark.slow
def test_a_correct_device_has_none(align: Align) -> None:
    found = align(Device(split=True)).diagnose()
    assert found.verdict == "aligned"
    assert "other calls and layers" not in " ".join(str(item.evidence) for item in found.gate)
