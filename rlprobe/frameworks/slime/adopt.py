"""A slime command line as an alignment. Imports nothing of slime."""

from __future__ import annotations

from pathlib import Path

from rlprobe.errors import UsageError
from rlprobe.frameworks.adopted import Adopted, Training, whole
from rlprobe.frameworks.slime import flags as command
from rlprobe.frameworks.slime import versions

_PATHS = {
    "hf-checkpoint": ("model", "path"),
    "prompt-data": ("data", "train_files"),
    "ref-load": ("model", "reference_path"),
    "critic-load": ("model", "critic_path"),
}
_RUN = {
    "num-rollout": "steps.total ends a run",
    "num-epoch": "steps.total ends a run",
    "save": "an alignment saves no checkpoint",
    "save-interval": "an alignment saves no checkpoint",
    "save-debug-rollout-data": "rollouts are recorded in the store",
    "save-debug-train-data": "key data are recorded in the store",
    "dump-details": "everything is recorded in the store",
    "debug-rollout-only": "such a run trains nothing",
    "eval-interval": "an alignment never evaluates",
    "eval-prompt-data": "an alignment never evaluates",
    "use-wandb": "runs report to nobody",
    "wandb-project": "runs report to nobody",
    "wandb-group": "runs report to nobody",
    "wandb-key": "runs report to nobody",
    "wandb-team": "runs report to nobody",
}
_SEEDS = ("seed",)


def adopt(training: Training) -> Adopted:
    """Sort every flag: a key of the alignment, an override, or what a run sets itself.

    Raises:
        UsageError: the entry point is not slime's synchronous train.py, or no model is named.
    """
    script = Path(training.absolute(training.entry[-1]))
    if script.name != "train.py":
        raise UsageError(
            f"{script.name}: an alignment follows slime's train.py only; asynchronous training "
            "trains on rollouts of older weights, which no replay repeats"
        )
    found = Adopted(device="cuda", precision="bf16")
    found.keys["environment"] = {versions.CHECKOUT: str(script.parent)}
    kept: list[str] = []
    flags = command.parse(training.arguments)
    for name, values in flags.items():
        shown = " ".join([f"--{name}", *values])
        if name in _RUN:
            found.dropped[shown] = _RUN[name]
        elif name in _PATHS and values:
            section, key = _PATHS[name]
            found.keys.setdefault(section, {})[key] = training.absolute(values[-1])
            found.moved[shown] = f"{section}.{key}"
        elif name == "actor-num-nodes":
            found.nodes = whole(f"--{name}", values[-1] if values else "")
            found.moved[shown] = "resources.nodes"
        elif name == "actor-num-gpus-per-node":
            found.moved[shown] = "world_size"
        elif name in _SEEDS and values and values[-1].isdecimal():
            found.keys["seed"] = int(values[-1])
            found.moved[shown] = "seed"
        elif name == "fp16":
            found.precision = "fp16"
            found.moved[shown] = "precision"
        else:
            kept.append(_quoted(name, values))
    per_node = whole("--actor-num-gpus-per-node", _one(flags, "actor-num-gpus-per-node", "8"))
    found.world_size = per_node * found.nodes
    if "model" not in found.keys or "path" not in found.keys["model"]:
        raise UsageError("the command has no --hf-checkpoint, so no model to align")
    found.keys["overrides"] = kept
    return found


def _one(flags: command.Flags, name: str, default: str) -> str:
    return (flags.get(name) or (default,))[-1]


def _quoted(name: str, values: tuple[str, ...]) -> str:
    import shlex

    return shlex.join([f"--{name}", *values])
