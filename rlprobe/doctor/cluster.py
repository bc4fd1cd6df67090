"""Do the partitions, devices, nodes and limits that an alignment asks for exist?"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from rlprobe.config import ResourcesSection
from rlprobe.doctor.item import Item, fail, ok, skip, warn
from rlprobe.errors import RunError
from rlprobe.runs import slurm


@dataclass(frozen=True)
class _Node:
    name: str
    gres: str
    cpus: int
    memory_mib: int
    features: frozenset[str]
    state: str


def look(sections: dict[str, ResourcesSection]) -> Iterator[Item]:
    """Items about Slurm for each section of the alignment that names a partition.

    Args:
        sections: resources by the key they stand under, as ``target``.
    """
    wanted = {key: section for key, section in sections.items() if section.partition is not None}
    if not wanted:
        yield skip("slurm", "no section names a partition: everything runs on this machine")
        return
    if not shutil.which("sinfo"):
        yield fail("slurm", "sinfo is not on PATH", "run the doctor on a login node of the cluster")
        return
    try:
        partitions = set(slurm.query("sinfo", "--noheader", "--format=%R").split())
        for key, section in wanted.items():
            yield from _partition(f"{key}.resources", section, partitions)
        yield _status_command()
    except RunError as error:
        yield fail("slurm", str(error), "ask the site whether Slurm is up")


def _status_command() -> Item:
    if shutil.which("sacct"):
        try:
            slurm.query("sacct", "--noheader", "--allocations")
        except RunError:
            return ok("slurm accounting", "off; the profiles ask squeue instead of sacct")
        return ok("slurm accounting", "sacct answers")
    return ok("slurm accounting", "no sacct; the profiles ask squeue")


def _partition(key: str, section: ResourcesSection, partitions: set[str]) -> Iterator[Item]:
    name = str(section.partition)
    if name not in partitions:
        yield fail(
            f"{key}.partition",
            f"{name} does not exist",
            f"use one of {', '.join(sorted(partitions))}",
        )
        return
    nodes = _nodes(name)
    usable = [node for node in nodes if not re.match(r"(down|drain|fail|maint)", node.state)]
    text = f"{name} has {len(usable)} of {len(nodes)} nodes up"
    if len(usable) < section.nodes:
        yield fail(f"{key}.nodes", f"{text}, {section.nodes} asked for", "ask for fewer nodes")
        return
    yield ok(f"{key}.partition", text)
    yield from _gres(key, section, usable)
    yield from _limits(key, section, name, usable)


def _gres(key: str, section: ResourcesSection, nodes: list[_Node]) -> Iterator[Item]:
    if section.gres is None:
        offered = sorted({gres for node in nodes for gres in _offers(node)})
        if offered and not section.exclusive:
            yield warn(
                f"{key}.gres",
                f"null, and the partition offers {', '.join(offered)}",
                "ask for what the run needs, or for whole nodes with exclusive: true",
            )
        return
    kind, _, count = section.gres.rpartition(":")
    enough = [node for node in nodes if _offers(node).get(kind, 0) >= int(count)]
    if len(enough) >= section.nodes:
        yield ok(f"{key}.gres", f"{section.gres} on {len(enough)} node(s)")
        return
    offered = sorted({f"{k}:{v}" for node in nodes for k, v in _offers(node).items()})
    yield fail(
        f"{key}.gres",
        f"{section.gres} is on {len(enough)} node(s), {section.nodes} needed; the partition "
        f"offers {', '.join(offered) or 'no gres at all'}",
        "use what is offered" if offered else "set gres: null and exclusive: true",
    )


def _limits(
    key: str, section: ResourcesSection, partition: str, nodes: list[_Node]
) -> Iterator[Item]:
    for what, wanted, largest in (
        ("cpus", section.cpus, max(node.cpus for node in nodes)),
        ("memory", section.memory_mib, max(node.memory_mib for node in nodes)),
    ):
        if wanted is not None and wanted > largest:
            unit = " MiB" if what == "memory" else ""
            yield fail(
                f"{key}.{what}",
                f"{wanted}{unit} asked for, nodes have {largest}{unit}",
                "ask for less",
            )
    if section.constraint is not None:
        # A boolean expression is Slurm's to judge; a plain feature is looked up.
        plain = re.fullmatch(r"[A-Za-z0-9_.-]+", section.constraint)
        features = {feature for node in nodes for feature in node.features}
        if plain and section.constraint not in features:
            yield fail(
                f"{key}.constraint",
                f"no node has {section.constraint}",
                f"use one of {', '.join(sorted(features)) or 'none (leave it out)'}",
            )
    limit = _minutes(slurm.query("sinfo", "--noheader", "--partition", partition, "--format=%l"))
    if section.minutes is not None and limit is not None and section.minutes > limit:
        yield fail(
            f"{key}.time",
            f"{section.time} asked for, the partition ends jobs after {limit} min",
            "ask for less time",
        )


def _nodes(partition: str) -> list[_Node]:
    shown = slurm.query(
        "sinfo", "--noheader", "--Node", "--partition", partition, "--format=%N|%G|%c|%m|%f|%t"
    )
    found = []
    for line in shown.splitlines():
        name, gres, cpus, memory, features, state = line.split("|")
        found.append(
            _Node(
                name,
                gres,
                int(cpus),
                int(memory),
                frozenset(features.split(",")) - {"(null)"},
                state,
            )
        )
    return found


def _offers(node: _Node) -> dict[str, int]:
    """gres without its count -> count; ``npu:ascend910b:8(S:0-1)`` counts as npu as well."""
    offers: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", node.gres).split(","):
        kind, _, count = part.rpartition(":")
        if kind and count.isdigit():
            offers[kind] = offers.get(kind, 0) + int(count)
            bare = kind.partition(":")[0]
            if bare != kind:
                offers[bare] = offers.get(bare, 0) + int(count)
    return offers


def _minutes(text: str) -> int | None:
    """Slurm's ``[days-]hours:minutes:seconds`` in minutes; None for no limit."""
    found = re.fullmatch(
        r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.split()[0] if text.split() else ""
    )
    if found is None:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes


def requested(section: ResourcesSection) -> list[str]:
    """Options of srun that ask for what a run of this section will get."""
    terms = {
        "--partition": section.partition,
        "--gres": section.gres,
        "--nodes": str(section.nodes),
        "--ntasks": str(section.nodes),
        "--account": section.account,
        "--constraint": section.constraint,
        "--qos": section.qos,
    }
    options = [f"{option}={value}" for option, value in terms.items() if value is not None]
    if section.exclusive:
        options.append("--exclusive")
    return [*options, *(section.extra or "").split()]
