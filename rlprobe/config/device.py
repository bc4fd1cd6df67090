"""The two devices under comparison: benchmark and target."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from rlprobe.config.container import ContainerSection
from rlprobe.config.resources import ResourcesSection
from rlprobe.config.section import Section

RunKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
#: Fewer runs say too little about a spread.
LEAST_PERTURBED = 2
#: How many perturbed controls to run, or the keys of imported ones.
Perturbed = Annotated[int, Field(ge=0, le=16)] | tuple[RunKey, ...]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _number_as_text(value: object) -> object:
    """Whole numbers may be written bare; truth values and fractions have several spellings."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


EnvironmentValue = Annotated[
    str, BeforeValidator(_number_as_text, json_schema_input_type=str | int)
]


class DeviceSection(Section):
    """Where and how the runs of one side happen."""

    device: Literal["cpu", "cuda", "npu"] = Field(
        default="cpu", description="Kind of device the models train on."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Compute precision of every model."
    )
    framework_version: str | None = Field(
        default=None,
        min_length=1,
        description="Version of the framework on this side, where the sides have different ones; "
        "null: the common framework_version.",
        examples=["0.8.0"],
    )
    world_size: int = Field(default=1, ge=1, description="Training processes (devices) in all.")
    environment: dict[EnvironmentName, EnvironmentValue] = Field(
        default_factory=dict,
        description="Environment variables of every process.",
        examples=[{"ATEN_CPU_CAPABILITY": "default"}],
    )
    container: ContainerSection = Field(
        default_factory=ContainerSection, description="The image the runs happen in."
    )
    lock: str | None = Field(
        default=None,
        min_length=1,
        description="Without an image: the pinned requirements that the environment was installed "
        "from, of which the content counts.",
        examples=["requirements/lock.txt"],
    )
    overrides: tuple[str, ...] = Field(
        default=(),
        description="The framework's own options for this side only, after the common ones.",
        examples=[["actor_rollout_ref.actor.strategy=fsdp2"]],
    )
    resources: ResourcesSection = Field(
        default_factory=ResourcesSection, description="What a job asks the scheduler for."
    )


class BenchmarkSection(DeviceSection):
    """The trusted side: it generates the rollouts that every other run replays."""

    run: RunKey | None = Field(
        default=None,
        description="Key of a benchmark run that is in the store already, as one imported from "
        "another site. Nothing is run on the benchmark's device then.",
        examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"],
    )
    rollouts: str | None = Field(
        default=None,
        min_length=1,
        description="Rollouts that are there already and that the benchmark replays instead of "
        "generating (verl): a directory that verl's skip.rollout saved, of step{N}.h5 files, or a "
        "dump_path with key data, of the same prompts in the same order.",
        examples=["rollouts/experiment_name/gbs4_n2"],
    )

    @model_validator(mode="after")
    def _one_source(self) -> BenchmarkSection:
        if self.run is not None and self.rollouts is not None:
            raise ValueError(
                "run and rollouts: an imported run has its own rollouts; accepted: one of the two"
            )
        return self


class TargetSection(DeviceSection):
    """The side in question."""

    fault: str | None = Field(
        default=None,
        pattern=r"^[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*$",
        description="FILE.py:NAME of a fault to plant, to see the alignment find it.",
        examples=["config/examples/faults/rms_norm.py:rms_eps"],
    )


class ControlsSection(Section):
    """Further runs that say how far a difference is noise."""

    repeat: bool | RunKey = Field(
        default=True,
        description="The benchmark's device replays its own rollouts: is it equal to itself? "
        "With an imported benchmark: the key of an imported repeat, else there is none.",
    )
    repeat_target: bool = Field(
        default=False,
        description="The target runs a second time: is it equal to itself?",
    )
    high_precision: bool | RunKey = Field(
        default=False,
        description="The benchmark's device replays in fp32 (fp64 when it is fp32 already): the "
        "target is then judged by its error against this run relative to the benchmark's. With "
        "an imported benchmark: the key of an imported run, else there is none.",
    )
    perturbed: Perturbed = Field(
        default=0,
        description="Further replays of the benchmark's device, metrics alone, whose initial "
        "weights are disturbed in the last bit: the trainer's curves are judged against what they "
        "part by. A number (2 at least), or with an imported benchmark the keys of imported runs.",
        examples=[3],
    )
    rejoin: bool = Field(
        default=False,
        description="Each captured step is judged on its own ground: the benchmark keeps weights "
        "and optimizer state at the start of every captured step but the run's first, and every "
        "replay loads them there. Costs the store what `rlprobe estimate` says; curves over steps "
        "are then not judged. verl (FSDP, Megatron) and slime.",
    )

    @model_validator(mode="after")
    def _a_spread(self) -> ControlsSection:
        given = self.perturbed
        count = len(given) if isinstance(given, tuple) else given
        if given and count < LEAST_PERTURBED:
            raise ValueError(
                f"perturbed: found {count}; accepted: 0, or {LEAST_PERTURBED} runs at least, as "
                "one says too little about a spread"
            )
        if isinstance(given, tuple) and len(set(given)) < count:
            raise ValueError("perturbed: a key is given twice")
        if given and self.rejoin:
            raise ValueError(
                "rejoin: a run that begins each step from the benchmark's state has no curves for "
                "perturbed controls to judge; accepted: one of the two, each in an alignment of "
                "its own"
            )
        return self


class AnalysisSection(Section):
    """The jobs that compare, diagnose and report."""

    image: str | None = Field(
        default=None,
        min_length=1,
        description="Image of those jobs; null: the environment that Snakemake runs in.",
        examples=["images/compare.sif"],
    )
    runtime: Literal["apptainer", "docker", "pyxis"] = Field(
        default="apptainer",
        description="How they enter it: apptainer is Snakemake's own way (--sdm apptainer), docker "
        "and pyxis are rlprobe's.",
    )
    torch_image: str | None = Field(
        default=None,
        min_length=1,
        description="Image of the job that writes msprobe's own table, which needs torch.",
        examples=["images/verl-cpu.sif"],
    )
    official_table: bool | Literal["all"] = Field(
        default=True,
        description="msprobe's own tables beside ours, a job a stage (CSV and XLSX) and one for "
        "key data: true for the first captured step, all for every one.",
    )
    official_graph: bool = Field(
        default=False,
        description="msprobe's own graph view (.vis.db, for its TensorBoard plug-in) beside each "
        "of these tables; some KiB for each call.",
    )
    resources: ResourcesSection = Field(
        default_factory=ResourcesSection, description="What such a job asks the scheduler for."
    )
