"""The container a device's runs happen in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlprobe.config.section import Section


class ContainerSection(Section):
    """How a run enters its image. Sites differ: many NPU sites have docker or pyxis only."""

    runtime: Literal["none", "apptainer", "docker", "pyxis"] = Field(
        default="none", description="none runs in the environment rlprobe itself runs in."
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        description="A SIF file (apptainer), an image reference, best with its @sha256 digest "
        "(docker, pyxis), or null with runtime none.",
        examples=["images/verl-cuda.sif", "docker.example.org/verl-ascend@sha256:0123abcd"],
    )
    args: tuple[str, ...] = Field(
        default=(),
        description="Further arguments for the runtime, one word each. Environment variables that "
        "change numbers belong in environment.",
        examples=[["--bind", "/data"]],
    )

    @model_validator(mode="after")
    def _image_fits_runtime(self) -> ContainerSection:
        if self.runtime == "none" and (self.image is not None or self.args):
            given = "image" if self.image is not None else "args"
            raise ValueError(
                f"{given} is given but runtime is none; accepted: runtime apptainer, docker or "
                "pyxis, or neither image nor args"
            )
        if self.runtime != "none" and self.image is None:
            raise ValueError(f"image: nothing found; runtime {self.runtime} needs one")
        return self
