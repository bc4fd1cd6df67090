"""When must no verdict be given, and what is said beside one?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import configuration, weights
from rlprobe.dumps.results import sealed
from rlprobe.errors import DumpError, StoreError
from rlprobe.sketch import sketch
from tests.resealed import edited
from tests.unit.diagnose.conftest import Align, Alignment
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow


def items(alignment: Alignment) -> dict[str, GateItem]:
    return {item.item: item for item in alignment.diagnose().gate}


def test_a_clean_alignment_opens_every_item(align: Align) -> None:
    found = items(align(Device()))
    assert {item.state for item in found.values()} == {"open"}, found
    assert set(found) >= {
        "mock proof", "tokens", "weights", "rewards", "advantages", "sampling", "configuration",
        "parallel layout", "precision", "versions", "coverage", "stages and steps", "repeats",
    }  # fmt: skip
    assert "4 of the 4 recorded samples" in found["mock proof"].evidence


def test_a_control_that_ran_other_code_is_stale_and_named(align: Align) -> None:
    """An image behind a tag that moved, between the benchmark and its repeat."""
    moved = Device(faults={"code": {"benchmark": {"verl": "a" * 64}, "repeat": {"verl": "b" * 64}}})
    alignment = align(Device(), benchmark=moved)
    found = alignment.diagnose()
    assert found.verdict == "not_comparable"
    item = items(alignment)["code"]
    assert item.state == "shut"
    assert f"repeat ({alignment.keys['repeat'][:12]}) ran other code of verl" in item.evidence
    assert item.action is not None
    assert "rlprobe run --force" in item.action


def test_the_same_version_with_other_code_is_said_beside_a_verdict(align: Align) -> None:
    same = {"benchmark": {"verl": "a" * 64}, "repeat": {"verl": "a" * 64}}
    one = Device(faults={"code": same})
    fork = Device(faults={"code": {"target": {"verl": "c" * 64, "mine": "d" * 64}}})
    item = items(align(fork, benchmark=one))["code"]
    assert item.state == "caveat"
    assert "the same version and other code on the two sides: verl" in item.evidence
    equal = Device(faults={"code": {"target": {"verl": "a" * 64}}})
    assert items(align(equal, benchmark=one, name="b"))["code"].state == "open"


def test_dropout_that_is_on_is_said_with_its_sides(align: Align) -> None:
    """Where none is, there is nothing to say."""
    assert "dropout" not in items(align(Device(), repeat=False))
    on = Device(faults={"dropout": {"resid_dropout": 0.1, "Attention.attention_dropout": 0.2}})
    alignment = align(on, repeat=False, name="b")
    assert alignment.diagnose().verdict == "aligned", "a caveat"
    item = items(alignment)["dropout"]
    assert item.state == "caveat"
    assert "target: Attention.attention_dropout 0.2, resid_dropout 0.1" in item.evidence
    assert "benchmark" not in item.evidence


def test_without_a_mock_proof_nothing_is_judged(align: Align) -> None:
    found = align(Device(faults={"no proof": True}), repeat=False).diagnose()
    assert found.verdict == "not_comparable"
    assert "nothing shows that the rollouts were replayed" in found.sentence


def test_other_hyperparameters_shut_the_gate_and_other_places_do_not(align: Align) -> None:
    other = {"actor": {"optim": {"lr": 2e-3}, "clip_ratio": 0.2}, "trainer": {"device": "y"}}
    found = align(Device(faults={"configuration": other}), repeat=False).diagnose()
    assert found.verdict == "not_comparable"
    assert "actor.optim.lr: 0.001 -> 0.002" in found.sentence
    assert found.cause is not None and found.cause.class_ == "hyperparameter"
    place = {"trainer": {"device": "y"}}
    item = items(align(Device(faults={"configuration": place}), repeat=False, name="b"))
    assert item["configuration"].state == "open"
    assert "1 differ that cannot matter" in item["configuration"].evidence


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("actor_rollout_ref.actor.optim.lr", "algorithm"),
        ("actor_rollout_ref.actor.optim.weight_decay", "algorithm"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm"),
        ("actor_rollout_ref.rollout.temperature", "algorithm"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype", "rounding"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "rounding"),
        ("actor_rollout_ref.model.override_config.attn_implementation", "rounding"),
        ("trainer.experiment_name", "harmless"),
        ("actor_rollout_ref.rollout.name", "harmless"),
        ("trainer.default_local_dir", "harmless"),
        ("actor_rollout_ref.model.something_new", "unknown"),
        ("actor_rollout_ref.model.custom_cls.path", "unknown"),
        ("slime.eps_clip_high", "algorithm"),
        ("slime.adam_beta2", "algorithm"),
        ("slime.calculate_per_token_loss", "algorithm"),
        ("slime.global_batch_size", "algorithm"),
        ("slime.rotary_base", "algorithm"),
        ("slime.layernorm_epsilon", "algorithm"),
        ("slime.moe_router_topk", "algorithm"),
        ("slime.micro_batch_size", "rounding"),
        ("slime.log_probs_chunk_size", "rounding"),
        ("slime.accumulate_allreduce_grads_in_fp32", "rounding"),
        ("slime.bias_swiglu_fusion", "rounding"),
        ("slime.custom_loss_function_path", "unknown"),
        ("slime.something_new", "unknown"),
        ("slime.save_debug_train_data", "harmless"),
        ("slime.load_debug_rollout_data", "harmless"),
        ("slime.critic_load", "harmless"),
        ("slime.sglang_mem_fraction_static", "harmless"),
        ("slime.log_interval", "harmless"),
    ],
)
def test_a_setting_matters_or_it_does_not(key: str, kind: str) -> None:
    assert configuration.kind(key) == kind


def test_what_may_matter_is_said_beside_what_changes_rounding() -> None:
    left = {"slime.micro_batch_size": 1, "slime.custom_loss_function_path": "a.f"}
    right = {"slime.micro_batch_size": 2, "slime.custom_loss_function_path": "b.f"}
    said, closed = configuration._compared(left, right)
    assert (said.state, closed) == ("caveat", None)
    assert "slime.micro_batch_size: 1 -> 2" in said.evidence
    assert "slime.custom_loss_function_path: a.f -> b.f" in said.evidence


def test_a_flag_that_one_version_alone_has_is_no_other_algorithm() -> None:
    """A namespace has every flag: what a version without it does is not known."""
    said, closed = configuration._compared(
        {"slime.lr": 1, "slime.opsm_delta": 1e-4}, {"slime.lr": 1}
    )
    assert (said.state, closed) == ("caveat", None) and "opsm_delta" in said.evidence
    said, closed = configuration._compared({"slime.lr": 1}, {"slime.lr": 2})
    assert said.state == "shut" and closed is not None


def test_a_device_that_was_not_run_twice_is_a_caveat(align: Align) -> None:
    found = align(Device(), repeat=False).diagnose()
    assert found.verdict == "aligned"
    assert [item.item for item in found.gate if item.state == "caveat"] == ["repeats"]
    assert "one caveat" in found.sentence


def test_a_stage_that_was_not_compared_shuts_the_gate(align: Align) -> None:
    alignment = align(Device(), repeat=False)
    shutil.rmtree(alignment.results / "compare" / "target" / "actor_update")
    found = alignment.diagnose()
    assert found.verdict == "not_comparable"
    assert "actor_update was not compared" in found.sentence


def test_too_little_compared_is_never_a_pass(align: Align) -> None:
    alignment = align(Device(), repeat=False)
    path = alignment.results / "compare" / "target" / "actor_update" / "summary.json"
    summary = json.loads(path.read_text())
    summary["coverage"]["target"] = 0.5
    path.write_text(sealed(summary))
    found = alignment.diagnose()
    assert found.verdict == "not_comparable"
    assert "50.0% of the target's records" in found.sentence


def test_a_run_that_is_not_in_the_store_is_named(align: Align) -> None:
    alignment = align(Device(), repeat=False)
    with edited(alignment.results / "alignment.json") as plan:
        plan["runs"]["target"]["key"] = "0" * 64
    with pytest.raises(StoreError, match="target run 000000000000 is not in"):
        alignment.diagnose()


def test_damaged_inputs_are_errors_with_a_place(align: Align, tmp_path: Path) -> None:
    alignment = align(Device(), repeat=False)
    records = alignment.results / "compare" / "target" / "actor_update" / "records.parquet"
    records.write_bytes(records.read_bytes()[:200])
    with pytest.raises(DumpError, match=r"actor_update/records\.parquet has 200 bytes"):
        alignment.diagnose()
    (alignment.results / "alignment.json").write_text('{"name": 3}')
    with pytest.raises(DumpError, match="not an alignment's plan"):
        alignment.diagnose()
    (alignment.results / "alignment.json").unlink()
    with pytest.raises(DumpError, match="rlprobe config plan"):
        alignment.diagnose()


def rows(values: np.ndarray, parts: int, **more: Any) -> list[dict[str, Any]]:
    """A parameter as ``parts`` shards of its rows."""
    found = []
    for rank, part in enumerate(np.split(values, parts)):
        offset = rank * part.size
        found.append({
            "step": 0, "stage": "actor_update", "role": "actor", "rank": rank, "name": "w",
            "dtype": "torch.float32", "shape": list(values.shape), "local_shape": list(part.shape),
            "offset": None if parts == 1 else json.dumps({"dim": 0, "index": rank}),
            "digest": f"sha256:{hash(part.tobytes())}", "norm": float(np.linalg.norm(part)),
            "sketch": sketch(part, offset).tolist(), "complete": parts == 1, **more,
        })  # fmt: skip
    return found


def stage(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> Any:
    return weights._stage(pl.DataFrame(left), pl.DataFrame(right))


VALUES = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)


def test_equal_weights_sharded_otherwise_are_equal() -> None:
    assert not stage(rows(VALUES, 1), rows(VALUES, 4)).wrong
    assert not stage(rows(VALUES, 2), rows(VALUES, 4)).wrong


def test_one_changed_element_in_a_shard_is_seen() -> None:
    other = VALUES.copy()
    other[40, 3] += 0.01
    assert "w" in stage(rows(VALUES, 1), rows(other, 4)).wrong
    assert "w" in stage(rows(VALUES, 4), rows(other, 4)).wrong


def test_permuted_weights_are_called_permuted() -> None:
    assert stage(rows(VALUES, 1), rows(VALUES[::-1], 1)).wrong["w"].permuted
    assert stage(rows(VALUES, 1), rows(VALUES[::-1].copy(), 4)).wrong["w"].permuted


def test_shards_without_a_place_are_compared_by_norm_and_said_to_be() -> None:
    result = stage(rows(VALUES, 1), rows(VALUES, 4, offset=None))
    assert not result.wrong and result.by_norm == 1
    assert "w" in stage(rows(VALUES, 1), rows(2 * VALUES, 4, offset=None)).wrong


def test_a_shard_without_elements_says_nothing() -> None:
    """Of a parameter with one row, the second rank holds none: no digest, norm or sketch."""

    def sharded(values: np.ndarray) -> list[dict[str, Any]]:
        empty = {"rank": 1, "local_shape": [0, 32], "digest": None, "norm": None, "sketch": None}
        return [*rows(values, 1), *({**row, **empty} for row in rows(values, 1))]

    assert not stage(sharded(VALUES[:1]), sharded(VALUES[:1])).wrong
    assert not stage(rows(VALUES[:1], 1), sharded(VALUES[:1])).wrong
    assert "w" in stage(sharded(VALUES[:1]), sharded(VALUES[1:2])).wrong


def test_replicas_count_once() -> None:
    twice = [*rows(VALUES, 2), *({**row, "rank": row["rank"] + 2} for row in rows(VALUES, 2))]
    assert not stage(rows(VALUES, 1), twice).wrong


def test_a_parameter_on_one_side_only_is_a_difference() -> None:
    more = [*rows(VALUES, 1), *({**row, "name": "lora"} for row in rows(VALUES, 1))]
    assert stage(rows(VALUES, 1), more).wrong["lora"].what == "is on the target only"


def test_a_switch_that_only_one_kind_of_device_has_counts_where_it_is_on() -> None:
    """HF32 that is off on an NPU is no difference from a GPU, which has no such switch."""
    from rlprobe.diagnose.gate.settings import _shared_switches

    gpu = {"allow_tf32_matmul": "False", "float32_matmul_precision": "highest"}
    npu = {**gpu, "allow_hf32_conv": "False", "jit_compile": "disable"}
    left, right = _shared_switches(gpu, npu)
    assert left == right == gpu
    left, right = _shared_switches(gpu, {**npu, "allow_hf32_conv": "True"})
    assert right.keys() - left.keys() == {"allow_hf32_conv"}
