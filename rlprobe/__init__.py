"""rlprobe: run the same reinforcement-learning steps on two devices and say where they part.

What this module hands out may be relied on; everything else may change between two versions. The
commands (``rlprobe --help``) do the work; from Python one reads what they left, and plants faults:

    import rlprobe

    alignment = rlprobe.load_alignment(Path("config/config.yaml"))
    diagnosis = rlprobe.read_diagnosis(Path("results/cpu-default/diagnosis.json"))
    run = rlprobe.Run.open(Path("store"), key)
    rollouts = rlprobe.read_rollouts(run.rollouts[0])
    differences = rlprobe.compare_dumps("gpu/dump", "npu/dump").records

A name is loaded when it is first asked for: every process of a training imports this package, and
pays for what it uses only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlprobe.version import __version__

if TYPE_CHECKING:
    from rlprobe.config import Alignment
    from rlprobe.config import load as load_alignment
    from rlprobe.diagnose.diagnosis import Diagnosis
    from rlprobe.diagnose.diagnosis import read as read_diagnosis
    from rlprobe.errors import (
        ConfigError,
        DumpError,
        NotComparableError,
        RlprobeError,
        RunError,
        StoreError,
    )
    from rlprobe.faults import Site, benign, fault
    from rlprobe.judge.dumps import Comparison, compare_dumps
    from rlprobe.rollouts import Rollouts
    from rlprobe.rollouts.hdf5 import read as read_rollouts
    from rlprobe.store.read import Run

__all__ = [
    "Alignment",
    "Comparison",
    "ConfigError",
    "Diagnosis",
    "DumpError",
    "NotComparableError",
    "RlprobeError",
    "Rollouts",
    "Run",
    "RunError",
    "Site",
    "StoreError",
    "__version__",
    "benign",
    "compare_dumps",
    "fault",
    "load_alignment",
    "read_diagnosis",
    "read_rollouts",
]

#: Name -> the module that has it, and its name there.
_FROM = {
    "Alignment": ("config", "Alignment"),
    "Comparison": ("judge.dumps", "Comparison"),
    "ConfigError": ("errors", "ConfigError"),
    "Diagnosis": ("diagnose.diagnosis", "Diagnosis"),
    "DumpError": ("errors", "DumpError"),
    "NotComparableError": ("errors", "NotComparableError"),
    "RlprobeError": ("errors", "RlprobeError"),
    "Rollouts": ("rollouts", "Rollouts"),
    "Run": ("store.read", "Run"),
    "RunError": ("errors", "RunError"),
    "Site": ("faults", "Site"),
    "StoreError": ("errors", "StoreError"),
    "benign": ("faults", "benign"),
    "compare_dumps": ("judge.dumps", "compare_dumps"),
    "fault": ("faults", "fault"),
    "load_alignment": ("config", "load"),
    "read_diagnosis": ("diagnose.diagnosis", "read"),
    "read_rollouts": ("rollouts.hdf5", "read"),
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _FROM[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
