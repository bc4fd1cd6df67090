"""What one node of the cluster finds: store, devices, image. Runs as a short job.

    python -m rlprobe.doctor.node --config F --side target --token PATH

Prints one JSON line per item.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rlprobe.config import Alignment, DeviceSection, load
from rlprobe.doctor import storage
from rlprobe.doctor.item import Item, fail, ok, warn
from rlprobe.errors import RlprobeError
from rlprobe.runs import containers, devices, nodelocal, resources

_GIB = 1 << 30
#: Ray's logs and spilled objects, and compile caches.
_LEAST_NODE_TMP = 5 * _GIB
_VERSIONS = (
    "import importlib.metadata as m, json; print(json.dumps("
    "{d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}))"
)


def look(alignment: Alignment, key: str, token: Path) -> Iterator[Item]:
    """Items about the node this runs on.

    Args:
        alignment: the alignment.
        key: benchmark or target.
        token: a file that the doctor wrote into the store's directory just now.
    """
    side: DeviceSection = getattr(alignment, key)
    if not token.exists():
        yield fail(
            "shared storage",
            f"{token.parent} is not the directory that the login node sees",
            "put the store on a file system that every partition mounts at the same path",
        )
        return
    yield ok("shared storage", f"{token.parent} is the login node's")
    yield storage.hard_link(token.parent)
    yield from _devices(key, side)
    job = nodelocal.job_id()
    local = nodelocal.of_job(job)
    local.make()
    try:
        free = shutil.disk_usage(local.root).free
        text = f"{local.root.parent}: {free / _GIB:.1f} GiB free"
        if free < _LEAST_NODE_TMP:
            yield warn("node disk", text, f"set {nodelocal.BASE_ENV} to a larger local disk")
        else:
            yield ok("node disk", text)
        yield from _image(alignment, key, side, job, token.parent)
    finally:
        local.remove()


def _devices(key: str, side: DeviceSection) -> Iterator[Item]:
    row = devices.get(side.device)
    if row.node_pattern is None:
        return
    present = devices.device_nodes(side.device)
    wanted = side.world_size // side.resources.nodes
    if len(present) < wanted:
        yield fail(
            f"{key} devices",
            f"/dev/{row.node_pattern} matches {len(present)}, {wanted} needed",
            "check resources.partition and the driver (npu-smi info, nvidia-smi)",
        )
        return
    visible = resources.visible(side.device, side.resources)
    shown = f"{len(present)} present, visible: {next(iter(visible.values()), 'all')}"
    yield ok(f"{key} devices", shown)
    if shutil.which(row.list_command[0]):
        done = subprocess.run(row.list_command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield fail(f"{key} devices", f"{' '.join(row.list_command)} fails", "repair the driver")


def _image(
    alignment: Alignment, key: str, side: DeviceSection, job: str, scratch: Path
) -> Iterator[Item]:
    """Start the side's container for real and ask it for versions."""
    python = sys.executable if side.container.runtime == "none" else "python"
    argv = containers.wrap(
        [python, "-c", _VERSIONS], {}, side.container, side.device, [], job, scratch
    )
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield fail(f"{key} container", f"does not start: {last}", f"try it: {argv[0]} …")
        return
    versions = {name.lower(): version for name, version in json.loads(done.stdout).items()}
    found = versions.get(alignment.framework)
    wanted = alignment.version(side)
    if found is None or found.lstrip("v") != wanted.lstrip("v"):
        yield fail(
            f"{key} container",
            f"{alignment.framework} in it is {found}, framework_version says {wanted}",
            "correct framework_version, or use the image of that version",
        )
    else:
        yield ok(f"{key} container", f"starts; {alignment.framework} {found}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlprobe.doctor.node")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--side", choices=("benchmark", "target"), required=True)
    parser.add_argument("--token", type=Path, required=True)
    given = parser.parse_args()
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    try:
        for item in look(load(given.config), given.side, given.token):
            print(json.dumps({**item.to_dict(), "node": name}))
    except RlprobeError as error:
        item = fail(given.side, str(error), "see the message")
        print(json.dumps({**item.to_dict(), "node": name}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
