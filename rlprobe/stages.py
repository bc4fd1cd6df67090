"""The stages of one reinforcement-learning step, their order and their other names."""

from __future__ import annotations

from rlprobe.errors import ConfigError

GENERATE = "actor_generate_sequences"
FORCED = "forced_generation"
REFERENCE = "reference_compute_log_prob"
TEACHER = "teacher_compute_log_prob"
LOG_PROB = "actor_compute_log_prob"
VALUES = "critic_compute_values"
CRITIC_UPDATE = "critic_update"
ACTOR_UPDATE = "actor_update"

#: Canonical order within a step; every view, gate and diagnosis walks it in this order.
STAGES: tuple[str, ...] = (
    GENERATE,
    FORCED,
    REFERENCE,
    TEACHER,
    LOG_PROB,
    VALUES,
    CRITIC_UPDATE,
    ACTOR_UPDATE,
)

#: Stages that change weights; the parameters' changes are records of these.
UPDATE_STAGES: frozenset[str] = frozenset({CRITIC_UPDATE, ACTOR_UPDATE})

#: Stages of the inference engine. A replay generates nothing; with ``generation: compare`` its
#: engine is led through the recorded responses instead, as the benchmark's is.
ENGINE_STAGES: tuple[str, ...] = (GENERATE, FORCED)

#: Stages that the trainer runs, in a replay as well.
TRAINING_STAGES: tuple[str, ...] = tuple(s for s in STAGES if s not in ENGINE_STAGES)

#: The model each stage runs.
MODEL_ROLE: dict[str, str] = {
    GENERATE: "actor",
    FORCED: "actor",
    REFERENCE: "ref",
    TEACHER: "teacher",
    LOG_PROB: "actor",
    VALUES: "critic",
    CRITIC_UPDATE: "critic",
    ACTOR_UPDATE: "actor",
}

#: verl's and slime's own names. slime's stay in its dump tree; everywhere else names are canonical.
ALIASES: dict[str, str] = {
    "ref_compute_log_prob": REFERENCE,
    "compute_ref_log_prob": REFERENCE,
    "compute_values": VALUES,
    "old_log_prob": LOG_PROB,
    "actor_train": ACTOR_UPDATE,
    "critic_values": VALUES,
    "critic_train": CRITIC_UPDATE,
}


def canonical(name: str) -> str:
    """The canonical name of a stage given by any of its names.

    Raises:
        ConfigError: the name is no stage's; the message lists those accepted.
    """
    stage = ALIASES.get(name, name)
    if stage not in STAGES:
        raise ConfigError(
            f"stage {name!r} is unknown; accepted: {', '.join(STAGES)} "
            f"(or {', '.join(sorted(ALIASES))})"
        )
    return stage


def order(stage: str) -> int:
    """Position of a canonical stage within a step; what is called otherwise comes after them."""
    return STAGES.index(stage) if stage in STAGES else len(STAGES)
