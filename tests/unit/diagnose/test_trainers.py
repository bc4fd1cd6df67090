"""One side is verl's and the other slime's, or of another version than the alignment says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe.cli import main
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.judge.inputs import PlannedPair, PlannedRun, write
from tests.unit.diagnose.conftest import Align, Alignment
from tests.unit.diagnose.transformer import STAGES, Device

pytestmark = pytest.mark.slow

VERL = {"framework": "verl", "framework_version": "0.9.1"}
SLIME = {"framework": "slime", "framework_version": "0.2.2"}


def of_verl(**changes: Any) -> dict[str, Any]:
    actor = {
        "strategy": "fsdp", "entropy_coeff": 0, "clip_ratio": 0.2, "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28, "grad_clip": 1.0, "use_kl_loss": True, "kl_loss_coef": 0.001,
        "loss_agg_mode": "seq-mean-token-mean", "ppo_micro_batch_size_per_gpu": 4,
        "optim": {"lr": 1e-6, "weight_decay": 0.0, "betas": [0.9, 0.95]},
    }  # fmt: skip
    return {
        "actor_rollout_ref": {"actor": actor | changes, "rollout": {"temperature": 1.0, "n": 8}},
        "algorithm": {"adv_estimator": "gae", "gamma": 1.0, "lam": 0.95},
    }


def of_slime(**changes: Any) -> dict[str, Any]:
    settings = {
        "lr": 1e-6, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0,
        "entropy_coef": 0.0, "eps_clip": 0.2, "eps_clip_high": 0.28, "use_kl_loss": True,
        "kl_loss_coef": 0.001, "calculate_per_token_loss": False, "advantage_estimator": "ppo",
        "gamma": 1.0, "lambd": 0.95, "rollout_temperature": 1.0, "n_samples_per_prompt": 8,
        "micro_batch_size": 1, "tensor_model_parallel_size": 2,
    }  # fmt: skip
    return {"slime": settings | changes}


def gate(align: Align, benchmark: dict[str, Any], target: dict[str, Any]) -> dict[str, GateItem]:
    one = Device(faults={"declared": VERL, "configuration": benchmark})
    other = Device(faults={"declared": SLIME, "configuration": target})
    found = align(other, benchmark=one, repeat=False).diagnose()
    return {item.item: item for item in found.gate}


def test_the_stages_that_mean_the_same_are_named(align: Align) -> None:
    found = gate(align, of_verl(), of_slime())
    item = found["framework"]
    assert item.state == "caveat"
    assert "benchmark verl 0.9.1, target slime 0.2.2" in item.evidence
    for stage in STAGES:
        assert stage in item.evidence
    assert item.evidence.endswith("on one side alone: none")
    settings = found["configuration"]
    assert settings.state == "caveat", settings
    assert "14 settings that both frameworks have are the same; not said by one side: none" in (
        settings.evidence
    )


@pytest.mark.parametrize(
    ("verls", "slimes", "said"),
    [
        ({"loss_agg_mode": "token-mean"}, {}, "loss averaged over: tokens -> samples"),
        ({}, {"adam_beta2": 0.999}, "actor.optim.betas: [0.9, 0.95] -> [0.9, 0.999]"),
        ({"use_kl_loss": False}, {}, "actor.kl_loss_coef: 0 -> 0.001"),
        ({}, {"eps_clip_high": None}, "actor.clip_ratio_high: 0.28 -> 0.2"),
        ({}, {"advantage_estimator": "grpo"}, "algorithm.adv_estimator: gae -> grpo"),
        ({"grad_clip": 0.5}, {}, "actor.optim.clip_grad: 0.5 -> 1.0"),
    ],
)
def test_another_algorithm_under_another_name_shuts_the_gate(
    align: Align, verls: dict[str, Any], slimes: dict[str, Any], said: str
) -> None:
    item = gate(align, of_verl(**verls), of_slime(**slimes))["configuration"]
    assert item.state == "shut"
    assert item.evidence == f"the two sides run other algorithms: {said}"


def test_what_one_side_does_not_say_is_not_taken_for_equal(align: Align) -> None:
    slimes = of_slime()
    del slimes["slime"]["weight_decay"], slimes["slime"]["calculate_per_token_loss"]
    item = gate(align, of_verl(), slimes)["configuration"]
    assert item.state == "caveat"
    assert "12 settings" in item.evidence
    assert "one side: actor.optim.weight_decay, loss averaged over;" in item.evidence


def test_one_framework_needs_no_word(align: Align) -> None:
    same = Device(faults={"declared": VERL})
    found = align(Device(faults={"declared": VERL | {"x": 1}}), benchmark=same, repeat=False)
    assert "framework" not in {item.item for item in found.diagnose().gate}


@pytest.mark.parametrize(("wanted", "caveat"), [("0.9.1", False), ("0.8.0", True)])
def test_an_imported_benchmark_of_another_version_is_said(
    align: Align, wanted: str, caveat: bool
) -> None:
    """The key names the run; what the alignment says of it is only a word."""
    made = align(
        Device(faults={"declared": VERL | {"x": 1}}),
        benchmark=Device(faults={"declared": VERL}),
        repeat=False,
    )
    _planned(made, wanted)
    found = {item.item: item for item in made.diagnose().gate}
    assert ("framework" in found) == caveat
    if caveat:
        assert found["framework"].evidence == (
            "the benchmark's run is of verl 0.9.1, the alignment says 0.8.0"
        )


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (VERL, None),
        (VERL | {"framework_version": "0.8.0"}, "give benchmark.framework_version 0.8.0"),
        (SLIME, "is of slime 0.2.2, this alignment of verl: the gate says which stages"),
    ],
)
def test_config_check_looks_at_the_imported_run(
    align: Align,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    declared: dict[str, Any],
    said: str | None,
) -> None:
    made = align(Device(), benchmark=Device(faults={"declared": declared}), repeat=False)
    path = tmp_path / "a.yaml"
    path.write_text(
        yaml.safe_dump({
            "name": "a", "framework": "verl", "framework_version": "0.9.1",
            "model": {"path": "builtin:tiny-qwen2"}, "data": {"train_files": "builtin:arithmetic"},
            "store": str(made.store), "benchmark": {"run": made.keys["benchmark"]},
            "controls": {"repeat": False},
        })
    )  # fmt: skip
    assert main(["config", "check", str(path)]) == 0
    text = capsys.readouterr().out
    assert (said in text) if said else ("benchmark.run" not in text)


def _planned(alignment: Alignment, version: str) -> None:
    plain = ("cpu", "fp32", list(STAGES))
    write(
        alignment.results / "alignment.json", name="a", store=alignment.store,
        framework="verl", framework_version="0.9.1",
        runs={
            "benchmark": PlannedRun(
                alignment.keys["benchmark"], *plain, imported=True, framework_version=version
            ),
            "target": PlannedRun(alignment.keys["target"], *plain),
        },
        pairs={"target": PlannedPair("benchmark", "target", list(STAGES))},
    )  # fmt: skip
