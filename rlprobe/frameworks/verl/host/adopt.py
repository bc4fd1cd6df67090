"""A verl command line as an alignment. Imports nothing of verl."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlprobe.config import EntryPointSection
from rlprobe.errors import UsageError
from rlprobe.frameworks.adopted import Adopted, Training, whole
from rlprobe.frameworks.verl.host import entrypoint, plan

#: Option -> key of the alignment; paths are made absolute.
_PATHS = {
    "actor_rollout_ref.model.path": ("model", "path"),
    "critic.model.path": ("model", "critic_path"),
    "actor_rollout_ref.ref.model.path": ("model", "reference_path"),
    "data.train_files": ("data", "train_files"),
    "data.val_files": ("data", "val_files"),
}
_REWARD = ("reward.custom_reward_function", "custom_reward_function")
#: What only says where a run reports to, or how long it goes on.
_RUN = {
    "trainer.total_epochs": "steps.total ends a run",
    "trainer.total_training_steps": "steps.total ends a run",
    "trainer.logger": "metrics go to the page; runs report to nobody",
    "trainer.project_name": "runs report to nobody",
    "trainer.experiment_name": "runs report to nobody",
    "trainer.default_local_dir": "a run writes into its own directory",
    "trainer.rollout_data_dir": "rollouts are recorded in the store",
    "trainer.validation_data_dir": "an alignment never validates",
    "trainer.val_before_train": "an alignment never validates",
    "trainer.val_only": "an alignment never validates",
    "trainer.test_freq": "an alignment never validates",
    "trainer.save_freq": "an alignment saves no checkpoint",
    "trainer.resume_mode": "every run begins anew, from model.path",
    "trainer.resume_from_path": "every run begins anew, from model.path",
    "ascend_precision_collector": "capture says what is recorded",
}
_HALVES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16",
           "float32": "fp32", "fp32": "fp32", "32": "fp32"}  # fmt: skip
#: Where a precision is said, the first that is.
_PRECISIONS = (
    "actor_rollout_ref.actor.megatron.dtype",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
    "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.rollout.dtype",
)


def adopt(training: Training) -> Adopted:
    """Sort every option: a key of the alignment, an override, or what a run sets itself.

    Raises:
        UsageError: a word is no override, or no value where one is needed.
    """
    found = Adopted()
    overrides = _last(_entry(training, found), found)
    values = {_key(word): word.partition("=")[2] for word in overrides}
    found.device = values.get("trainer.device", "cuda").strip("'\"")
    found.precision = _precision(values, found)
    # verl's own defaults
    found.nodes = whole("trainer.nnodes", values.get("trainer.nnodes", "1"))
    per_node = whole("trainer.n_gpus_per_node", values.get("trainer.n_gpus_per_node", "8"))
    found.world_size = found.nodes * per_node
    kept = []
    for word in overrides:
        key = _key(word)
        if key in _RUN:
            found.dropped[word] = _RUN[key]
        elif not _taken(key, word, values, training, found):
            kept.append(_located(word, training))
    _reward(values, training, found)
    if "model" not in found.keys:
        raise UsageError("the command has no actor_rollout_ref.model.path, so no model to align")
    _without_a_critic(_configured(training, found) | values, found)
    if kept:
        found.keys["overrides"] = kept
    return found


def _entry(training: Training, found: Adopted) -> list[str]:
    """Entry point and Hydra's options; returns the overrides."""
    entry: dict[str, str] = {}
    if training.entry[0] != "-m":
        entry["script"] = training.absolute(training.entry[0])
    elif training.entry[1] != entrypoint.MODULE:
        entry["module"] = training.entry[1]
    words = list(training.arguments)
    overrides: list[str] = []
    options = {"--config-name": "config_name", "-cn": "config_name",
               "--config-path": "config_path", "-cp": "config_path"}  # fmt: skip
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in options:
            if not equals:
                value = words.pop(0) if words else ""
            value = value.strip("'\"")
            if options[option] == "config_name":
                value = value.removesuffix(".yaml")
            else:
                place = _configuration(value, entry, training, found)
                if place is None:
                    continue
                value = place
            entry[options[option]] = value
        elif word.startswith("-"):
            raise UsageError(
                f"{word}: an option of Hydra's that an alignment has no place for; accepted: "
                "--config-name, --config-path and overrides"
            )
        elif not equals and not word.startswith("~"):
            raise UsageError(f"{word!r} is no override of verl's (KEY=VALUE); is a quote missing?")
        else:
            overrides.append(word)
    if entry == {"config_name": "ppo_trainer"}:
        entry.clear()  # what verl's own entry point takes without a word
    if entry:
        found.keys["entry_point"] = entry
    return overrides


def _last(overrides: list[str], found: Adopted) -> list[str]:
    """An option that is given several times counts as it is given last, as for Hydra."""
    places = {_key(word): index for index, word in enumerate(overrides)}
    kept = []
    for index, word in enumerate(overrides):
        if places[_key(word)] == index:
            kept.append(word)
        elif word not in overrides[index + 1 :]:
            found.dropped[word] = "given again, with another value"
    return kept


def _configuration(
    value: str, entry: dict[str, str], training: Training, found: Adopted
) -> str | None:
    """Where Hydra looks for a ``--config-path``: relative to the file that is run.

    Returns:
        The whole path; None where it is the entry point's own, or lies in a module that this
        machine does not have (then there is a note).
    """
    if Path(value).is_absolute():
        return value
    module = entry.get("module", entrypoint.MODULE)
    source = Path(entry["script"]) if "script" in entry else _source(module, training)
    own = os.path.normpath(value) == "config"
    if module == entrypoint.MODULE and "script" not in entry and own:
        return None
    if source is not None:
        return os.path.normpath(source.parent / value)
    found.notes.append(
        f"--config-path={value} is relative to {module}, which is not on this machine: Hydra takes "
        "the entry point's own unless entry_point.config_path names the directory"
    )
    return None


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _taken(key: str, word: str, values: dict[str, str], training: Training, found: Adopted) -> bool:
    """Whether an option became a key of the alignment."""
    value = values[key]
    if key in _PATHS:
        section, name = _PATHS[key]
        parsed = _parsed(value)
        many = parsed if isinstance(parsed, list) else [parsed]
        paths = [training.absolute(str(path)) for path in many]
        found.keys.setdefault(section, {})[name] = paths if len(paths) > 1 else paths[0]
        found.moved[word] = f"{section}.{name}"
    elif key == "trainer.nnodes":
        found.moved[word] = "resources.nodes"
    elif key == "trainer.n_gpus_per_node":
        found.moved[word] = "world_size"
    elif key == "trainer.device":
        found.moved[word] = "device"
    elif key == "data.seed" and value.isdecimal():
        found.keys["seed"] = int(value)
        found.moved[word] = "seed"
    elif key.startswith(_REWARD) and key.rpartition(".")[2] in ("path", "name"):
        found.moved[word] = "data.reward_function"
    elif key in _PRECISIONS:
        found.moved[word] = "precision"
    else:
        return False
    return True


def _parsed(value: str) -> Any:
    return plan.from_overrides([f"v={value}"])["v"]


def _located(word: str, training: Training) -> str:
    """An override whose value is a relative path that exists, with the whole path."""
    name, _, value = word.partition("=")
    plain = value.strip("'\"")
    if "/" in plain and not plain.startswith(("/", "$", "[", "{")) and " " not in plain:
        return f"{name}={training.absolute(plain)}"
    return word


def _precision(values: dict[str, str], found: Adopted) -> str:
    if found.device == "cpu":
        return "fp32"
    for option in _PRECISIONS:
        said = values.get(option, "").strip("'\"").removeprefix("torch.")
        if said in _HALVES:
            return _HALVES[said]
    return "bf16"


def _reward(values: dict[str, str], training: Training, found: Adopted) -> None:
    for prefix in _REWARD:
        path = values.get(f"{prefix}.path", "null").strip("'\"")
        if path not in ("", "null", "None"):
            name = values.get(f"{prefix}.name", "compute_score").strip("'\"")
            found.keys.setdefault("data", {})["reward_function"] = (
                f"{training.absolute(path)}:{name}"
            )


def _source(module: str, training: Training) -> Path | None:
    return entrypoint.source(module, training.places())


def _configured(training: Training, found: Adopted) -> dict[str, str]:
    """What the entry point's own configuration says."""
    if "entry_point" not in found.keys:
        return {}
    entry = EntryPointSection(**found.keys["entry_point"])
    words = entrypoint.configured(entry, training.places())
    return {_key(word): word.partition("=")[2] for word in words}


def _without_a_critic(values: dict[str, str], found: Adopted) -> None:
    """A critic's path where no critic is trained would be looked for, and read by nobody."""
    estimator = values.get("algorithm.adv_estimator", "gae").strip("'\"")
    if estimator == "gae" or values.get("critic.enable", "").lower() == "true":
        if "critic_path" not in found.keys["model"]:
            found.notes.append(
                "the algorithm has a critic and the command names none: give model.critic_path, a "
                "model with its value head saved in it, or no two runs are equal"
            )
    elif found.keys["model"].pop("critic_path", None):
        word = next(word for word in found.moved if _key(word) == "critic.model.path")
        found.moved.pop(word)
        found.dropped[word] = f"{estimator} trains no critic"
