"""A key that verl does not have is found before anything is queued, and the nearest is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rlprobe.errors import ConfigError
from rlprobe.frameworks.verl.host import keys, settings
from tests.installed import needs

pytestmark = needs("verl")

VERSION = "0.9.1"


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        keys.require(overrides, VERSION)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("actor_rollout_ref.actor.optim.lrr=1e-3", "actor_rollout_ref.actor.optim.lr"),
        ("algorithm.adv_estimater=gae", "algorithm.adv_estimator"),
        ("data.train_batchsize=8", "data.train_batch_size"),
        ("actor_rollout_ref.rollout.temprature=1", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.actor.lr=1e-3", ""),
    ],
)
def test_the_nearest_real_key_is_named(override: str, near: str) -> None:
    said = refused(override)
    assert said.startswith(f"overrides: verl 0.9.1 has no {override.partition('=')[0]}")
    assert f"did you mean {near}" in said
    assert f"+{override} would add it" in said


def test_all_wrong_keys_are_named_at_once() -> None:
    said = refused("data.x_y=1", "data.train_batch_size=8", "critic.optim.lrx=2")
    assert said.startswith("2 problems\n") and "data.x_y" in said and "critic.optim.lrx" in said
    assert "data.train_batch_size" not in said.replace("did you mean data.train_batch_size", "")


@pytest.mark.parametrize(
    "override",
    [
        "+data.anything=1",
        "++data.anything=1",
        "~data.train_batch_size",
        "hydra.run.dir=/tmp",
        "model_engine=dp",
        "actor@actor_rollout_ref.actor=dp_actor",
        "actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.n_gpus_per_node=8",
    ],
)
def test_what_hydra_takes_is_taken(override: str) -> None:
    keys.require([override], VERSION)


def test_another_version_and_another_back_end_are_known_by_themselves() -> None:
    keys.require(["data.x_y=1"], "0.8.0")
    megatron = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    keys.require(["model_engine=megatron", megatron], VERSION)
    assert "has no actor_rollout_ref.actor.megatron" in refused(megatron)


def test_every_alignment_of_ours_has_keys_that_there_are(root: Path) -> None:
    files = [root / "config/config.yaml", *sorted((root / "config/examples").rglob("verl*.yaml"))]
    for file in files:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        if raw["framework"] == "verl" and raw["framework_version"] == VERSION:
            own = [raw.get("overrides", []), raw["benchmark"].get("overrides", [])]
            keys.require([o for some in own for o in some], VERSION)


def test_our_own_overrides_are_in_the_words_of_the_version() -> None:
    """What a version lacks is left out, what it has elsewhere is moved; others stay as they are."""
    ours = ["trainer.use_v1=false", "+critic.fsdp.mixed_precision={}", "data.seed=1", "critic.x=1"]
    assert settings.of_version(ours, "0.9.1") == ours
    assert settings.of_version(ours, "0.10.0") == ours
    assert settings.of_version(ours, "0.8.0") == ours[1:]
    assert settings.of_version(ours, "0.7.1") == [
        "+critic.model.fsdp_config.mixed_precision={}", "data.seed=1", "critic.x=1",
    ]  # fmt: skip
