"""All questions about one alignment, in the order in which a wrong answer hurts."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rlprobe.config import Alignment, ResourcesSection, load
from rlprobe.doctor import cluster, node, software, storage
from rlprobe.doctor.item import Item, fail, ok, skip
from rlprobe.errors import ConfigError
from rlprobe.runs.jobs import Jobs


def examine(
    config: Path,
    *,
    on_cluster: bool = False,
    wait_s: int = 600,
    tried: bool = False,
    side: str | None = None,
) -> Iterator[Item]:
    """Look at an alignment's configuration, storage, scheduler and software.

    Args:
        config: the alignment's file.
        on_cluster: also start a short job on each side's partition and look from there.
        wait_s: how long such a job may wait in the queue.
        tried: also start the environment or image of each side that runs on this machine.
        side: ``benchmark`` or ``target``, where the rest of the alignment is another site's.

    Raises:
        ConfigError: the file itself is wrong; nothing else can be looked at then.
    """
    alignment = load(config)
    sections = _sections(alignment, side)
    of_software = software.look(alignment, sections)
    try:
        jobs = Jobs.load(config)
    except ConfigError as error:
        looked = list(of_software)
        of_software = iter(looked)
        yield from _problems(config, error, looked)
    else:
        roles = ", ".join(f"{role} {spec.key[:12]}" for role, spec in jobs.runs.items())
        yield ok("configuration", f"{config}: {roles}")
        for missing in jobs.missing_imports():
            yield fail("imported run", missing, jobs.how_to_import)
    yield from storage.look(alignment)
    yield from cluster.look(sections)
    yield from of_software
    if tried:
        for key in ("benchmark", "target"):
            section = sections.get(key)
            if section is not None and section.partition is None:
                yield from node.here(alignment, key)
    if on_cluster:
        yield from _from_the_nodes(config, alignment, sections, wait_s)


def _problems(config: Path, error: ConfigError, of_software: list[Item]) -> Iterator[Item]:
    """What is wrong in the file, less what an item about software says with what mends it."""
    said = {item.name for item in of_software if item.state == "fail"}
    left = [problem for problem in _each(error) if problem.partition(":")[0] not in said]
    for problem in left:
        yield fail("configuration", problem, f"correct {config}")
    if not left:
        yield skip("configuration", f"{config}: its runs have keys when the images below are there")


def _each(error: ConfigError) -> list[str]:
    """The problems that a message counts and lists, each by itself; else the message."""
    head, *lines = str(error).splitlines()
    counted = re.fullmatch(r"(?:.*: )?\d+ problems", head) is not None
    return [line.strip() for line in lines] if counted and lines else [str(error)]


def _sections(alignment: Alignment, side: str | None) -> dict[str, ResourcesSection]:
    """What each part of the alignment that is made at this site asks for."""
    sections = {
        "benchmark": alignment.benchmark.resources,
        "target": alignment.target.resources,
        "analysis": alignment.analysis.resources,
    }
    if alignment.benchmark.run is not None:
        del sections["benchmark"]
    return sections if side is None else {k: v for k, v in sections.items() if k == side}


def _from_the_nodes(
    config: Path, alignment: Alignment, sections: dict[str, ResourcesSection], wait_s: int
) -> Iterator[Item]:
    store = Path(alignment.store).expanduser().absolute()
    directory = next(path for path in (store, *store.parents) if path.exists())
    token = directory / f".rlprobe-doctor-{secrets.token_hex(8)}"
    try:
        token.touch()
    except OSError as error:  # what nobody can write here no job can be asked to see
        yield fail(
            "shared storage",
            f"{directory} cannot be written ({error.strerror}), and without a mark there the nodes "
            "are not looked at",
            f"make {store} on a file system that every partition mounts",
        )
        return
    try:
        for key in ("benchmark", "target"):
            section = sections.get(key)
            if section is None:
                continue  # another site's
            if section.partition is None:
                yield skip(f"{key} nodes", "no partition is named")
                continue
            yield from _one_job(config, key, section, token, wait_s)
    finally:
        token.unlink(missing_ok=True)


def _one_job(
    config: Path, key: str, section: ResourcesSection, token: Path, wait_s: int
) -> Iterator[Item]:
    command = ["srun", *cluster.requested(section), f"--immediate={wait_s}", "--time=10"]
    # where nodes are of another architecture, they have another Python (workflow/bin)
    python = os.environ.get("RLPROBE_PYTHON") or sys.executable
    command += ["--job-name=rlprobe-doctor", python, "-m", "rlprobe.doctor.node"]
    command += ["--config", str(config), "--side", key, "--token", str(token)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len({item["node"] for item in found}) < section.nodes:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield fail(
            f"{key} job",
            f"on partition {section.partition}: {last}",
            f"try it: {' '.join(command[:6])} … hostname (or a longer --wait)",
        )
    for item in found:
        yield Item(**item)
