"""Where training starts, where it is not the framework's own entry point."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlprobe.config.section import Section


class EntryPointSection(Section):
    """The script or module that trains, and its Hydra configuration (verl)."""

    module: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
        description="Module that is run instead of verl.trainer.main_ppo, as a recipe's.",
        examples=["recipe.dapo.main_dapo"],
    )
    script: str | None = Field(
        default=None,
        pattern=r"\.py$",
        description="Or a file; its content is part of the identity.",
        examples=["train/main.py"],
    )
    config_name: str | None = Field(
        default=None,
        min_length=1,
        description="Hydra's --config-name; null: the one that the entry point names itself.",
        examples=["dapo_trainer"],
    )
    config_path: str | None = Field(
        default=None,
        min_length=1,
        description="Hydra's --config-path, a directory; its YAML files are part of the identity.",
        examples=["train/config"],
    )

    @model_validator(mode="after")
    def _one(self) -> EntryPointSection:
        if self.module is not None and self.script is not None:
            raise ValueError("found module and script; accepted: one of them")
        if self == EntryPointSection.model_construct():
            raise ValueError(
                "found an empty section; accepted: module or script, config_name, config_path, or "
                "no entry_point at all"
            )
        return self
