"""The code that a side's runs import, as far as the scheduling host can read it.

Part of a run's key where the declared version does not say it all. Code inside an image cannot be
read here: an image file counts by its content, a tag by its name, and the run records what it
really imported, which the gate compares.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from rlprobe.capture import code
from rlprobe.config import DeviceSection, EntryPointSection

#: Distribution -> the package that it brings.
_PACKAGES = {"verl": "verl", "slime": "slime"}


def of(framework: str, side: DeviceSection, entry: EntryPointSection | None) -> dict[str, str]:
    """Digests by name; empty where versions say everything that this host can know.

    Args:
        framework: the alignment's.
        side: the benchmark's or the target's section.
        entry: where training starts.
    """
    given = [Path(p) for p in side.environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    found = {}
    for number, path in enumerate(given):
        made = code.digest(path) if path.is_dir() else None
        if made is not None:
            found[f"PYTHONPATH[{number}]"] = made
    if framework == "slime":
        checkout = side.environment.get("RLPROBE_SLIME")
        place = Path(checkout).expanduser() if checkout else None
        made = code.digest(place) if place is not None and place.is_dir() else None
        if made is not None:
            found["RLPROBE_SLIME"] = made
    if side.container.runtime != "none":
        return found
    inherited = [Path(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    names = {_PACKAGES[framework]}
    if entry is not None and entry.module is not None:
        names.add(entry.module.partition(".")[0])
    for name in sorted(names):
        made = _package(name, [*given, *inherited])
        if made is not None:
            found[name] = made
    return found


def _package(name: str, first: list[Path]) -> str | None:
    """Digest of a top-level package that is not as an index gave it; None for one that is, or that
    is not here."""
    spec = PathFinder.find_spec(name, [str(path) for path in first]) if first else None
    on_path = spec is not None and spec.origin is not None
    if not on_path:
        spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if not on_path and _untouched(name):
        return None
    if spec.submodule_search_locations:
        return code.digest(Path(next(iter(spec.submodule_search_locations))))
    return None if spec.origin is None else code.digest(Path(spec.origin))


def _untouched(name: str) -> bool:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return code.untouched(distribution)
