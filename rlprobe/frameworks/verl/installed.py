"""The installed verl: its version, and whether every hook point of it could be wrapped."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from rlprobe.errors import HookError
from rlprobe.frameworks.verl import versions

#: Hook points that could not be wrapped in this process.
_missing: list[str] = []


def version() -> str:
    """Installed version of verl, for messages and the check of the alignment's."""
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError:
        return "(not installed as a package)"


def missing(reason: str) -> None:
    """Note that a hook point could not be wrapped."""
    _missing.append(reason)


def require_all() -> None:
    """Refuse to go on when a hook point could not be wrapped.

    Raises:
        HookError: names verl's version and each hook that is missing.
    """
    if _missing:
        raise HookError("; ".join(_missing))


def require_version() -> str:
    """Refuse a verl that lacks a hook point, also in a module not imported yet; its version.

    Raises:
        HookError: names verl's version and each hook that is missing.
    """
    import verl

    root = Path(verl.__file__).parent if verl.__file__ else None
    versions.require(version(), root)
    require_all()
    return version()
