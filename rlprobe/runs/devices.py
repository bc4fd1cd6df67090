"""The device table: what each kind of device needs of a host, a container and an environment.

One place for the names that vendors chose. Determinism variables are a table of their own, because
they are applied inside every training process: :mod:`rlprobe.capture.determinism`.

Sources: Huawei's CANN environment variable reference (HCCL_*, ASCEND_*, set_env.sh, editions 8.0 to
9.1) and its list of what Ascend Docker Runtime mounts; NVIDIA's NCCL user guide (environment
variables) and container toolkit; PyTorch's distributed documentation (GLOO_SOCKET_IFNAME); Ray's
accelerator support page and ``ray._private.accelerators``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlprobe.errors import ConfigError, RunError

CPU = "cpu"
CUDA = "cuda"
NPU = "npu"


@dataclass(frozen=True)
class SetEnv:
    """A vendor's script that sets up library paths; the first that exists is sourced."""

    #: Set by the script; where it is set already, outside a container, the script is left alone.
    variable: str
    #: Candidates, newest layout first.
    scripts: tuple[str, ...]


@dataclass(frozen=True)
class Device:
    """One kind of device."""

    kind: str
    #: Environment variable that limits a process to some devices.
    visible: str | None
    #: Name of Ray's resource for one device.
    ray_resource: str | None
    #: Tells Ray not to set ``visible`` per actor. rlprobe clears it: verl counts on Ray's setting,
    #: and slime sets it itself on the actors that need it.
    ray_noset: str | None
    #: Pattern of the device nodes, one per device.
    node_pattern: str | None
    #: Further device nodes a process needs.
    control_nodes: tuple[str, ...] = ()
    #: Host files and directories that the image must take from the host, because they belong to
    #: the driver. Those that a host lacks are left out.
    host_paths: tuple[str, ...] = ()
    set_env: tuple[SetEnv, ...] = ()
    #: Command that lists the devices of a host.
    list_command: tuple[str, ...] = ()


DEVICES: dict[str, Device] = {
    CPU: Device(kind=CPU, visible=None, ray_resource=None, ray_noset=None, node_pattern=None),
    CUDA: Device(
        kind=CUDA,
        visible="CUDA_VISIBLE_DEVICES",
        ray_resource="GPU",
        ray_noset="RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        node_pattern="nvidia[0-9]*",
        # Driver files and control nodes are the runtime's business (--nv, --gpus).
        list_command=("nvidia-smi", "-L"),
    ),
    NPU: Device(
        kind=NPU,
        visible="ASCEND_RT_VISIBLE_DEVICES",
        ray_resource="NPU",
        ray_noset="RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        node_pattern="davinci[0-9]*",
        control_nodes=("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
        host_paths=(
            "/usr/local/Ascend/driver",
            "/usr/local/dcmi",
            "/usr/local/bin/npu-smi",
            "/usr/local/sbin/npu-smi",
            "/etc/ascend_install.info",
            "/etc/hccn.conf",
        ),
        set_env=(
            SetEnv(
                "ASCEND_TOOLKIT_HOME",
                (
                    "/usr/local/Ascend/cann/set_env.sh",  # from CANN 8.5
                    "/usr/local/Ascend/ascend-toolkit/set_env.sh",
                    "/usr/local/Ascend/nnae/set_env.sh",
                ),
            ),
            SetEnv("ATB_HOME_PATH", ("/usr/local/Ascend/nnal/atb/set_env.sh",)),
        ),
        list_command=("npu-smi", "info", "-l"),
    ),
}


def get(kind: str) -> Device:
    """The table's row of a device kind.

    Raises:
        ConfigError: no such kind.
    """
    try:
        return DEVICES[kind]
    except KeyError:
        raise ConfigError(
            f"device: found {kind!r}; accepted: {', '.join(sorted(DEVICES))}"
        ) from None


def communication(kind: str, interface: str | None, address: str | None) -> dict[str, str]:
    """Variables that keep collective communication on one network interface.

    Args:
        kind: the device kind.
        interface: the configured interface, None where the libraries choose.
        address: this node's address on it; HCCL alone asks for one, and it differs per node.
    """
    variables: dict[str, str] = {}
    if interface is not None:
        # gloo carries host-side collectives on every device; it takes bare names. NCCL and HCCL
        # take prefixes, so that eth1 would also mean eth10: "=" asks for the exact name.
        variables["GLOO_SOCKET_IFNAME"] = interface
        if kind == CUDA:
            variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
        if kind == NPU:
            variables["HCCL_SOCKET_IFNAME"] = f"={interface}"
    if kind == NPU:
        if address is not None:
            variables["HCCL_IF_IP"] = address
        # Ranks enter the first collective minutes apart where kernels are compiled on first use;
        # the default of 120 s ends such runs. 7200 is the largest accepted.
        variables["HCCL_CONNECT_TIMEOUT"] = "1800"
        # The default is a fixed range from 60000 on, where a second run on the host would collide.
        variables["HCCL_HOST_SOCKET_PORT_RANGE"] = "auto"
    return variables


def device_nodes(kind: str, root: Path = Path("/dev")) -> list[str]:
    """The nodes of the devices present on this host, in the order of their numbers."""
    pattern = get(kind).node_pattern
    if pattern is None:
        return []
    numbered = [
        (int(found.group()), path)
        for path in root.glob(pattern)
        if (found := re.search(r"[0-9]+$", path.name))
    ]
    return [str(path) for _, path in sorted(numbered)]


def require(kind: str, count: int = 1, root: Path = Path("/dev")) -> None:
    """Refuse to start anything on a host that lacks the devices a run needs.

    Raises:
        RunError: says what was looked for, and what there is.
    """
    row = get(kind)
    if row.node_pattern is None:
        return
    present = len(device_nodes(kind, root))
    # WSL shows every GPU as one node of another name
    if present >= count or (kind == CUDA and (root / "dxg").exists()):
        return
    raise RunError(
        f"device: {kind}, but {os.uname().nodename} has {present or 'none'} of the {count} that a "
        f"run needs: {root}/{row.node_pattern} matches {present or 'nothing'}. Run it on a machine "
        "that has them (resources.partition where a scheduler places runs), or correct device and "
        "world_size"
    )


def visible_devices(
    kind: str,
    environ: Mapping[str, str],
    *,
    requested: int | None,
    present: int,
    allocated: str | None = None,
) -> str | None:
    """Value of the visible-device variable for a job, or None to leave every device visible.

    Slurm sets CUDA_VISIBLE_DEVICES by itself. For NPUs it sets nothing, and where the site counts
    them without listing their device files it does not even know which ones a job got.

    Args:
        kind: the device kind.
        environ: the job's environment.
        requested: devices per node that the job asked for (gres), None for the whole node.
        present: devices of this node.
        allocated: indices that the scheduler names for this node, as ``0-3,6``; None if it names
            none.

    Raises:
        ConfigError: the job holds a part of the node, and nothing says which part.
    """
    variable = get(kind).visible
    if variable is None:
        return None
    if environ.get(variable):
        return environ[variable]
    if allocated:
        return ",".join(str(index) for index in expand_indices(allocated))
    if requested is None or requested >= present:
        return None
    raise ConfigError(
        f"gres asks for {requested} of this node's {present} {kind} devices, but the scheduler "
        f"does not say which: ask for all {present} (or gres: null with exclusive: true), have "
        f"the site list the device files in gres.conf, or set {variable} in environment"
    )


def expand_indices(text: str) -> list[int]:
    """The numbers that ``0-3,6`` stands for.

    Raises:
        ConfigError: the text has another form.
    """
    if not re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text):
        raise ConfigError(f"found {text!r} as a list of device indices; accepted: as 0-3,6")
    indices: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        indices += range(int(first), int(last or first) + 1)
    return indices
