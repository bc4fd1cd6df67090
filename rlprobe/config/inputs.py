"""The sections that say what is trained: model, data, steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from rlprobe.config.section import Section

#: Prefix of models and data that the framework's room makes itself on first use.
BUILTIN = "builtin:"


def _one_or_many(value: object) -> object:
    """A single text is accepted where a list of texts is meant."""
    # a validator of its own sees what JSON holds, and the strict tuple behind it wants a tuple
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Files = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
]


class ModelSection(Section):
    """The models: directories in Hugging Face layout that every node can read."""

    path: str = Field(
        min_length=1,
        description="Actor: a directory with config.json, tokenizer and safetensors, or "
        "builtin:NAME for a tiny model made on first use.",
        examples=["/models/Qwen2.5-7B-Instruct", "builtin:tiny-qwen2"],
    )
    critic_path: str | None = Field(
        default=None,
        min_length=1,
        description="Critic, with its value head saved in it (otherwise the framework draws one "
        "unseeded and no two runs are equal). null where the algorithm has no critic.",
        examples=["/models/Qwen2.5-7B-critic", "builtin:tiny-qwen2-critic"],
    )
    reference_path: str | None = Field(
        default=None,
        min_length=1,
        description="Reference model where it differs from the actor's. null: the actor's.",
        examples=["/models/Qwen2.5-7B-sft"],
    )

    def paths(self) -> dict[str, str]:
        """The given models by role: actor, and where given critic and reference."""
        named = {"actor": self.path, "critic": self.critic_path, "reference": self.reference_path}
        return {role: path for role, path in named.items() if path is not None}


class DataSection(Section):
    """Prompts and the reward."""

    train_files: Files = Field(
        min_length=1,
        description="Training prompts in the framework's own format: one file or a list, or "
        "builtin:NAME.",
        examples=["/data/gsm8k/train.parquet", "builtin:arithmetic"],
    )
    val_files: Files | None = Field(
        default=None,
        description="Validation prompts; null: the training prompts stand in, as frameworks "
        "insist on a file although an alignment never validates.",
        examples=["/data/gsm8k/test.parquet"],
    )
    reward_function: str | None = Field(
        default=None,
        pattern=r"^[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*$",
        description="FILE.py:FUNCTION computing the reward; null: the framework's own (for "
        "builtin data: the one made with it).",
        examples=["rewards/math.py:score"],
    )


class StepsSection(Section):
    """How long the trainer runs and which steps are captured. Steps count from 0."""

    total: int = Field(
        default=1,
        ge=1,
        description="Trainer steps of every run. It sets learning-rate schedules, so it changes "
        "the numbers.",
        examples=[2],
    )
    start: int = Field(default=0, ge=0, description="First captured step.", examples=[0])
    end: int = Field(default=0, ge=0, description="Last captured step, inclusive.", examples=[1])

    @model_validator(mode="after")
    def _in_order(self) -> StepsSection:
        if self.start > self.end:
            raise ValueError(
                f"start: {self.start} lies after end: {self.end}; accepted: start <= end"
            )
        if self.end >= self.total:
            raise ValueError(
                f"end: {self.end} lies outside the {self.total} steps run (total); "
                f"accepted: at most {self.total - 1}, as steps count from 0"
            )
        return self
