"""``rlprobe exec``: any framework command line with the hooks on."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import TYPE_CHECKING, Any

from rlprobe.cli.common import given_path

if TYPE_CHECKING:
    from rlprobe.frameworks.switch import Switch


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "exec",
        help="run any framework command line with the hooks on",
        description="Run a framework's own command line with rlprobe's hooks switched on in every "
        "process, as setting the environment by hand does.",
    )
    parser.add_argument(
        "--collector",
        type=given_path,
        required=True,
        metavar="FILE",
        help="precision_collector.yaml (verl) or msprobe's config.json (slime)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD")


def run(args: argparse.Namespace) -> int:
    from rlprobe.capture.session import ENV
    from rlprobe.errors import UsageError
    from rlprobe.frameworks import switch

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("no command given; write: rlprobe exec --collector FILE -- CMD…")
    found = switch.read(args.collector)
    _check(found)
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]} is not an executable on PATH")
    environment = {**os.environ, ENV: str(found.path.absolute())}
    hooks = f"rlprobe.frameworks.{found.framework}"
    if found.framework == "verl":
        modules = [m for m in environment.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m]
        if hooks not in modules:
            environment["VERL_USE_EXTERNAL_MODULES"] = ",".join([*modules, hooks])
    os.execvpe(command[0], command, environment)


def _check(found: Switch) -> None:
    """Say what is wrong with the file now, and not in the log of a training that has begun.

    Raises:
        ConfigError: a key or value of it is not accepted.
    """
    if found.kind == "collector":
        from rlprobe.capture import collector

        collector.read(found.path)
    elif found.kind == "msprobe":
        from rlprobe.frameworks.slime import user_config

        user_config.session(found.path)
