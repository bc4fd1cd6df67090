"""An alignment file from a training command: what it keeps, moves, leaves out, and what is added.

Every option of the command is accounted for in the file's own head, and so is every option that a
run sets on its own: nobody should have to find out from a log that a value was overruled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlprobe import frameworks, redaction
from rlprobe.capture import determinism
from rlprobe.config import parse
from rlprobe.errors import UsageError
from rlprobe.frameworks import RunDirectories
from rlprobe.frameworks.adopted import Adopted, Training
from rlprobe.runs import devices, nodelocal
from rlprobe.runs.plan import plan

#: Variables of one kind of device.
_OF_DEVICE = {
    devices.CUDA: ("CUDA_", "NCCL_", "TORCH_NCCL_", "NVTE_", "CUBLAS_", "CUDNN_", "PYTORCH_CUDA_"),
    devices.NPU: ("ASCEND_", "HCCL_", "LCCL_", "ACL", "ATB_", "LCAL_", "PYTORCH_NPU_",
                  "TASK_QUEUE_ENABLE", "CPU_AFFINITY_CONF", "ATC_", "TE_"),
}  # fmt: skip
#: What a job is given by its scheduler, its node or its Ray.
_OF_THE_PLACE = re.compile(
    r"RAY_|SLURM_|CUDA_VISIBLE_DEVICES|ASCEND_RT_VISIBLE_DEVICES|ASCEND_VISIBLE_DEVICES|HOME$|USER$"
    r"|LOGNAME|MASTER_(ADDR|PORT)|(WORLD_SIZE|RANK|LOCAL_RANK)$|.*_SOCKET_IFNAME|HCCL_IF_IP"
    r"|WANDB_|SWANLAB_|MLFLOW_|TENSORBOARD_|LD_LIBRARY_PATH|RLPROBE_|VERL_USE_EXTERNAL_MODULES"
    r"|HYDRA_FULL_ERROR|BASH_|LINES$|COLUMNS$"
)


@dataclass(frozen=True)
class Draft:
    """The file, and what it does not say by itself."""

    text: str
    raw: dict[str, Any]
    moved: dict[str, str]
    dropped: dict[str, str]
    #: Option -> (the command's value, what runs set instead).
    overruled: dict[str, tuple[str, str]]
    #: Options that runs set and the command does not.
    added: tuple[str, ...]
    notes: tuple[str, ...]


def draft(
    training: Training,
    *,
    name: str,
    version: str | None,
    benchmark: str | None = None,
    target: str | None = None,
) -> Draft:
    """The alignment of a training command.

    Args:
        training: the command.
        name: of the alignment.
        version: of the framework; None where the installed one cannot be asked.
        benchmark, target: kinds of devices; None: those that the command suggests.

    Raises:
        UsageError: the command cannot be read, or the version is not known.
        ConfigError: what it says makes no alignment.
    """
    if version is None:
        raise UsageError(
            f"{training.framework} is not installed here, so its version is not known; give it "
            "with --framework-version"
        )
    framework = frameworks.get(training.framework)
    found = framework.adopt(training)
    _leave_secrets(found)
    raw = _raw(found, training, name, version, _devices(found.device, benchmark, target))
    alignment = parse(raw, name)
    runs = plan(alignment, {}, located=False)
    directories = RunDirectories(Path("/RUN"), Path("/STORE/assets"))
    commands = {
        role: framework.options(framework.command(runs[role], directories))
        for role in ("benchmark", "target")
    }
    given = framework.options([*training.entry, *training.arguments])
    overruled, added = _compared(given, commands, framework.options(raw.get("overrides", [])))
    # what became a key of its own is set from there; what is left out has its reason
    for word in (*found.moved, *found.dropped):
        for option in framework.options([word]):
            overruled.pop(option, None)
    notes = [*found.notes, *_missing(raw), *_empty(training)]
    draft = Draft("", raw, found.moved, found.dropped, overruled, added, tuple(notes))
    return Draft(_text(draft, training), **{k: getattr(draft, k) for k in _FIELDS})


_FIELDS = ("raw", "moved", "dropped", "overruled", "added", "notes")


def _devices(own: str, benchmark: str | None, target: str | None) -> tuple[str, str]:
    usual = (devices.CPU, devices.CPU) if own == devices.CPU else (devices.CUDA, devices.NPU)
    return benchmark or usual[0], target or usual[1]


def _raw(
    found: Adopted, training: Training, name: str, version: str, kinds: tuple[str, str]
) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "name": name, "framework": training.framework, "framework_version": version,
    }  # fmt: skip
    keys = dict(found.keys)
    common = {**keys.pop("environment", {}), **_kept(training, found)}
    raw |= {key: keys.pop(key) for key in ("model", "data") if key in keys}
    raw |= {"steps": {"total": 1, "start": 0, "end": 0}, **keys}
    for side, kind in zip(("benchmark", "target"), kinds, strict=True):
        section: dict[str, Any] = {
            "device": kind,
            "precision": "fp32" if kind == devices.CPU else found.precision,
            "world_size": found.world_size,
        }
        own = {k: v for k, v in common.items() if _belongs(k, kind)}
        if own:
            section["environment"] = own
        if found.nodes > 1:
            section["resources"] = {"nodes": found.nodes}
        raw[side] = section
    return raw


def _leave_secrets(found: Adopted) -> None:
    """Options that are secrets are no part of a file that others are to read."""
    kept = found.keys.get("overrides", [])
    for word in kept:
        (shown,) = redaction.command([word])
        if shown != word:
            found.dropped[shown] = "looks like a secret; runs report to nobody, and need none of it"
    found.keys["overrides"] = [word for word in kept if redaction.command([word]) == [word]]


def _belongs(variable: str, kind: str) -> bool:
    return not any(
        variable.startswith(prefixes) for other, prefixes in _OF_DEVICE.items() if other != kind
    )


def _kept(training: Training, found: Adopted) -> dict[str, str]:
    """Variables of the script that a run takes over; the others are listed with the reason."""
    ours = set(nodelocal.environment(Path("/t"), Path("/h")))
    tables = {n: v for kind in devices.DEVICES for n, v in determinism.environment(kind).items()}
    kept = {}
    for variable, value in sorted(training.environment.items()):
        if redaction.is_secret(variable, value):
            found.dropped[variable] = "looks like a secret; set it where rlprobe is started"
        elif variable in ours or _OF_THE_PLACE.match(variable):
            found.dropped[variable] = "set anew for every job, or by its site"
        elif variable in tables:
            found.dropped[f"{variable}={value}"] = (
                f"deterministic: true sets it ({tables[variable]})"
            )
        elif variable != "PYTHONPATH":
            kept[variable] = value
    places = training.places()
    if places and places.get("PYTHONPATH", "").split(":")[0] == str(training.cwd.absolute()):
        package = training.entry[-1].partition(".")[0]
        found.notes.append(
            f"PYTHONPATH: the command takes {package} from {training.cwd}, where it is called; "
            "runs find it there by its name"
        )
    return kept | places


def _compared(
    given: Mapping[str, str], commands: Mapping[str, Mapping[str, str]], kept: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """What runs set otherwise than the command, and what they set that it does not."""
    overruled: dict[str, tuple[str, str]] = {}
    added: dict[str, None] = {}
    for role, options in commands.items():
        for option, value in options.items():
            said = f"{option}={value}" if value else option
            if role == "target" and commands["benchmark"].get(option) != value:
                said += " (replays)"
            if option not in given:
                if option not in kept:
                    added[said] = None
            elif given[option] != value:
                both = [overruled[option][1]] if option in overruled else []
                overruled[option] = (given[option], " / ".join(dict.fromkeys([*both, value])))
    return overruled, tuple(added)


def _missing(raw: Mapping[str, Any]) -> list[str]:
    """Paths of the file that this machine does not have."""
    found = []
    named = [(s, k, v) for s in ("model", "data") for k, v in raw.get(s, {}).items()]
    for section, key, value in named:
        for path in value if isinstance(value, list) else [value]:
            plain = path.rpartition(":")[0] if key == "reward_function" else path
            if not Path(plain).expanduser().exists():
                found.append(
                    f"{section}.{key}: {plain} is not on this machine; runs ask no hub, so "
                    "give the path of a directory or file that every node of the run can read"
                )
    if "data" not in raw:
        found.append("data.train_files: the command names none; give them")
    return found


def _empty(training: Training) -> list[str]:
    """Options without a value, as of a variable that is not set here."""
    return [
        f"{word[:-1]}: the command gives it no value; where a variable of the script stands there, "
        "set it as for the training (env NAME=VALUE bash SCRIPT)"
        for word in training.arguments
        if word.endswith("=")
    ]


def _text(draft: Draft, training: Training) -> str:
    lines = [f"# Made from: {_shown(training)}", "#"]

    def section(title: str, items: list[str]) -> None:
        if items:
            lines.extend([f"# {title}", *(f"#   {item}" for item in items), "#"])

    section("To look at before the first run:", list(draft.notes))
    section(
        "Options that became keys of this file:",
        [f"{option} -> {key}" for option, key in draft.moved.items()],
    )
    section("Left out:", [f"{option} ({reason})" for option, reason in draft.dropped.items()])
    section(
        "Overruled: runs set another value than the command does:",
        [f"{k}: {theirs or 'set'} -> {ours}" for k, (theirs, ours) in draft.overruled.items()],
    )
    section("Set by runs, and not by the command:", list(draft.added))
    lines = [redaction.text(line) for line in lines]
    return (
        "\n".join(lines)
        + "\n"
        + yaml.safe_dump(draft.raw, sort_keys=False, allow_unicode=True, width=100)
    )


def _shown(training: Training) -> str:
    return " ".join(["python", *training.entry, f"… ({len(training.arguments)} words)"])
