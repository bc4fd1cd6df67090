"""slime's command line and environment for one run. Imports nothing of slime.

slime has no index package and its ``train.py`` is no module: ``RLPROBE_SLIME`` in the side's
``environment`` names the checkout (by default the one the importable ``slime`` lies in), and
:mod:`rlprobe.frameworks.slime.start` runs its ``train.py`` unmodified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlprobe import stages
from rlprobe.capture import code
from rlprobe.errors import ConfigError
from rlprobe.frameworks import RunDirectories, not_recorded, on_loopback
from rlprobe.frameworks.adopted import Adopted, Training
from rlprobe.frameworks.layout import Layout
from rlprobe.frameworks.slime import adopt, manager_paths, plan, precision, versions
from rlprobe.frameworks.slime import flags as command
from rlprobe.frameworks.slime.flags import Flags

if TYPE_CHECKING:
    from rlprobe.said import Said
    from rlprobe.spec import RunSpec

#: How the engine's layers are to be had.
_SERVERS = "its servers do (RLPROBE_INFERENCE_CONFIG, docs/slime.md)"
#: Flags that a run sets itself; giving them in overrides would contradict the alignment.
RESERVED: dict[str, str] = {
    "num-rollout": "steps.total",
    "num-epoch": "steps.total",
    "hf-checkpoint": "model.path",
    "prompt-data": "data.train_files",
    "actor-num-nodes": "resources.nodes",
    "actor-num-gpus-per-node": "world_size",
    "save-debug-rollout-data": "the run's own recording",
    "dump-details": "the run's own recording",
    "debug-rollout-only": "nothing: such a run trains nothing",
}


@dataclasses.dataclass(frozen=True)
class SlimeFramework:
    """What the host side of a run asks of slime."""

    name: str = "slime"
    builtin_version: int = 1
    builtins: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)

    def check(self, spec: RunSpec) -> None:
        """Refuse what slime's hooks do not do.

        Raises:
            ConfigError: its engine is to be led through recorded responses, it is to do without
                Ray, or to be joined to the benchmark's state with an old copy of the policy.
        """
        if spec.generation == "compare":
            raise ConfigError(
                "generation: compare: slime's SGLang servers cannot be led through recorded "
                "responses; accepted with slime: replay"
            )
        if spec.rollouts is not None:
            raise ConfigError(
                "benchmark.rollouts: slime replays its own with --load-debug-rollout-data in "
                "benchmark.overrides; accepted with slime: null"
            )
        if spec.rejoin and "keep-old-actor" in _given(spec):
            raise ConfigError(
                f"controls.rejoin: {spec.role}: --keep-old-actor computes log-probs with weights "
                "of steps before, which no state at the start of a step holds; leave it out, or "
                "controls.rejoin: false"
            )
        if not spec.ray:
            raise ConfigError("ray: slime's processes are Ray's; accepted with slime: true")

    def checkpoint_step(self, path: str) -> int:
        """slime's own checkpoints are given by its flags.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"resume_from: {path}: accepted with verl only; slime begins from a checkpoint of its "
            "own with --load (and --ckpt-step) in overrides, on both sides"
        )

    def expected_stages(self, spec: RunSpec) -> tuple[str, ...]:
        """Stages that slime runs under the spec's flags and whose layers are captured.

        Generation runs in SGLang's servers, which dump by themselves (see ``docs/slime.md``).

        Raises:
            ConfigError: a stage is asked for by name that this slime does not run, or slime's own
                replay of routing beside that of the benchmark's choices.
        """
        flags = _given(spec)
        plan.require_one_replay(flags, spec.routing)
        found = plan.stages_of(flags, spec.framework_version)
        wanted = spec.capture.stages
        if wanted != "all" and stages.LOG_PROB in wanted and stages.LOG_PROB not in found:
            reason = plan.why_no_old_log_prob(flags, spec.framework_version)
            raise ConfigError(f"capture.stages: old_log_prob does not run: {reason}")
        return tuple(stage for stage in found if stage != stages.GENERATE)

    def inference_not_recorded(self, spec: RunSpec) -> str | None:
        """SGLang's servers dump by themselves.

        Raises:
            ConfigError: ``token_range`` is given.
        """
        return not_recorded(spec, "SGLang", _SERVERS) if spec.role == "benchmark" else None

    def layout(self, spec: RunSpec) -> Layout:
        """Megatron's groups as slime's flags declare them."""
        flags = _given(spec)

        def size(name: str) -> int:
            return int(command.number(flags, name, 1))

        pipeline = size("pipeline-model-parallel-size")
        chunks = size("num-virtual-stages-per-pipeline-rank")
        layers, in_chunk = size("num-layers"), "num-layers-per-virtual-pipeline-stage"
        if in_chunk in flags:
            chunks = max(1, layers // (pipeline * size(in_chunk)))
        return Layout(
            "megatron",
            spec.world_size,
            tensor=size("tensor-model-parallel-size"),
            pipeline=pipeline,
            chunks=chunks,
            context=size("context-parallel-size"),
            expert=size("expert-model-parallel-size"),
            sequence_parallel="sequence-parallel" in flags,
        )

    def installed(self, environment: Mapping[str, str]) -> str | None:
        """What the checkout's ``setup.py`` says."""
        named = environment.get(versions.CHECKOUT)
        root = Path(named).expanduser() if named else versions.checkout()
        return (
            None if root is None or not root.is_dir() else code.version_of(root) or versions.UNSAID
        )

    def same_version(self, declared: str, found: str) -> bool:
        """See :func:`.versions.same`."""
        return versions.same(declared, found)

    def known_differences(self, one: str, other: str) -> list[Said]:
        """See :func:`.versions.known_differences`."""
        return versions.known_differences(one, other)

    def adopt(self, training: Training) -> Adopted:
        """A slime command line as an alignment (see :mod:`.adopt`)."""
        return adopt.adopt(training)

    def options(self, words: Sequence[str]) -> dict[str, str]:
        """Flags by name; several values of one in one text. A word may hold a flag and its values,
        as overrides do."""
        parts = [part for word in words for part in command.split(word)]
        given = command.parse(part for part in parts if part)
        return {f"--{name}": " ".join(values) for name, values in given.items()}

    def prepare(self, spec: RunSpec, directories: RunDirectories) -> list[list[str]]:
        """Nothing: models and data are the user's."""
        return []

    def command(self, spec: RunSpec, directories: RunDirectories) -> list[str]:
        """slime's ``train.py`` with every flag this run needs, the run's own last."""
        given = _given(spec)
        taken = [name for name in given if name in RESERVED]
        if taken:
            raise ConfigError(
                f"overrides: --{taken[0]} is set by the alignment ({RESERVED[taken[0]]}); "
                "leave it out"
            )
        flags = {**_base(spec), **given, **_enforced(spec, directories, given)}
        return ["python", "-m", "rlprobe.frameworks.slime.start", *command.render(flags)]

    def environment(self, spec: RunSpec, directories: RunDirectories) -> dict[str, str]:
        """Hooks and offline mode in every process of slime's."""
        env = {
            "RAY_ADDRESS": "local",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "WANDB_MODE": "offline",
            # Megatron's sequence and tensor parallelism need the order of one stream
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        if spec.precision == "fp32":
            env[precision.ENV] = "fp32"
        if spec.device == "cpu":
            env |= {"OMP_NUM_THREADS": "1", **on_loopback(spec)}
        return env


FRAMEWORK = SlimeFramework()


def _given(spec: RunSpec) -> Flags:
    return command.parse(command.words(spec.overrides))


def _base(spec: RunSpec) -> Flags:
    """What an alignment wants of slime unless the user says otherwise."""
    return {"seed": (str(spec.seed),), "rollout-seed": (str(spec.seed),)}


def _enforced(spec: RunSpec, directories: RunDirectories, given: Flags) -> Flags:
    """What a run cannot do without."""
    nodes = spec.resources.nodes
    if spec.world_size % nodes:
        raise ConfigError(
            f"world_size {spec.world_size} cannot be spread evenly over {nodes} nodes"
        )
    if spec.precision == "fp64":
        raise ConfigError(
            "precision: fp64 is not to be had of Megatron; give the benchmark bf16, so that its "
            "high-precision control is fp32"
        )
    # a checkpoint of iteration N would make slime begin at N + 1, and train nothing
    start = int(command.number(given, "start-rollout-id", 0))
    per_node = spec.world_size // nodes
    flags: Flags = {
        "hf-checkpoint": (_path(spec.model.path),),
        "prompt-data": tuple(_path(file) for file in spec.data.train_files),
        "start-rollout-id": (str(start),),
        "num-rollout": (str(start + spec.steps.total),),
        "actor-num-nodes": (str(nodes),),
        "actor-num-gpus-per-node": (str(per_node),),
    }
    if len(spec.data.train_files) != 1:
        raise ConfigError(
            f"data.train_files: found {len(spec.data.train_files)} files; slime takes one"
        )
    if spec.model.reference_path is not None:
        flags["ref-load"] = (_path(spec.model.reference_path),)
    if spec.model.critic_path is not None:
        flags["critic-load"] = (_path(spec.model.critic_path),)
    if spec.precision == "fp16":
        flags["fp16"] = ()
    kind = "save" if spec.replay_of is None else "load"
    directory = manager_paths.RECORDED if kind == "save" else manager_paths.REPLAYED
    flags[f"{kind}-debug-rollout-data"] = (manager_paths.template(directories.side, directory),)
    if spec.capture.key_data and versions.gathers_train_data(spec.framework_version):
        flags["save-debug-train-data"] = (
            str(directories.side / "train_data" / "{rollout_id}_{rank}.pt"),
        )
    return flags


def _path(value: str) -> str:
    if value.startswith("builtin:"):
        raise ConfigError(
            f"model.path, data.train_files: found {value!r}; slime has no builtin models or data"
        )
    return str(Path(value).expanduser().absolute())
