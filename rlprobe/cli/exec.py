"""``rlprobe exec``: any framework command line with the hooks on."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlprobe.cli.common import given_path, write_json
from rlprobe.terminal import counted

if TYPE_CHECKING:
    from rlprobe.frameworks.switch import Switch

_log = logging.getLogger("rlprobe")
#: Where a recording without a collector's file goes.
_DUMP = Path("rlprobe_dump")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "exec",
        help="run any framework command line with the hooks on",
        description="Run a framework's own command line, or a script that holds one, with "
        "rlprobe's hooks switched on in every process. Without --collector the light engine "
        "records every training stage of the first step; a command in which nothing was recorded "
        "fails.",
    )
    parser.add_argument(
        "--collector",
        type=given_path,
        metavar="FILE",
        help="precision_collector.yaml (verl) or msprobe's config.json (slime), which says what is "
        "recorded and where",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=given_path,
        metavar="DIR",
        help=f"without --collector: where the recording goes (./{_DUMP})",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD")


def run(args: argparse.Namespace) -> int:
    from rlprobe.errors import UsageError
    from rlprobe.frameworks import switch

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("no command given; write: rlprobe exec -- CMD…")
    if shutil.which(command[0]) is None:
        script = Path(command[0]).is_file()
        raise UsageError(
            f"{command[0]} is a file that may not be executed; write: rlprobe exec -- bash "
            f"{command[0]}, or whatever reads it"
            if script
            else f"{command[0]} is not an executable on PATH"
        )
    if args.collector is not None:
        if args.output is not None:
            raise UsageError("--output: the file of --collector says where its dump goes")
        found = switch.read(args.collector, "--collector")
        _check(found)
        os.execvpe(command[0], command, _environment(found.path, found.frameworks))
    return _recorded(args, command)


def _recorded(args: argparse.Namespace, command: list[str]) -> int:
    """Run the command to its end, and say what was recorded."""
    from rlprobe.capture.session import ENV
    from rlprobe.errors import RunError, UsageError
    from rlprobe.frameworks import plain
    from rlprobe.runs import process

    output: Path = args.output or _DUMP
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(
            f"{output} is there already: recordings are not mixed; move it away, or give another "
            "directory with --output"
        )
    file = plain.write(output)
    status = process.attached(command, _environment(file, ("verl", "slime")))
    found = plain.recorded(output)
    # "nohup … &", or a Ray that the script started and left
    living = process.holding(ENV, str(file.absolute()))
    if not found and not living:
        plain.discard(output)
    if args.json:
        write_json(args.json, {"status": status, "directory": str(output), "stages": found})
    for stage, dumps in found.items():
        _log.info("recorded %s: %s", stage, counted(dumps, "dump"))
    if found:
        _log.info("the recording is in %s; compare two with `rlprobe compare A B -o OUT`", output)
    if living:
        _log.warning(
            "the command has ended and left %s with the hooks on (%s): what they train goes to %s",
            counted(len(living), "process", "processes"),
            ", ".join(map(str, living[:5])) + (", …" if len(living) > 5 else ""),
            output,
        )
    elif not found and status != 0 and output.exists():
        _log.warning(
            "the command ended with status %d before a stage was recorded whole; what it began is "
            "in %s: remove that before the next attempt, or give another directory with --output",
            status, output,
        )  # fmt: skip
    elif not found and status == 0:
        raise RunError(
            "the command ended well, and nothing was recorded: no trainer of verl or slime was "
            "built in a process that has rlprobe. Is rlprobe installed in the environment that "
            "trains (`python -c 'import rlprobe'` there, or inside the container that the script "
            "starts), and does the script keep RLPROBE_CONFIG?"
        )
    return status


def _environment(file: Path, frameworks: tuple[str, ...]) -> dict[str, str]:
    from rlprobe.capture.session import ENV

    environment = {**os.environ, ENV: str(file.absolute())}
    if "verl" in frameworks:
        hooks = "rlprobe.frameworks.verl"
        modules = [m for m in environment.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m]
        if hooks not in modules:
            environment["VERL_USE_EXTERNAL_MODULES"] = ",".join([*modules, hooks])
    return environment


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
