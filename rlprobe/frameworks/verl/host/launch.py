"""verl's command line and environment for one run. Imports nothing of verl."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rlprobe import stages
from rlprobe.errors import ConfigError
from rlprobe.frameworks import RunDirectories, not_recorded, on_loopback
from rlprobe.frameworks.adopted import Adopted, Training
from rlprobe.frameworks.layout import Layout
from rlprobe.frameworks.verl.engine import engines, inference
from rlprobe.frameworks.verl.host import (
    adopt,
    assets,
    checkpoint,
    entrypoint,
    forced,
    keys,
    megatron,
    plan,
    settings,
    vllm,
    withoutray,
)

if TYPE_CHECKING:
    from rlprobe.said import Said
    from rlprobe.spec import RunSpec

_HOOKS = "rlprobe.frameworks.verl"
#: How another engine's layers are to be had.
_COLLECTOR = (
    "the collector does (actor_infer_dump with token_range_start and token_range_end on a plain "
    "verl command line, docs/collector.md)"
)
#: What FSDP needs on a CPU.
_FSDP_ON_CPU = (
    "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile=false",
    "critic.model.use_remove_padding=false",
    "critic.strategy=fsdp2",
    "critic.fsdp.use_torch_compile=false",
)
#: Engines in processes of their own whose layers can be dumped.
_OTHERS = (engines.VLLM, engines.SGLANG)
_FSDP = ("fsdp", "fsdp2")
#: Back ends whose states are kept and loaded.
_KEPT = (*_FSDP, "megatron")
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclasses.dataclass(frozen=True)
class VerlFramework:
    """What the host side of a run asks of verl."""

    name: str = "verl"
    builtin_version: int = assets.VERSION
    builtins: Mapping[str, Collection[str]] = dataclasses.field(
        default_factory=lambda: assets.NAMES
    )

    def check(self, spec: RunSpec) -> None:
        """Refuse keys that verl lacks, what only Ray can give where there is none, back ends whose
        state is not kept, and checkpoints that verl would stop at.

        Raises:
            ConfigError: names the key.
        """
        if spec.entry_point is None:  # one's own has a configuration of its own
            keys.require(spec.overrides, spec.framework_version)
        if spec.generation == "compare":
            forced.check(plan.from_overrides([*_base(spec), *_given(spec)]), spec.capture)
        if not spec.ray:
            withoutray.require(spec, plan.from_overrides([*_base(spec), *_given(spec)]))
        backend = self.layout(spec).backend
        if spec.rejoin and backend not in _KEPT:
            raise ConfigError(
                f"controls.rejoin: {spec.role} trains with {backend}, of which the optimizer's "
                f"state is not kept; accepted: {', '.join(_KEPT)}"
            )
        if spec.resume_from is not None and spec.identities.checkpoint is not None:
            config = plan.from_overrides([*_base(spec), *spec.overrides])
            critic = stages.VALUES in plan.stages_of(config)
            ranks = spec.world_size if backend in _FSDP else None
            checkpoint.check(spec.resume_from, ranks, critic, spec.role)

    def checkpoint_step(self, path: str) -> int:
        """The step that a ``global_step_N`` directory was made after.

        Raises:
            ConfigError: the directory is called otherwise.
        """
        return checkpoint.step(path)

    def expected_stages(self, spec: RunSpec) -> tuple[str, ...]:
        """Stages that verl runs under the spec's overrides; a replay generates nothing.

        Raises:
            ConfigError: verl would refuse the run once its job has waited for its devices.
        """
        if megatron.chosen(_given(spec)):
            megatron.require_precision(spec)
        config = plan.from_overrides([*_base(spec), *_given(spec)])
        megatron.require_one_replay(spec, config)
        found = set(plan.stages_of(config))
        if spec.replays or not _records_layers(spec):
            found.discard(stages.GENERATE)
        if spec.generation == "compare" and forced.computes(_engine_name(spec), spec.precision):
            found.add(stages.FORCED)
        return tuple(sorted(found, key=stages.order))

    def inference_not_recorded(self, spec: RunSpec) -> str | None:
        """The CPU's own engine is always recorded, vLLM and SGLang where ``token_range`` is given,
        or vLLM where it is led through the recorded responses.

        Their captured steps are slower, and need settings that the user has to agree to.

        Raises:
            ConfigError: ``token_range`` is given for an engine that cannot be recorded, or not
                with these settings.
        """
        engine = _engine_name(spec)
        if spec.generation == "compare" and engine != engines.CPU:
            config = plan.from_overrides([*_base(spec), *_given(spec)])
            inference.require_settings(config, "generation: compare", "set generation to replay")
            return None
        if spec.replays or engine == engines.CPU:
            return None
        if _records_layers(spec):
            config = plan.from_overrides([*_base(spec), *_given(spec)])
            inference.require_settings(
                config, "capture.token_range", "set capture.token_range to null"
            )
            return None
        if engine in _OTHERS:
            return not_recorded(spec, engine, "give capture.token_range to record them")
        return not_recorded(spec, engine or "verl's default engine", _COLLECTOR)

    def layout(self, spec: RunSpec) -> Layout:
        """How the run spreads its actor: FSDP over all ranks, or Megatron's groups."""
        config = plan.from_overrides([*_base(spec), *_given(spec)])
        actor = config["actor_rollout_ref"].get("actor") or {}
        if megatron.chosen(_given(spec)):
            return megatron.layout(actor, spec.world_size)
        sequences = actor.get("ulysses_sequence_parallel_size") or 1
        return Layout(str(actor.get("strategy", "fsdp")), spec.world_size, context=int(sequences))

    def command(self, spec: RunSpec, directories: RunDirectories) -> list[str]:
        """``python -m verl.trainer.main_ppo``, the same without Ray, or the user's own entry point,
        with every override this run needs.

        Later overrides win: verl's defaults for an alignment, the user's, and last what a run
        cannot do without (paths, steps, and in a replay the absence of an engine).
        """
        own = {key_of(override) for override in entrypoint.overrides(spec)}
        version = spec.framework_version
        base = [override for override in _base(spec) if key_of(override) not in own]
        ours = [
            *settings.of_version(base, version),
            *spec.overrides,
            *settings.of_version(_enforced(spec, directories), version),
        ]
        if spec.entry_point is not None:
            # its configuration may have what verl's lacks, where Hydra takes no "+key"
            ours = [f"+{o}" if o.startswith("+") and not o.startswith("++") else o for o in ours]
        # Hydra refuses a repeated "+key", so a key set twice keeps its last value only
        merged: dict[str, str] = {}
        for override in ours:
            merged.pop(key_of(override), None)
            merged[key_of(override)] = override
        start = entrypoint.words(spec) if spec.ray else ["python", "-m", withoutray.MODULE]
        return [*start, *merged.values()]

    def environment(self, spec: RunSpec, directories: RunDirectories) -> dict[str, str]:
        """Hooks on in every verl process; offline; Ray apart from any other on the machine."""
        modules = [_HOOKS]
        env = {
            "RAY_ADDRESS": "local",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_DEDUP_LOGS": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Ray lowers its workers' priority, but a run is what its node is there for
            "RAY_worker_niceness": "0",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "WANDB_MODE": "offline",
            "HYDRA_FULL_ERROR": "1",
        }
        if spec.device == "cpu":
            modules.append(f"{_HOOKS}.cpu")
            if megatron.chosen(_given(spec)):
                modules.append(f"{_HOOKS}.cpu.megatron")
                env |= megatron.CPU_ENVIRONMENT
            if _starts_engine(spec) and vllm.chosen(_given(spec)):
                modules.append(f"{_HOOKS}.cpu.vllm")
                env |= vllm.CPU_ENVIRONMENT
            env |= {"VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1", **on_loopback(spec)}
        env["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
        return env

    def installed(self, environment: Mapping[str, str]) -> str | None:
        """Of the distribution."""
        try:
            return metadata.version("verl")
        except metadata.PackageNotFoundError:
            return None

    def same_version(self, declared: str, found: str) -> bool:
        """A local suffix (``+cpu``) does not matter, nor does a tag's ``v``."""
        return declared.removeprefix("v") in (found, found.partition("+")[0])

    def known_differences(self, one: str, other: str) -> list[Said]:
        """None is known by name; `config check` says that versions differ."""
        return []

    def adopt(self, training: Training) -> Adopted:
        """A verl command line as an alignment (see :mod:`.adopt`)."""
        return adopt.adopt(training)

    def options(self, words: Sequence[str]) -> dict[str, str]:
        """Hydra overrides by key."""
        found = {}
        for word in words:
            key, equals, value = word.partition("=")
            if equals and not word.startswith("-"):
                found[key.lstrip("+~")] = value
        return found

    def prepare(self, spec: RunSpec, directories: RunDirectories) -> list[list[str]]:
        """Commands to run before training, in the same image: builtin models and data."""
        wanted = [*spec.model.paths().values(), *spec.data.train_files]
        wanted += list(spec.data.val_files or ())
        names = [
            path
            for path in wanted
            if path.startswith(assets.BUILTIN)
            and not assets.path_of(path, directories.assets).exists()
        ]
        if not names:
            return []
        return [
            ["python", "-m", "rlprobe.frameworks.verl.host.assets", str(directories.assets), *names]
        ]


FRAMEWORK = VerlFramework()


def key_of(override: str) -> str:
    """The key that a Hydra override is about."""
    return override.partition("=")[0].lstrip("+~")


def _records_layers(spec: RunSpec) -> bool:
    """Whether what generates is recorded: another engine than the CPU's only if asked for."""
    if spec.capture.token_range is None:
        return False
    engine = _engine_name(spec)
    return engine == engines.CPU or (
        engine in _OTHERS and "token_range" in spec.capture.model_fields_set
    )


def _given(spec: RunSpec) -> list[str]:
    """What the user sets: the entry point's own configuration, then the overrides."""
    return [*entrypoint.overrides(spec), *spec.overrides]


def _path(value: str, directories: RunDirectories) -> str:
    if value.startswith(assets.BUILTIN):
        return str(assets.path_of(value, directories.assets))
    return str(Path(value).expanduser().absolute())


def _files(values: tuple[str, ...], directories: RunDirectories) -> str:
    return "[" + ",".join(_path(value, directories) for value in values) + "]"


def _starts_engine(spec: RunSpec) -> bool:
    """Whether the run has an inference engine: to generate, or to be led through rollouts."""
    return not spec.replays or spec.generation == "compare"


def _engine_name(spec: RunSpec) -> str:
    config = plan.from_overrides([*_base(spec), *_given(spec)])
    return str(config["actor_rollout_ref"]["rollout"].get("name", ""))


def _base(spec: RunSpec) -> list[str]:
    """What an alignment wants of verl unless the user says otherwise."""
    overrides = [
        # the older trainer keeps the order of rows; the newer permutes them between runs
        "trainer.use_v1=false",
        "trainer.logger=[console]",
        "trainer.total_epochs=1000000",
        "trainer.project_name=rlprobe",
        "trainer.experiment_name=alignment",
        "data.dataloader_num_workers=0",
        f"data.seed={spec.seed}",
        f"actor_rollout_ref.rollout.seed={spec.seed}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        f"actor_rollout_ref.rollout.full_determinism={str(spec.deterministic).lower()}",
    ]
    if spec.resources.nodes == 1:
        # nobody else's business: no other node joins, and a browser on the node shows nothing
        overrides += [
            "+ray_kwargs.ray_init._node_ip_address=127.0.0.1",
            "+ray_kwargs.ray_init.include_dashboard=false",
        ]
    if spec.device == "cpu":
        overrides += _cpu(spec)
    return overrides


def _cpu(spec: RunSpec) -> list[str]:
    """What verl needs to train on a CPU (see ``cpu.py``)."""
    # several nodes have a Ray already, which refuses to be described again
    own_ray = [
        "+ray_kwargs.ray_init.num_cpus=12",
        f"+ray_kwargs.ray_init.num_gpus={spec.world_size}",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
    ]
    return [
        "trainer.device=cpu",
        *(own_ray if spec.resources.nodes == 1 else ()),
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "actor_rollout_ref.ref.use_torch_compile=false",
        f"actor_rollout_ref.rollout.name={engines.CPU}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "critic.model.enable_gradient_checkpointing=false",
        "+critic.model.override_config.attn_implementation=eager",
        "reward.num_workers=1",
        f"reward.reward_model.rollout.name={engines.CPU}",
        *(megatron.CPU_OVERRIDES if megatron.chosen(_given(spec)) else _FSDP_ON_CPU),
        *(vllm.CPU_OVERRIDES if _starts_engine(spec) and vllm.chosen(_given(spec)) else ()),
    ]


def _enforced(spec: RunSpec, directories: RunDirectories) -> list[str]:
    """What a run cannot do without."""
    nodes = spec.resources.nodes
    if spec.world_size % nodes:
        raise ConfigError(
            f"world_size {spec.world_size} cannot be spread evenly over {nodes} nodes"
        )
    overrides = [
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={spec.world_size // nodes}",
        f"trainer.total_training_steps={_begin(spec) + spec.steps.total}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *_resume(spec),
        f"trainer.default_local_dir={directories.scratch}/checkpoints",
        f"hydra.run.dir={directories.side}/hydra",
        f"actor_rollout_ref.model.path={_path(spec.model.path, directories)}",
        f"data.train_files={_files(spec.data.train_files, directories)}",
        f"data.val_files={_files(spec.data.val_files or spec.data.train_files, directories)}",
        *_precision(spec),
    ]
    if spec.model.critic_path is not None:
        overrides.append(f"critic.model.path={_path(spec.model.critic_path, directories)}")
    if spec.model.reference_path is not None:
        overrides.append(
            f"+actor_rollout_ref.ref.model.path={_path(spec.model.reference_path, directories)}"
        )
    overrides += _reward(spec, directories)
    if spec.replays:
        if not spec.forces:
            overrides.append(f"actor_rollout_ref.rollout.name={engines.REPLAY}")
        overrides.append(f"reward.reward_model.rollout.name={engines.REPLAY}")
        if not spec.recompute_rewards:
            # rewards come with the rollouts; each worker that computes none costs a start-up
            overrides.append("reward.num_workers=0")
    return overrides


def _begin(spec: RunSpec) -> int:
    """Steps that were made before the run, by whatever made its checkpoint."""
    return 0 if spec.resume_from is None else checkpoint.step(spec.resume_from)


def _resume(spec: RunSpec) -> list[str]:
    if spec.resume_from is None:
        return ["trainer.resume_mode=disable"]
    path = Path(spec.resume_from).expanduser().absolute()
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]


def _reward(spec: RunSpec, directories: RunDirectories) -> list[str]:
    if spec.data.reward_function is not None:
        file, _, name = spec.data.reward_function.rpartition(":")
        path = _path(file, directories)
    elif spec.data.train_files[0].startswith(assets.BUILTIN):
        path, name = str(Path(assets.__file__).with_name("builtin_reward.py")), "compute_score"
    else:
        return []
    return [
        f"reward.custom_reward_function.path={path}",
        f"reward.custom_reward_function.name={name}",
    ]


def _precision(spec: RunSpec) -> list[str]:
    """Compute precision of every model; parameters are kept and updated in fp32 (fp64 in fp64)."""
    rollout = [f"actor_rollout_ref.rollout.dtype={_DTYPES[spec.precision]}"]
    if megatron.chosen(_given(spec)):
        return [
            *rollout,
            *(f"{section}.megatron.dtype={_DTYPES[spec.precision]}" for section in megatron.MODELS),
        ]
    wide = "fp64" if spec.precision == "fp64" else "fp32"
    mixed = f"{{param_dtype:{spec.precision},reduce_dtype:{wide},buffer_dtype:{wide}}}"
    sections = (
        "actor_rollout_ref.actor.fsdp_config",
        "actor_rollout_ref.ref.fsdp_config",
        "critic.fsdp",
    )
    return [
        *rollout,
        *(f"{section}.model_dtype={wide}" for section in sections),
        *(f"+{section}.mixed_precision={mixed}" for section in sections),
    ]
