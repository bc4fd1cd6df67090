"""Which stages a slime command line runs. Imports nothing of slime.

Follows ``MegatronTrainRayActor.train_actor`` and ``train_critic`` and the defaults of slime's
argument parser, v0.2.2 to v0.3.1 and main of August 2026.
"""

from __future__ import annotations

from rlprobe import stages
from rlprobe.errors import ConfigError
from rlprobe.frameworks.slime import flags as command
from rlprobe.frameworks.slime import versions
from rlprobe.frameworks.slime.flags import Flags

#: slime's names of the stages' directories in a dump, as its users know them.
DIRECTORIES: dict[str, str] = {
    stages.GENERATE: stages.GENERATE,
    stages.REFERENCE: "ref_compute_log_prob",
    stages.TEACHER: stages.TEACHER,
    stages.LOG_PROB: "old_log_prob",
    stages.VALUES: "critic_values",
    stages.CRITIC_UPDATE: "critic_train",
    stages.ACTOR_UPDATE: "actor_train",
}

#: What makes slime run old_log_prob again where it would take the log-probs of the training
#: forward instead.
FORCES_OLD_LOG_PROB = (
    "two or more train steps per rollout (--global-batch-size half of --rollout-batch-size x "
    "--n-samples-per-prompt, or --num-steps-per-rollout 2), --kl-coef (a KL term in the reward), "
    "--advantage-estimator ppo or gspo, --keep-old-actor, or --get-mismatch-metrics"
)

#: Flags that replay a run's own choices of experts.
_OWN_ROUTES = ("use-rollout-routing-replay", "use-routing-replay")


def stages_of(flags: Flags, version: str) -> tuple[str, ...]:
    """Canonical stages that slime runs under these flags, generation included.

    Raises:
        ConfigError: the flags ask for a back end that is not Megatron, or a value is no number.
    """
    backend = command.text(flags, "train-backend", "megatron")
    if backend != "megatron":
        raise ConfigError(
            f"--train-backend: found {backend!r}; rlprobe captures slime's Megatron back end only "
            "(slime's FSDP back end was taken out after v0.2.x)"
        )
    found = [stages.GENERATE]
    if has_critic(flags):
        found += [stages.VALUES, stages.CRITIC_UPDATE]
    if "disable-compute-advantages-and-returns" not in flags:
        if command.number(flags, "kl-coef", 0) != 0 or "use-kl-loss" in flags:
            found.append(stages.REFERENCE)
        if has_teacher(flags, version):
            found.append(stages.TEACHER)
        if why_no_old_log_prob(flags, version) is None:
            found.append(stages.LOG_PROB)
    found.append(stages.ACTOR_UPDATE)
    return tuple(sorted(found, key=stages.order))


def require_one_replay(flags: Flags, routing: str) -> None:
    """Refuse slime's own replay of routing where the benchmark's choices are replayed.

    Args:
        flags: slime's command line.
        routing: the alignment's key.

    Raises:
        ConfigError: a flag of slime's asks for the routes of the same run.
    """
    own = [name for name in _OWN_ROUTES if name in flags]
    if routing == "replay" and own:
        raise ConfigError(
            "routing: replay sends tokens to the experts that the benchmark chose, and "
            f"--{own[0]} to those that the same run chose earlier; leave that flag out, or set "
            "routing: own"
        )


def has_critic(flags: Flags) -> bool:
    """Whether a critic is trained: with PPO's estimator only."""
    return command.text(flags, "advantage-estimator", "grpo") == "ppo"


def has_teacher(flags: Flags, version: str) -> bool:
    """Whether a Megatron teacher is asked for log-probs (on-policy distillation)."""
    is_megatron = command.text(flags, "opd-type", "") == "megatron"
    return "use-opd" in flags and is_megatron and versions.traits(version).has_teacher


def why_no_old_log_prob(flags: Flags, version: str) -> str | None:
    """Why slime does not run old_log_prob under these flags; None when it does."""
    if "disable-compute-advantages-and-returns" in flags:
        return "advantages are not computed (--disable-compute-advantages-and-returns)"
    mismatch = "get-mismatch-metrics" in flags
    if "use-rollout-logprobs" in flags and not mismatch:
        return "the engine's log-probs are used (--use-rollout-logprobs)"
    if versions.traits(version).reuses_log_probs and _reuses(flags):
        return (
            f"slime {version} takes the log-probs of the training forward where a rollout is one "
            f"train step. To have the stage: {FORCES_OLD_LOG_PROB}"
        )
    return None


def _reuses(flags: Flags) -> bool:
    routing = "use-routing-replay" in flags and "use-rollout-routing-replay" not in flags
    return (
        train_steps_per_rollout(flags) == 1
        and command.text(flags, "loss-type", "policy_loss") == "policy_loss"
        and command.number(flags, "kl-coef", 0) == 0
        and command.text(flags, "advantage-estimator", "grpo") not in ("ppo", "gspo")
        and not routing
        and not {"use-rollout-logprobs", "get-mismatch-metrics", "keep-old-actor", "use-opd"}
        & flags.keys()
    )


def train_steps_per_rollout(flags: Flags) -> int:
    """How many optimizer steps one rollout is split into."""
    if "num-steps-per-rollout" in flags:
        return int(command.number(flags, "num-steps-per-rollout", 1))
    prompts = command.number(flags, "rollout-batch-size", 1)
    samples = prompts * command.number(flags, "n-samples-per-prompt", 1)
    return max(int(samples // command.number(flags, "global-batch-size", samples)), 1)
