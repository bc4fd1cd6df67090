"""Run slime's ``train.py`` as slime is run, with the hooks' environment in every Ray process.

    python -m rlprobe.frameworks.slime.start --hf-checkpoint … --num-rollout …

Inside the image of a run. Where ``RAY_ADDRESS`` is the dashboard's URL the job is submitted to it,
as slime's scripts do (``ray job submit … -- python3 train.py``); otherwise ``train.py`` runs in
this process, on the cluster that ``RAY_ADDRESS`` names or on one of its own.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe.capture.session import ENV, Session
from rlprobe.errors import ConfigError, RlprobeError
from rlprobe.frameworks import forward, prompts
from rlprobe.frameworks.slime import user_config, versions
from rlprobe.frameworks.slime.versions import CHECKOUT

#: What slime needs besides the variables that the run was given.
_OF_SLIME = (
    prompts.ENV, user_config.DUMP_ON, "PYTHONPATH", "PYTHONHASHSEED", "TORCHDYNAMO_DISABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Start training; returns the exit status where a job was submitted.

    Raises:
        ConfigError: no checkout of slime is found.
        HookError: it is of another version than the run declares.
    """
    root = checkout(os.environ)
    session = Session.load(os.environ[ENV]) if os.environ.get(ENV) else None
    if session is not None:
        versions.require(session.framework_version, root)
    # Ray's processes import slime by this path too
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("http://", "https://")):
        return subprocess.run(
            submission(address, root, arguments, os.environ), check=False
        ).returncode
    sys.path.insert(0, str(root))
    _start_ray(address)
    sys.argv = [str(root / "train.py"), *arguments]
    runpy.run_path(str(root / "train.py"), run_name="__main__")
    return 0


def checkout(environ: Mapping[str, str]) -> Path:
    """The directory of slime's ``train.py``.

    Raises:
        ConfigError: neither ``RLPROBE_SLIME`` nor an importable slime leads to one.
    """
    named = environ.get(CHECKOUT)
    root = Path(named).expanduser().absolute() if named else versions.checkout()
    if root is None or not (root / "train.py").is_file():
        where = named or root or "no importable package slime"
        raise ConfigError(
            f"slime's train.py was looked for in {where} and not found; set {CHECKOUT} to a "
            "checkout of slime in the side's environment (the package slime on the public index "
            "is another project)"
        )
    return root


def runtime_env(environ: Mapping[str, str]) -> dict[str, Any]:
    """The Ray runtime environment that carries a side's variables to every process."""
    slimes = {name: environ[name] for name in _OF_SLIME if environ.get(name)}
    return {"env_vars": {**forward.variables(environ), **slimes}}


def submission(
    address: str, root: Path, arguments: list[str], environ: Mapping[str, str]
) -> list[str]:
    """``ray job submit`` for this training, as slime's scripts write it."""
    return [
        "ray", "job", "submit", "--address", address,
        "--runtime-env-json", json.dumps(runtime_env(environ)),
        "--", "python3", str(root / "train.py"), *arguments,
    ]  # fmt: skip


def _start_ray(address: str) -> None:
    """Ray before slime, which would start it without the environment, and without fake devices."""
    import ray

    options: dict[str, Any] = {"runtime_env": runtime_env(os.environ)}
    if address in ("", "local"):
        options["include_dashboard"] = False
    session = Session.load(os.environ[ENV]) if os.environ.get(ENV) else None
    if session is not None and session.device == "cpu" and address in ("", "local"):
        # slime places its actors by GPU; here a GPU is a slot and nothing else
        options |= {"num_gpus": 16, "num_cpus": 32}
    ray.init(address=address or None, **options)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RlprobeError as error:
        sys.stderr.write(f"rlprobe: error: {error}\n")
        sys.exit(error.exit_code)
