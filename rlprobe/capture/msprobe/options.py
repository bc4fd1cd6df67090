"""Which of msprobe's options fit together, checked before training (mindstudio-probe 26).

msprobe itself ignores unknown keys, corrects contradictions silently, or fails in the middle of a
step. Nothing of it is imported here.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from rlprobe.capture.session import CaptureOptions
from rlprobe.errors import ConfigError

LEVELS = ("L0", "L1", "mix")
TASKS = ("statistics", "tensor", "structure", "nan_check", "diff_check")
SUMMARY_MODES = ("statistics", "md5", "xor")

#: Options that msprobe has and a capture of stages cannot use, and why.
_REFUSED = {
    ("level", "L2"): "it records the kernels of one API named in msprobe's own configuration; for "
    "what runs inside a module use mix, or refine, which records a suspect's operators",
    ("level", "debug"): "it records what code passes to PrecisionDebugger.save, not stages; key "
    "data holds a stage's own quantities (key_data_dump, capture.key_data)",
    ("task", "acc_check"): "msprobe 26 has no collector for it (it is a tool run on a dump)",
    ("task", "free_benchmark"): "msprobe 26 has no collector for it",
    ("task", "exception_dump"): "msprobe 26 has it for MindSpore only",
}

#: All that msprobe takes in a path.
_PATH = re.compile(r"[a-zA-Z0-9_.:/-]+")


def why(key: str, found: object) -> str:
    """Why one of msprobe's values cannot be had of a capture of stages, in brackets; else nothing.

    For messages about ``level`` and ``task``, wherever they are read.
    """
    reason = _REFUSED.get((key, str(found)))
    return f" ({reason})" if reason else ""


def check(options: CaptureOptions, device: str) -> None:
    """Refuse what msprobe lacks, or would ignore or correct.

    Args:
        options: the capture options.
        device: the session's device kind.

    Raises:
        ConfigError: names the option, what was found and what is accepted.
    """
    accepted = {"level": LEVELS, "task": TASKS, "summary_mode": SUMMARY_MODES}
    for key, values in accepted.items():
        found = getattr(options, key)
        if found in values:
            continue
        raise ConfigError(
            f"capture.{key}: found {found!r}{why(key, found)}; accepted: {', '.join(values)}"
        )
    _check_pairs(options, device)


def _check_pairs(options: CaptureOptions, device: str) -> None:
    if options.task in ("nan_check", "diff_check") and device != "npu":
        raise ConfigError(
            f"capture.task: found {options.task!r} on device {device!r}; msprobe has it on npu only"
        )
    if options.task == "nan_check" and options.level != "L1":
        raise ConfigError(
            f"capture.level: found {options.level!r} with task nan_check; accepted: L1"
        )
    if options.task == "structure" and options.level == "L1":
        raise ConfigError("capture.level: found 'L1' with task structure; accepted: L0, mix")
    if options.summary_mode != "statistics" and options.task not in ("statistics", "tensor"):
        raise ConfigError(
            f"capture.summary_mode: found {options.summary_mode!r} with task {options.task}; "
            "accepted: statistics"
        )


def check_path(path: Path) -> None:
    """Refuse a dump path that msprobe would refuse in the middle of a step.

    Raises:
        ConfigError: the path has another character than msprobe takes.
    """
    if not _PATH.fullmatch(str(path)):
        raise ConfigError(
            f"dump path {str(path)!r}: msprobe takes letters, digits and _ . : / - only; choose "
            "another scratch or dump_path"
        )


def check_installed() -> str:
    """The installed version of msprobe.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return metadata.version("mindstudio-probe")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "capture.engine msprobe: the package mindstudio-probe is not installed here (the "
            "package called msprobe is somebody else's)"
        ) from error
