"""Everything declared for one run, and the key that follows from it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from rlprobe import stages
from rlprobe.capture import session
from rlprobe.config import (
    CaptureSection,
    ContainerSection,
    DataSection,
    EntryPointSection,
    ModelSection,
    ResourcesSection,
    StepsSection,
)
from rlprobe.store import keys


@dataclass(frozen=True)
class Identities:
    """Digests of a run's inputs, known on the machine that schedules."""

    model: dict[str, str]
    data: dict[str, str | None]
    #: The image's or the lock's identity, None where neither is declared.
    environment: str | None = None
    #: The fault file's digest and the fault's name.
    fault: str | None = None
    #: Where training starts; None for the framework's own entry point.
    entry_point: dict[str, str | None] | None = None
    #: Digests of code that no version stands for, as far as this host can read it.
    code: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The checkpoint's step and identity, where runs begin from one.
    checkpoint: str | None = None
    #: Digest of the rollouts that the benchmark replays.
    rollouts: str | None = None


@dataclass(frozen=True)
class Suspects:
    """The part of a step to look at again."""

    stage: str
    #: Captured step, from 0.
    step: int
    rank: int
    #: Hugging Face paths.
    modules: tuple[str, ...]
    #: Micro-batches whose tensors are kept, from 0; empty: all.
    micro_steps: tuple[int, ...]
    #: The record where the sides part.
    record: str
    #: Samples that those micro-batches hold, for the reader.
    samples: tuple[str, ...] = ()
    #: MiB of tensors that each process may write.
    budget_mib: int = 1024
    #: Whose operators are traced: of the suspect ``module``, of the ``outputs`` made around the
    #: model (log-probs, losses), or of the ``update``; None: nobody's.
    trace: str | None = None
    #: Path of the module.
    trace_module: str | None = None
    #: Key of the benchmark's refining run whose outputs of that module are put in place of its own.
    substitute: str | None = None
    #: Modules that follow each other, whose outputs are kept; with ``substitute`` they are put in
    #: place of each, so that each shows what it makes of the benchmark's numbers.
    blocks: tuple[str, ...] = ()

    def declared(self) -> dict[str, Any]:
        """What of it can change a run's files: part of the run's key."""
        fields = dataclasses.asdict(self)
        for name in ("record", "samples"):
            fields.pop(name)
        if self.substitute is None:
            fields.pop("substitute")
        if not self.blocks:
            fields.pop("blocks")
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


@dataclass(frozen=True)
class RunSpec:
    """One run of one role, as declared. Paths are as the alignment gives them."""

    role: str
    framework: str
    framework_version: str
    model: ModelSection
    data: DataSection
    seed: int
    steps: StepsSection
    deterministic: bool
    recompute_rewards: bool
    #: The common overrides, then the device's: later ones win.
    overrides: tuple[str, ...]
    capture: CaptureSection
    device: str
    #: fp32, bf16, fp16, or fp64 (high_precision of an fp32 benchmark).
    precision: str
    world_size: int
    environment: dict[str, str]
    container: ContainerSection
    resources: ResourcesSection
    identities: Identities
    entry_point: EntryPointSection | None = None
    #: Whether the framework's processes are Ray's. The numbers are the same either way.
    ray: bool = True
    #: Canonical stages that the framework executes under these settings, in order.
    executed: tuple[str, ...] = ()
    #: ``FILE:NAME`` of a planted fault.
    fault: str | None = None
    #: 1, or less where the fault is weakened.
    fault_strength: float = 1.0
    #: First step that the fault is planted in.
    fault_step: int = 0
    #: Number of a perturbed control, from 1; 0 for every other run.
    perturbed: int = 0
    #: Key of the benchmark run whose rollouts are replayed; None for the benchmark itself.
    replay_of: str | None = None
    #: Directory of rollouts that a benchmark replays instead of generating.
    rollouts: str | None = None
    #: What a refining run keeps tensors of; None for every other run.
    suspects: Suspects | None = None
    #: ``replay``, or ``compare``: the engine is led through the recorded rollouts.
    generation: str = "replay"
    #: ``own``, or ``replay``: tokens are sent to the experts that the benchmark chose.
    routing: str = "own"
    #: The benchmark keeps its models' state at the start of captured steps; replays load it there.
    rejoin: bool = False
    #: The framework's own checkpoint that the run begins from.
    resume_from: str | None = None
    #: Key of a run that is taken from the store and never started here.
    imported: str | None = None

    def declared(self) -> dict[str, Any]:
        """What can change the numbers of this run, as the JSON that its key is the digest of.

        Left out: where things lie (paths are in it by their digests), what the job asks a scheduler
        for, how a container is started, and rlprobe's own version.
        """
        capture = self.capture.model_dump(mode="json")
        capture["stages"] = sorted(self.stages)
        del capture["budget_mib"]
        if not self.forces:
            del capture["forced_samples"], capture["forced_tokens"]
        if not capture["coordinate_sketch"]:
            del capture["coordinate_sketch"]
        declared: dict[str, Any] = {
            "role": self.role,
            "framework": self.framework,
            "framework_version": self.framework_version,
            "model": self.identities.model,
            "data": self.identities.data,
            "seed": self.seed,
            "steps": self.steps.model_dump(mode="json"),
            "deterministic": self.deterministic,
            "overrides": list(self.overrides),
            "capture": capture,
            "capture_format": session.FORMAT,
            "device": self.device,
            "precision": self.precision,
            "world_size": self.world_size,
            "environment": self.environment,
            "software": self.identities.environment,
            "fault": self.identities.fault,
            "replay_of": self.replay_of,
        }
        if self.identities.entry_point is not None:
            declared["entry_point"] = self.identities.entry_point
        if self.identities.code:
            declared["code"] = self.identities.code
        if self.fault_strength != 1.0:
            declared["fault_strength"] = self.fault_strength
        if self.fault_step:
            declared["fault_step"] = self.fault_step
        if self.perturbed:
            declared["perturbed"] = self.perturbed
        if self.suspects is not None:
            declared["suspects"] = self.suspects.declared()
        if self.forces:
            declared["generation"] = self.generation
        if self.replays_routing:
            declared["routing"] = self.routing
        if self.joined_steps:
            declared["rejoin"] = True
        if self.identities.checkpoint is not None:
            declared["resume_from"] = self.identities.checkpoint
        if self.identities.rollouts is not None:
            declared["rollouts"] = self.identities.rollouts
        if self.replays:
            declared["recompute_rewards"] = self.recompute_rewards
        return declared

    @property
    def replays_routing(self) -> bool:
        """Whether tokens are sent to the experts that the benchmark chose."""
        return self.routing == "replay" and self.replay_of is not None

    @property
    def joined_steps(self) -> tuple[int, ...]:
        """Captured steps whose beginning the benchmark keeps and its replays load."""
        if not self.rejoin:
            return ()
        # the first step of a run begins from what both sides load themselves
        return tuple(range(max(1, self.steps.start), self.steps.end + 1))

    @property
    def replays(self) -> bool:
        """Whether generation is replaced: by the benchmark's rollouts, or by saved ones."""
        return self.replay_of is not None or self.rollouts is not None

    @property
    def forces(self) -> bool:
        """Whether this run's engine is led through the recorded responses."""
        return stages.FORCED in self.stages

    @functools.cached_property
    def key(self) -> str:
        """The run key: 64 hexadecimal digits, the name of the run's directory in the store."""
        return self.imported or keys.run_key(self.declared())

    @functools.cached_property
    def stages(self) -> tuple[str, ...]:
        """Canonical stages that this run executes itself and captures, in order."""
        return self.capture.chosen(self.executed)
