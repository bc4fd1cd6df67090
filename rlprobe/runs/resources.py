"""What a run asks the scheduler for, and whether it can work with what it asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlprobe.config import DeviceSection, ResourcesSection
from rlprobe.errors import ConfigError
from rlprobe.runs import devices, slurm


def snakemake(resources: ResourcesSection) -> dict[str, Any]:
    """In the terms of Snakemake's Slurm executor; what is not given is left out.

    Slurm gives a job of one task one node, whatever nodes says: several nodes get a task each. Jobs
    with GPUs are the exception, because the executor turns their tasks into tasks per GPU, and
    leaves the number of tasks to Slurm, which then takes one a node.
    """
    extra = [resources.extra] if resources.extra else []
    if resources.exclusive:
        extra.append("--exclusive")
    several = resources.nodes > 1
    executor_sees_gpus = "gpu" in (resources.gres or "")
    terms: dict[str, Any] = {
        "slurm_partition": resources.partition,
        "gres": resources.gres,
        "nodes": resources.nodes if several else None,
        "tasks": resources.nodes if several and not executor_sees_gpus else None,
        "cpus_per_task": resources.cpus,
        "mem_mb": resources.memory_mib,
        "runtime": resources.minutes,
        "slurm_account": resources.account,
        "constraint": resources.constraint,
        "qos": resources.qos,
        "slurm_extra": " ".join(extra) or None,
    }
    return {key: value for key, value in terms.items() if value is not None}


def check(side: DeviceSection, key: str) -> None:
    """Refuse requests that can only fail, before anything is queued.

    Args:
        side: the benchmark's or the target's section.
        key: where it stands in the alignment, for messages.

    Raises:
        ConfigError: names the key, what was found and what is accepted.
    """
    resources = side.resources
    where = f"{key}.resources"
    if side.world_size % resources.nodes:
        raise ConfigError(
            f"{where}.nodes: found {resources.nodes}; accepted: a divisor of {key}.world_size "
            f"({side.world_size}), because every node gets as many processes"
        )
    if resources.nodes > 1 and resources.interface == "lo":
        raise ConfigError(
            f"{where}.interface: found lo for {resources.nodes} nodes, which reach nobody by it; "
            "accepted: the interface between them, or null to have it found on each node"
        )
    if resources.partition is None or side.device == devices.CPU:
        return
    per_node = side.world_size // resources.nodes
    granted = gres_count(resources)
    if granted is None and not resources.exclusive:
        raise ConfigError(
            f"{where}.gres: found null on partition {resources.partition} without exclusive: "
            f"true, so that the job would share its {side.device} devices with others; accepted: "
            f"gres (as {side.device.replace('cuda', 'gpu')}:{per_node}), or exclusive: true where "
            "the site has no such resource"
        )
    if granted is not None and granted < per_node:
        raise ConfigError(
            f"{where}.gres: found {resources.gres}; accepted: at least {per_node} devices per "
            f"node, because {key}.world_size {side.world_size} over {resources.nodes} node(s) "
            f"makes {per_node} processes on each"
        )


def gres_count(resources: ResourcesSection) -> int | None:
    """Devices per node that the job asks for; None where it asks for none by name."""
    return None if resources.gres is None else int(resources.gres.rpartition(":")[2])


def visible(
    device: str, resources: ResourcesSection, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The visible-device variable of a job on this node; empty where all devices are its own.

    Raises:
        ConfigError: the job holds a part of the node, and nothing says which part.
        RunError: Slurm could not be asked.
    """
    variable = devices.get(device).visible
    requested = gres_count(resources)
    if variable is None or "SLURM_JOB_ID" not in environ:
        return {}
    allocated = None
    if requested is not None and resources.gres is not None and not environ.get(variable):
        allocated = slurm.allocated_devices(resources.gres.partition(":")[0], environ)
    value = devices.visible_devices(
        device,
        environ,
        requested=requested,
        present=len(devices.device_nodes(device)),
        allocated=allocated,
    )
    return {} if value is None else {variable: value}
