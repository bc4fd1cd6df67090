"""Determinism: one table per device kind, for the host that starts a run and the process in it.

Importing this module needs the standard library only; :func:`environment` is used where torch is
not installed. The rows and their reasons are repeated in docs/capture.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlprobe.capture.session import Session
from rlprobe.errors import ConfigError


@dataclass(frozen=True)
class Determinism:
    """What makes one kind of device repeat itself."""

    #: Environment variables. Those that libraries read when they are loaded must be set before
    #: the process starts, so all are.
    variables: Mapping[str, str]
    #: Why each variable is there.
    reasons: Mapping[str, str]
    #: torch settings, by dotted path below ``torch``, made besides msprobe's ``seed_all``.
    switches: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {
    # Python's own hash order decides the order of sets of strings.
    "PYTHONHASHSEED": "0",
}
_COMMON_REASONS = {"PYTHONHASHSEED": "order of sets and of dict keys made from them"}

TABLE: dict[str, Determinism] = {
    "cpu": Determinism(
        variables={
            **_COMMON,
            "MKL_DYNAMIC": "FALSE",
            "OMP_DYNAMIC": "FALSE",
        },
        reasons={
            **_COMMON_REASONS,
            "MKL_DYNAMIC": "MKL must not choose another number of threads, hence of partial sums",
            "OMP_DYNAMIC": "nor may OpenMP",
        },
    ),
    "cuda": Determinism(
        variables={
            **_COMMON,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "FLASH_ATTENTION_DETERMINISTIC": "1",
        },
        reasons={
            **_COMMON_REASONS,
            "CUBLAS_WORKSPACE_CONFIG": "cuBLAS repeats itself over several streams only with "
            "a workspace of fixed size (torch's deterministic mode refuses to run without it)",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "Transformer Engine's attention backward",
            "FLASH_ATTENTION_DETERMINISTIC": "flash-attention's backward sums with atomics "
            "otherwise (read by transformers)",
        },
        switches={
            "backends.cudnn.deterministic": True,
            "backends.cudnn.benchmark": False,
        },
    ),
    "npu": Determinism(
        variables={
            **_COMMON,
            "HCCL_DETERMINISTIC": "true",
            "LCCL_DETERMINISTIC": "1",
            "CLOSE_MATMUL_K_SHIFT": "1",
            "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
            "ATB_LLM_LCOC_ENABLE": "0",
        },
        reasons={
            **_COMMON_REASONS,
            "HCCL_DETERMINISTIC": "collectives reduce in a fixed order",
            "LCCL_DETERMINISTIC": "so do those within a node",
            "CLOSE_MATMUL_K_SHIFT": "cores would begin a product's sum at different places",
            "ATB_MATMUL_SHUFFLE_K_ENABLE": "likewise in ATB",
            "ATB_LLM_LCOC_ENABLE": "overlapping computation and communication reorders sums",
        },
    ),
}

_applied: dict[str, Any] | None = None


def table(device: str) -> Determinism:
    """The table of a device kind.

    Raises:
        ConfigError: no table of that name.
    """
    if device not in TABLE:
        raise ConfigError(f"device {device!r} is unknown; accepted: {', '.join(TABLE)}")
    return TABLE[device]


def environment(device: str) -> dict[str, str]:
    """Variables that must stand in a process's environment before it starts.

    Raises:
        ConfigError: the device kind is unknown.
    """
    return dict(table(device).variables)


def apply(session: Session) -> dict[str, Any]:
    """Make this process deterministic if the session asks for it; again does nothing.

    Variables that the process lacks are set (libraries not loaded yet will read them), then
    msprobe's ``seed_all(seed, mode=True)`` seeds Python, numpy and torch and switches torch's
    deterministic algorithms on, then the table's own switches follow.

    Returns:
        what was done, as it is recorded: ``deterministic``, ``seed``, ``late`` (variables that
        had to be set here, after interpreter start) and ``switches``.
    """
    global _applied
    if not session.deterministic:
        return {"deterministic": False}
    if _applied is not None and _applied["seed"] == session.seed:
        return _applied
    chosen = table(session.device)
    late = []
    for name, value in chosen.variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
            late.append(name)
    import torch
    from msprobe.pytorch import seed_all

    seed_all(seed=session.seed, mode=True)
    # It writes some of the same variables with values of its own, which processes started from
    # here would inherit: the table stands.
    os.environ.update(chosen.variables)
    for path, value in chosen.switches.items():
        owner: Any = torch
        *parts, last = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    _applied = {
        "deterministic": True,
        "seed": session.seed,
        "late": late,
        "switches": dict(chosen.switches),
    }
    return _applied


def applied() -> dict[str, Any]:
    """What :func:`apply` did in this process, for the record."""
    return dict(_applied) if _applied is not None else {"deterministic": False}
