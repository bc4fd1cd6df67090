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
from typing import Any

from rlprobe import frameworks
from rlprobe.capture import determinism
from rlprobe.config import Alignment, DeviceSection, load
from rlprobe.doctor import storage
from rlprobe.doctor.item import Item, fail, ok, skip, warn
from rlprobe.errors import RlprobeError
from rlprobe.runs import containers, devices, nodelocal, resources

_GIB = 1 << 30
#: Ray's logs and spilled objects, and compile caches.
_LEAST_NODE_TMP = 5 * _GIB
#: Imports of a framework on a cold file system, and the compilation of a first collective.
_PROBE_S = 900


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
        yield from _image(alignment, key, side, job, _given(token.parent))
    finally:
        local.remove()


def _given(store: Path) -> Path:
    """What the side's container is given in the store's place while that is still to be made.

    Of a path of which nothing is there yet the root is what exists, and no container is given that.
    """
    return Path.cwd() if store == Path(store.root) else store


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


def here(alignment: Alignment, key: str) -> Iterator[Item]:
    """Items about this machine as the node of a side that no scheduler places."""
    side: DeviceSection = getattr(alignment, key)
    failed = False
    for item in _devices(key, side):
        failed = failed or item.state == "fail"
        yield item
    if failed:
        yield skip(
            f"{key} imports, product and collective",
            "not tried: runs are refused on a machine without the devices",
        )
        return
    job = nodelocal.job_id()
    local = nodelocal.of_job(job)
    local.make()
    try:
        yield from _image(alignment, key, side, job, Path.cwd())
    finally:
        local.remove()


def _image(
    alignment: Alignment, key: str, side: DeviceSection, job: str, scratch: Path
) -> Iterator[Item]:
    """Start the side's container for real, and have it import, compute and communicate."""
    python = sys.executable if side.container.runtime == "none" else "python"
    words = [python, "-m", "rlprobe.capture.probe", "--device", side.device]
    words += ["--framework", alignment.framework, "--precision", side.precision]
    words += ["--devices", str(side.world_size // side.resources.nodes)]
    environment = {
        **(determinism.environment(side.device) if alignment.deterministic else {}),
        **devices.communication(side.device, side.resources.interface, None),
        **resources.visible(side.device, side.resources),
        **side.environment,
    }
    if side.device == devices.CPU:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    argv = containers.wrap(words, environment, side.container, side.device, [], job, scratch)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        yield fail(
            f"{key} container", f"did not answer within {_PROBE_S} s", f"try it: {argv[0]} …"
        )
        return
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"checks"')]
    if done.returncode or not answers:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield fail(f"{key} container", f"does not start: {last}", f"try it: {argv[0]} …")
        return
    yield ok(f"{key} container", "starts" if side.container.image else "this environment")
    for check in json.loads(answers[-1])["checks"]:
        yield _answer(alignment, key, side, check)


def _answer(alignment: Alignment, key: str, side: DeviceSection, check: dict[str, Any]) -> Item:
    """One answer of the probe, the framework's version held against the alignment's."""
    name, found = f"{key} {check['name']}", str(check["found"])
    if not check["ok"]:
        return fail(name, found, _REMEDY.get(str(check["name"]), _IMPORT))
    wanted = alignment.version(side)
    versioned = check["name"] == f"import {alignment.framework}"
    if versioned and not frameworks.get(alignment.framework).same_version(wanted, found):
        return fail(
            name,
            f"{found}, framework_version says {wanted}",
            "correct framework_version, or use the image of that version",
        )
    return ok(name, found)


_IMPORT = "install it in the environment or image of this side, or load what it needs (set_env.sh)"
_REMEDY = {
    "cpu devices": "look at the machine",
    "cuda devices": "nvidia-smi; visible devices; a driver that fits this torch",
    "npu devices": "npu-smi info; ASCEND_RT_VISIBLE_DEVICES; a driver that fits CANN",
    "product": "the device or its libraries are broken, or CANN and torch_npu do not fit",
    "collective": "resources.interface; the driver's links between devices; HCCL's or NCCL's log",
}


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
