"""What the hooks need of each verl version, checked in its sources before anything is trained.

The sources are parsed and not imported: the same check runs on an installed verl, when the trainer
is built, and on a wheel that is unpacked somewhere.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe.errors import ConfigError, HookError

#: Versions whose hook points are known; see docs/collector.md for what was run of each.
KNOWN = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")
#: The step is announced from here on; before, it is read from the batch that is generated.
SKIP_MANAGER = "verl.utils.skip.skip_manager"


@dataclass(frozen=True)
class HookPoint:
    """Names that a module of verl's must define."""

    module: str
    #: The class that defines them; None for the module itself.
    owner: str | None
    names: tuple[str, ...]
    #: First version that has it.
    since: str = KNOWN[0]


HOOK_POINTS = (
    HookPoint(
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker",
        ("compute_log_prob", "compute_ref_log_prob", "update_actor"),
    ),
    HookPoint(
        "verl.workers.engine_workers",
        "TrainingWorker",
        ("infer_batch", "train_mini_batch", "train_batch", "reset"),
    ),
    HookPoint(
        "verl.workers.engine.base",
        "BaseEngine",
        (
            "train_batch",
            "infer_batch",
            "optimizer_step",
            "get_data_parallel_size",
            "get_data_parallel_rank",
        ),
    ),
    HookPoint(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine",
        ("forward_step", "optimizer_step"),
    ),
    HookPoint(
        "verl.workers.engine.megatron.transformer_impl",
        "MegatronEngine",
        (
            "forward_step",
            "optimizer_step",
            "forward_backward_batch",
            "postprocess_micro_batch_func",
        ),
    ),
    HookPoint("verl.utils.torch_dtypes", "PrecisionType", ("to_dtype", "to_str")),
    HookPoint("verl.trainer.constants_ppo", None, ("get_ppo_ray_runtime_env",)),
    HookPoint("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", ("__init__", "fit")),
    HookPoint(
        "verl.trainer.ppo.v1.trainer_base", "PPOTrainer", ("__init__", "fit", "step"), "0.9.0"
    ),
    HookPoint(SKIP_MANAGER, "SkipManager", ("set_step",), "0.9.0"),
    HookPoint("verl.utils.tracking", "Tracking", ("log",)),
    HookPoint(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopManager",
        ("generate_sequences", "_init_agent_loop_workers"),
    ),
    HookPoint("verl.workers.rollout.replica", "RolloutReplicaRegistry", ("register",)),
    HookPoint("verl.workers.rollout.base", None, ("_ROLLOUT_REGISTRY",)),
)


def require(version: str, root: Path | None) -> None:
    """Refuse a verl that the hooks do not fit, before training.

    Args:
        version: verl's.
        root: its package directory; None where it cannot be found.

    Raises:
        HookError: names the version and every hook point that is missing.
    """
    if version not in KNOWN:
        sys.stderr.write(
            f"rlprobe: warning: verl {version} is not among the versions whose hook points are "
            f"known ({', '.join(KNOWN)}); they are looked for now, and what they do there is not "
            "tested\n"
        )
    if root is None:
        raise HookError(f"verl {version}: its sources are not on disk, so no hook can be checked")
    lacking = missing(root, version)
    if lacking:
        raise HookError(
            f"verl {version} ({root}) cannot be captured: it has no {'; no '.join(lacking)}. "
            f"Known versions: {', '.join(KNOWN)}"
        )


def missing(root: Path, version: str) -> list[str]:
    """Hook points that a version should have and these sources lack, as ``module.owner.name``.

    Args:
        root: verl's package directory.
        version: its version; an unknown one older or newer is held to what its neighbours have.
    """
    lacking = []
    for point in HOOK_POINTS:
        if older(version, point.since):
            continue
        defined = _defined(root, point)
        owner = point.module + (f".{point.owner}" if point.owner else "")
        lacking += [f"{owner}.{name}" for name in point.names if name not in defined]
    return lacking


def older(version: str, than: str) -> bool:
    """Whether a version of verl's came before another."""
    return _number(version) < _number(than)


def _number(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)


def _defined(root: Path, point: HookPoint) -> set[str]:
    path = root.joinpath(*point.module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        return set()
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    if point.owner is not None:
        owners = (n for n in body if isinstance(n, ast.ClassDef) and n.name == point.owner)
        body = [item for owner in owners for item in owner.body]
    return set(_names(body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for item in body:
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield item.name
        elif isinstance(item, ast.Assign):
            yield from (target.id for target in item.targets if isinstance(target, ast.Name))
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id


def require_engine_workers(version: str, config: Mapping[str, Any]) -> None:
    """Refuse the workers that verl 0.8 removed: only the engine's have the hook points.

    Raises:
        ConfigError: says which setting chooses the others.
    """
    chosen = (config.get("trainer") or {}).get("use_legacy_worker_impl", "disable")
    if older(version, "0.8.0") and chosen != "disable":
        raise ConfigError(
            f"verl {version}: trainer.use_legacy_worker_impl is {chosen!r}, which trains with "
            "workers that cannot be captured; accepted: disable (verl's engine workers)"
        )
