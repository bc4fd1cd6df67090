"""Which runs an alignment needs and which of them are compared."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from rlprobe import frameworks, roles
from rlprobe.config import Alignment, DeviceSection
from rlprobe.config.capture import CaptureSection
from rlprobe.errors import ConfigError
from rlprobe.roles import BENCHMARK, HIGH_PRECISION, PAIRS, REPEAT, REPEAT_TARGET, TARGET
from rlprobe.runs import code, identity
from rlprobe.spec import Identities, RunSpec

#: Options of verl's and slime's that say how samples and models are divided.
_OF_LAYOUT = re.compile(
    r"parallel|micro_batch|micro-batch|batch_size|batch-size|strategy|model_engine|megatron|fsdp|"
    r"remove_padding|dynamic_bsz|dynamic-batch|token_len|tokens-per-gpu|balance|num-gpus|num-nodes|"
    r"num_gpus|n_gpus|nnodes|qkv-format",
    re.IGNORECASE,
)
#: Environment variable that plants a fault in the target, before the file's: ``FILE:NAME``.
FAULT_ENV = "RLPROBE_FAULT"


def plan(
    alignment: Alignment, environ: Mapping[str, str] = os.environ, *, located: bool = True
) -> dict[str, RunSpec]:
    """The runs of an alignment by role: benchmark, target and the enabled controls.

    Args:
        alignment: the validated file.
        environ: where RLPROBE_FAULT and RLPROBE_NODE_TMP are looked up.
        located: False where models, data and images need not be on this machine; keys then mean
            nothing.

    Raises:
        ConfigError: a model, data, lock, image or fault file does not exist, or the framework
            would refuse a run once its job has its devices.
    """
    fault = environ.get(FAULT_ENV) or alignment.target.fault
    if located:
        identity.require(alignment, fault, environ)
    models = identity.model(alignment.model, alignment.framework) if located else {}
    data = identity.data(alignment.data, alignment.framework) if located else {}
    checkpoint = (
        identity.checkpoint(alignment.resume_from, alignment.framework)
        if located and alignment.resume_from is not None
        else None
    )
    start = identity.entry_point(alignment.entry_point) if located else None
    capture = captured(alignment)

    def spec(
        role: str,
        side: DeviceSection,
        where: str,
        *,
        precision: str | None = None,
        fault: str | None = None,
        replay_of: str | None = None,
        imported: str | None = None,
        perturbed: int = 0,
        rollouts: str | None = None,
    ) -> RunSpec:
        declared = RunSpec(
            role=role,
            framework=alignment.framework,
            framework_version=alignment.version(side),
            model=alignment.model,
            data=alignment.data,
            seed=alignment.seed,
            steps=alignment.steps,
            deterministic=alignment.deterministic,
            recompute_rewards=alignment.recompute_rewards,
            overrides=(*alignment.overrides, *side.overrides),
            capture=capture,
            device=side.device,
            precision=precision or side.precision,
            world_size=side.world_size,
            environment=dict(side.environment),
            container=side.container,
            resources=side.resources,
            identities=Identities(
                model=models,
                data=data,
                environment=None
                if imported or not located
                else identity.environment(side.container, side.lock, where),
                fault=None
                if fault is None or not located
                else identity.fault(fault, "target.fault"),
                entry_point=start,
                code={}
                if imported or not located
                else code.of(alignment.framework, side, alignment.entry_point),
                checkpoint=checkpoint,
                rollouts=identity.rollouts(rollouts) if rollouts and located else None,
            ),
            generation=alignment.generation,
            routing=alignment.routing,
            rejoin=alignment.controls.rejoin,
            resume_from=alignment.resume_from,
            entry_point=alignment.entry_point,
            ray=alignment.ray,
            fault=fault,
            replay_of=replay_of,
            rollouts=rollouts,
            imported=imported,
            perturbed=perturbed,
        )
        framework = frameworks.get(alignment.framework)
        if imported is None:
            framework.check(declared)
            layout = framework.layout(declared)
            layout.require(role)
            if located:
                layout.require_model(role, identity.model_config(alignment.model.path))
            framework.inference_not_recorded(declared)
        executed = framework.expected_stages(declared)
        # of a perturbed control the trainer's metrics are wanted and nothing else
        return dataclasses.replace(declared, executed=() if perturbed else executed)

    benchmark, target, controls = alignment.benchmark, alignment.target, alignment.controls
    collected = spec(
        BENCHMARK, benchmark, "benchmark", imported=benchmark.run, rollouts=benchmark.rollouts
    )
    origin = collected.key
    runs = {
        BENCHMARK: collected,
        TARGET: spec(TARGET, target, "target", fault=fault, replay_of=origin),
    }
    # An imported benchmark's device is elsewhere: its controls are imported too, or there are none.
    for role, wanted, precision in (
        (REPEAT, controls.repeat, None),
        (HIGH_PRECISION, controls.high_precision, _higher(benchmark.precision)),
    ):
        imported = wanted if isinstance(wanted, str) else None
        if imported or (wanted and benchmark.run is None):
            runs[role] = spec(
                role,
                benchmark,
                "benchmark",
                precision=precision,
                replay_of=origin,
                imported=imported,
            )
    if controls.repeat_target:
        # All that the target has, its fault included: is it equal to itself?
        runs[REPEAT_TARGET] = spec(REPEAT_TARGET, target, "target", fault=fault, replay_of=origin)
    for number, key in _perturbed(alignment):
        role = roles.perturbed(number)
        runs[role] = spec(
            role, benchmark, "benchmark", replay_of=origin, imported=key, perturbed=number
        )
    return runs


def captured(alignment: Alignment) -> CaptureSection:
    """What every run captures: records by coordinates where the sides may be laid out otherwise."""
    capture = alignment.capture
    if capture.coordinate_sketch is not None:
        return capture
    sides = (alignment.benchmark, alignment.target)
    own = set(sides[0].overrides) ^ set(sides[1].overrides)
    unlike = sides[0].world_size != sides[1].world_size or any(map(_OF_LAYOUT.search, own))
    wanted = unlike and capture.sketch and capture.engine == "light"
    return capture.model_copy(update={"coordinate_sketch": wanted})


def _perturbed(alignment: Alignment) -> list[tuple[int, str | None]]:
    """Number of each perturbed control, and the key of one that is imported."""
    wanted = alignment.controls.perturbed
    if isinstance(wanted, tuple):
        return list(enumerate(wanted, 1))
    if wanted and alignment.benchmark.run is not None:
        raise ConfigError(
            f"controls.perturbed: {wanted} replays on the benchmark's device, which is elsewhere "
            "(benchmark.run is given): run them there, export the alignment, and give their keys"
        )
    return [(number, None) for number in range(1, wanted + 1)]


def pairs(runs: Mapping[str, RunSpec]) -> dict[str, tuple[str, str]]:
    """The comparisons that the planned runs allow: name -> (reference, other) roles."""
    return {name: sides for name, sides in PAIRS.items() if all(role in runs for role in sides)}


def _higher(precision: str) -> str:
    return "fp64" if precision == "fp32" else "fp32"
