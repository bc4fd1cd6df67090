"""Which stages does a slime command line run, and is a skipped old_log_prob said clearly?"""

from __future__ import annotations

import pytest

from rlprobe import stages
from rlprobe.errors import ConfigError
from rlprobe.frameworks.slime import flags as command
from rlprobe.frameworks.slime import plan, versions


def run(*overrides: str, version: str = "0.3.1") -> tuple[str, ...]:
    return plan.stages_of(command.parse(command.words(overrides)), version)


#: One train step per rollout.
ONE_STEP = ("--rollout-batch-size 4", "--n-samples-per-prompt 2", "--global-batch-size 8")


def test_grpo_with_a_kl_loss_has_a_reference() -> None:
    assert run("--use-kl-loss", version="0.2.2") == (
        stages.GENERATE,
        stages.REFERENCE,
        stages.LOG_PROB,
        stages.ACTOR_UPDATE,
    )
    assert stages.REFERENCE in run("--kl-coef 0.1")
    assert stages.REFERENCE not in run("--kl-coef 0", version="0.2.2")


def test_ppo_has_a_critic() -> None:
    found = run("--advantage-estimator ppo")
    assert {stages.VALUES, stages.CRITIC_UPDATE} <= set(found)
    assert found == tuple(sorted(found, key=stages.order))


@pytest.mark.parametrize("version", ["0.2.2", "0.2.3", "0.2.4"])
def test_before_0_3_old_log_prob_always_runs(version: str) -> None:
    assert stages.LOG_PROB in run(*ONE_STEP, version=version)


@pytest.mark.parametrize("version", ["0.3.0", "v0.3.1", "main", "HEAD"])
def test_from_0_3_on_one_train_step_per_rollout_leaves_it_out(version: str) -> None:
    assert stages.LOG_PROB not in run(*ONE_STEP, version=version)
    reason = plan.why_no_old_log_prob(command.parse(command.words(ONE_STEP)), version)
    assert reason is not None
    assert "--keep-old-actor" in reason
    assert "two or more train steps" in reason


@pytest.mark.parametrize(
    "flag",
    [
        "--global-batch-size 4",
        "--num-steps-per-rollout 2",
        "--kl-coef 0.1",
        "--advantage-estimator ppo",
        "--advantage-estimator gspo",
        "--keep-old-actor",
        "--get-mismatch-metrics",
        "--loss-type custom_loss",
        "--use-routing-replay",
    ],
)
def test_what_brings_it_back(flag: str) -> None:
    assert stages.LOG_PROB in run(*ONE_STEP, flag)


def test_rollout_log_probs_replace_it() -> None:
    assert stages.LOG_PROB not in run("--use-rollout-logprobs", version="0.2.2")
    assert stages.LOG_PROB in run("--use-rollout-logprobs", "--get-mismatch-metrics")


def test_a_megatron_teacher_is_a_stage_of_its_own() -> None:
    assert stages.TEACHER in run("--use-opd", "--opd-type megatron")
    assert stages.TEACHER not in run("--use-opd", "--opd-type sglang")
    assert stages.TEACHER not in run("--use-opd", "--opd-type megatron", version="0.2.2")


def test_another_back_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="Megatron back end only"):
        run("--train-backend fsdp", version="0.2.2")


@pytest.mark.parametrize("flag", ["--use-routing-replay", "--use-rollout-routing-replay"])
def test_two_replays_of_routing_are_refused(flag: str) -> None:
    given = command.parse([flag])
    with pytest.raises(ConfigError, match=f"{flag} to those that the same run chose"):
        plan.require_one_replay(given, "replay")
    plan.require_one_replay(given, "own")
    plan.require_one_replay(command.parse(["--use-kl-loss"]), "replay")


def test_a_flag_may_carry_its_values_in_one_override_or_with_an_equals_sign() -> None:
    parsed = command.parse(command.words(["--lr 1e-6", "--eval 'a b' c", "--fp16", "--seed=3"]))
    assert parsed == {"lr": ("1e-6",), "eval": ("a b", "c"), "fp16": (), "seed": ("3",)}
    assert command.parse(command.render(parsed)) == parsed


def test_a_negative_number_is_a_value() -> None:
    assert command.parse(["--sglang-chunked-prefill-size", "-1"]) == {
        "sglang-chunked-prefill-size": ("-1",)
    }


@pytest.mark.parametrize("override", ["lr=1e-6", "", "--lr '1"])
def test_what_is_no_flag_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        command.words([override])


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="--kl-coef: found 'much'"):
        run("--kl-coef much")


@pytest.mark.parametrize("version", ["0.2.2", "v0.2.4", "0.3.1", "main", "HEAD"])
def test_known_versions(version: str) -> None:
    assert versions.is_known(version)


@pytest.mark.parametrize("version", ["0.2.1", "0.4.0", "1.0"])
def test_unknown_versions(version: str) -> None:
    assert not versions.is_known(version)


def test_what_two_versions_compute_otherwise_is_known() -> None:
    from rlprobe.frameworks.slime import versions

    (said,) = versions.known_differences("v0.2.2", "main")
    assert "rounds the gradient" in said
    assert versions.known_differences("0.3.1", "0.2.2.post1") == [said]
    for one, other in (("v0.2.2", "0.2.2"), ("main", "0.3.1"), ("0.2.4", "0.3.0")):
        assert versions.known_differences(one, other) == []
