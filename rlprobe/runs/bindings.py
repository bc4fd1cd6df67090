"""Which host paths a run reads, so that its container is given them.

Models, data and files that the alignment names by keys of their own always are. Framework options
and variables may name paths as well (a checkpoint to load, a recipe on PYTHONPATH): whatever in
them is an absolute path that this host has is bound too, under its own name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from rlprobe.config import BUILTIN
from rlprobe.spec import RunSpec

_log = logging.getLogger("rlprobe")
#: An absolute path within an option's value; not the path of an URL.
_PATH = re.compile(r"(?<![\w.$}:/~-])/[\w./+@=-]*[\w+@=-]")
#: Where an image has its own: the host's would stand in their place.
_OF_THE_IMAGE = tuple(
    Path(name)
    for name in (
        "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin",
        "/sys", "/tmp", "/usr", "/var",
    )
)  # fmt: skip


#: Of these, what every run has anew: a host's file in them is none of the image's.
_OF_THE_RUN = (Path("/tmp"), Path("/var/tmp"))
_AT_HOME = re.compile(r"(?<![\w.$}:/~-])~/[\w./+@=-]*[\w+@=-]")


def paths(spec: RunSpec) -> Iterator[str]:
    """What the run reads beside the store and the working directory."""
    given = [*spec.model.paths().values(), *spec.data.train_files, *(spec.data.val_files or ())]
    yield from (path for path in given if not path.startswith(BUILTIN))
    if spec.resume_from is not None:
        yield spec.resume_from
    if spec.rollouts is not None:
        yield spec.rollouts
    for reference in (spec.data.reward_function, spec.fault):
        if reference is not None:
            yield str(Path(reference.rpartition(":")[0]).expanduser().absolute().parent)
    entry = spec.entry_point
    if entry is not None:
        if entry.script is not None:
            yield str(Path(entry.script).expanduser().absolute().parent)
        if entry.config_path is not None:
            yield entry.config_path
    yield from _named(spec)


def _named(spec: RunSpec) -> Iterator[str]:
    """Paths in options and variables, as far as this host has them."""
    texts = [*spec.overrides, *(f"{k}={v}" for k, v in spec.environment.items())]
    for text in texts:
        name, _, value = text.partition("=")
        value = value if value else name
        if spec.container.runtime != "none":
            _warn(name, value)
        for found in in_text(value):
            path = Path(found)
            if path == Path("/") or _within(path, _OF_THE_IMAGE):
                continue
            if path.exists():
                yield found
            elif path.parent.exists() and path.parent != Path("/"):
                _log.debug(
                    "%s names %s, which is not there yet; its directory is bound", name, path
                )
                yield str(path.parent)
            elif spec.container.runtime != "none":
                _log.info(
                    "%s names %s, which this host does not have: the image must have it", name, path
                )


def _warn(name: str, value: str) -> None:
    """Paths that lead elsewhere in a container than they do here."""
    for found in in_text(value):
        if _within(Path(found), _OF_THE_RUN) and Path(found).exists():
            _log.warning(
                "%s names %s: a run in a container has a /tmp of its own, without it; put it on "
                "storage that the run's nodes see",
                name, found,
            )  # fmt: skip
    for found in _AT_HOME.findall(value):
        _log.warning(
            "%s names %s: a run in a container has another home; give the whole path, which is "
            "then bound",
            name, found,
        )  # fmt: skip


def _within(path: Path, places: tuple[Path, ...]) -> bool:
    return any(path == place or place in path.parents for place in places)


def in_text(value: str) -> list[str]:
    """The absolute paths in an option's value: alone, in a list, between colons, after ``=``."""
    pieces = re.split(r":(?=/(?!/))", value)
    return [found for piece in pieces for found in _PATH.findall(piece)]
