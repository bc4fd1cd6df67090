"""Variables for processes that inherit nothing: those of a Ray cluster that was there before.

A driver's own Ray inherits its environment. A job that is submitted (``ray job submit``), or a
driver that joins a running cluster, hands over only what its runtime environment names, so the
hooks' variables are added to it wherever a job is submitted from a process that has them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rlprobe.capture.session import ENV
from rlprobe.frameworks.imports import when_imported

#: Names, separated by commas, of the variables that a run was given: ``rlprobe run`` sets it.
NAMES = "RLPROBE_FORWARD"
_PREFIX = "RLPROBE_"
#: verl imports the hooks by it before 0.9, and what a CPU needs.
_VERL = "VERL_USE_EXTERNAL_MODULES"
#: Of the process that submits alone: in the job they would point back at the dashboard.
_OWN = frozenset({"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"})
_SDK = "ray.dashboard.modules.job.sdk"


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process elsewhere needs of this one's environment; empty where nothing is on.

    rlprobe's own variables, those that :data:`NAMES` lists, and verl's list of modules.
    """
    if not environ.get(ENV):
        return {}
    listed = {name for name in environ.get(NAMES, "").split(",") if name}
    wanted = listed | {_VERL} | {name for name in environ if name.startswith(_PREFIX)}
    return {name: environ[name] for name in sorted(wanted - _OWN) if environ.get(name)}


def added_to(
    runtime_env: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """A Ray runtime environment with the variables; what it sets itself stays."""
    found = dict(runtime_env or {})
    ours = variables(environ)
    if ours:
        found["env_vars"] = {**ours, **(found.get("env_vars") or {})}
    return found


def register() -> None:
    """Add the variables to every job that this process submits."""
    when_imported(_SDK, _patch)


def _patch(module: ModuleType) -> None:
    client = module.JobSubmissionClient
    original = client.submit_job
    if getattr(original, "_rlprobe_forwards", False):
        return

    @functools.wraps(original)
    def submit_job(self: Any, **kwargs: Any) -> Any:
        kwargs["runtime_env"] = added_to(kwargs.get("runtime_env"))
        return original(self, **kwargs)

    submit_job._rlprobe_forwards = True  # type: ignore[attr-defined]
    client.submit_job = submit_job
