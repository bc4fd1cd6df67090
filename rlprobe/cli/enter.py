"""``rlprobe enter``: a command inside the analysis image of an alignment."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

from rlprobe.cli.common import given_path


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "enter",
        help="run a command of rlprobe's in an alignment's analysis image (docker, pyxis)",
        description="Run one of rlprobe's commands inside the image that the alignment's analysis "
        "section names, with the store, the results and the working directory under their own "
        "names. The workflow's analysis jobs call it where analysis.runtime is docker or pyxis.",
    )
    parser.add_argument(
        "--config", type=given_path, required=True, help="the alignment's YAML file"
    )
    parser.add_argument(
        "--torch", action="store_true", help="the image with torch (analysis.torch_image)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def run(args: argparse.Namespace) -> int:
    from rlprobe.config import ContainerSection, load
    from rlprobe.errors import ConfigError, UsageError
    from rlprobe.runs import containers, nodelocal

    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if words[:1] == ["rlprobe"]:
        words = words[1:]
    if not words:
        raise UsageError("no command given; write: rlprobe enter --config FILE -- compare A B -o C")
    alignment = load(args.config)
    analysis = alignment.analysis
    key = "torch_image" if args.torch else "image"
    image = getattr(analysis, key)
    if image is None:
        raise ConfigError(f"analysis.{key}: nothing found; accepted: the image to enter")
    results = Path(alignment.results)
    results.mkdir(parents=True, exist_ok=True)
    binds = [str(path) for path in (Path(alignment.store), results) if path.exists()]
    job = nodelocal.job_id()
    local = nodelocal.of_job(job)
    local.make()
    local.own()
    container = ContainerSection(runtime=analysis.runtime, image=image)
    try:
        argv = containers.wrap(
            ["python", "-m", "rlprobe", *words], {}, container, "cpu", binds, job, results
        )
        return subprocess.run(argv, check=False).returncode
    finally:
        try:
            containers.stop(container, job)
        finally:
            local.remove()
