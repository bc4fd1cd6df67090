"""An alignment: one comparison of a target against a benchmark, as one YAML file describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlprobe import stages
from rlprobe.config import secrets
from rlprobe.config.capture import CaptureSection
from rlprobe.config.device import (
    AnalysisSection,
    BenchmarkSection,
    ControlsSection,
    DeviceSection,
    TargetSection,
)
from rlprobe.config.entrypoint import EntryPointSection
from rlprobe.config.inputs import DataSection, ModelSection, StepsSection
from rlprobe.config.section import Section

#: msprobe refuses dump paths with any other character, so they are refused before anything runs.
SafePath = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]+$")]


class Alignment(Section):
    """One alignment. Relative paths resolve against the working directory."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the alignment; results go to RESULTS/NAME/.",
        examples=["qwen2-gpu-npu"],
    )
    framework: Literal["verl", "slime"] = Field(description="The training framework.")
    framework_version: str = Field(
        min_length=1,
        description="Version of the framework in the environment or image; benchmark and target "
        "may name their own.",
        examples=["0.9.1"],
    )
    model: ModelSection = Field(description="The models.")
    data: DataSection = Field(description="Prompts and reward.")
    seed: int = Field(default=1, ge=0, description="Seed of every generator.")
    steps: StepsSection = Field(
        default_factory=StepsSection, description="Length of the runs and the captured steps."
    )
    resume_from: str | None = Field(
        default=None,
        min_length=1,
        description="A checkpoint of the framework's own that both sides start from, with weights, "
        "optimizer, scheduler and generators (verl: a global_step_N directory); steps count from "
        "there. The framework loads its pickle files: name none that you would not run. null: the "
        "models as they are.",
        examples=["checkpoints/run7/global_step_300"],
    )
    deterministic: bool = Field(
        default=True, description="Deterministic kernels and fixed seeds on every role's device."
    )
    recompute_rewards: bool = Field(
        default=False,
        description="Replays compute rewards anew instead of taking the recorded ones.",
    )
    generation: Literal["replay", "compare"] = Field(
        default="replay",
        description="replay: no replay starts an inference engine. compare: every side's engine is "
        "led through the benchmark's prompts and responses (stage forced_generation: all of a "
        "sample in one prefill, then its first tokens decoded one by one), and what it computes "
        "is compared; training goes on with the recorded rollouts.",
    )
    routing: Literal["own", "replay"] = Field(
        default="own",
        description="Of models with experts. own: every run sends tokens to the experts that its "
        "routers choose. replay: all but the benchmark send them to those that the benchmark "
        "chose, so that what follows can be judged although a router decides otherwise; what it "
        "would have chosen is counted (engine light).",
    )
    overrides: tuple[str, ...] = Field(
        default=(),
        description="The framework's own options, on both sides (verl: Hydra overrides; slime: "
        "command-line flags).",
        examples=[["algorithm.adv_estimator=gae"]],
    )
    entry_point: EntryPointSection | None = Field(
        default=None,
        description="Where training starts (verl); null: python -m verl.trainer.main_ppo.",
    )
    ray: bool = Field(
        default=True,
        description="false: verl's trainer and workers run without Ray, in a process for each "
        "rank. The numbers are the same bit for bit, and a run starts in a fraction of the time; "
        "verl on a CPU and one node only.",
    )
    capture: CaptureSection = Field(default_factory=CaptureSection, description="What is recorded.")
    benchmark: BenchmarkSection = Field(
        default_factory=BenchmarkSection, description="The trusted device."
    )
    target: TargetSection = Field(
        default_factory=TargetSection, description="The device in question."
    )
    controls: ControlsSection = Field(default_factory=ControlsSection, description="Control runs.")
    analysis: AnalysisSection = Field(
        default_factory=AnalysisSection, description="Comparing, diagnosing and reporting."
    )
    store: SafePath = Field(
        default="store", description="Directory of the content-addressed store of runs."
    )
    results: SafePath = Field(
        default="results", description="Directory of tables, diagnoses and reports."
    )
    coverage: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of records that must have a partner on the other side, and of those of "
        "the judged step that must be judged; less is not comparable.",
    )
    refine: bool = Field(
        default=True,
        description="After a divergence, look at its suspects: the step is replayed once more on "
        "both devices with their tensors and operators kept.",
    )
    fail_on_divergence: bool = Field(
        default=False,
        description="The workflow fails when the target diverged (it always fails when nothing "
        "could be compared).",
    )

    def version(self, side: DeviceSection) -> str:
        """The framework's version on one side."""
        return side.framework_version or self.framework_version

    @model_validator(mode="after")
    def _no_secrets(self) -> Alignment:
        places = secrets.found(self.model_dump(mode="json"))
        if places:
            raise ValueError(secrets.sentence(places))
        return self

    @model_validator(mode="after")
    def _entry_point_of_verl(self) -> Alignment:
        if self.entry_point is not None and self.framework != "verl":
            raise ValueError(
                f"entry_point: {self.framework} is started by its own train.py; accepted: null"
            )
        return self

    @model_validator(mode="after")
    def _engine_is_recorded(self) -> Alignment:
        chosen = self.capture.stages
        named = chosen != "all" and stages.FORCED in chosen
        if self.generation == "compare" and not (named or chosen == "all"):
            raise ValueError(
                f"generation: compare records the stage {stages.FORCED}, which capture.stages "
                f"leaves out; accepted: all, or a list with {stages.FORCED} in it"
            )
        if self.generation == "replay" and named:
            raise ValueError(
                f"capture.stages: {stages.FORCED} runs with generation: compare only, found "
                "generation: replay"
            )
        if self.routing == "replay" and self.capture.engine != "light":
            raise ValueError(
                "routing: replay needs capture.engine: light, which records what routers choose; "
                f"found capture.engine: {self.capture.engine}"
            )
        if self.generation == "compare" and self.controls.rejoin:
            raise ValueError(
                "generation: compare with controls.rejoin: an engine has its weights before a "
                "step's state is loaded; accepted: one of the two"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Alignment:
        largest = max(self.benchmark.world_size, self.target.world_size)
        beyond = [rank for rank in self.capture.ranks if rank >= largest]
        if beyond:
            raise ValueError(
                f"capture.ranks: found {beyond[0]}, but no side has more than {largest} "
                f"processes (world_size); accepted: 0 to {largest - 1}"
            )
        return self
