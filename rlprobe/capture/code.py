"""Digests of Python code: of a package as it lies on a disk, and of what a process has imported.

A version says what code is only where it was installed from an index and left alone. An editable
checkout, a fork, a directory on PYTHONPATH and an edited file have the same version and other code.

Standard library only: used on the scheduling host and inside training processes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

#: What a package computes by; weights, data and compiled kernels are not code that is edited.
_SUFFIXES = (".py", ".yaml", ".yml", ".json", ".jinja", ".j2", ".toml", ".cu", ".cpp", ".h")
_LEFT_OUT = frozenset(("__pycache__", "node_modules", "site-packages"))
#: A tree of more files is somebody's home directory, and not a package.
MOST_FILES = 20_000
#: Frameworks whose code a run records whether or not it was edited.
FRAMEWORKS = ("verl", "slime", "megatron", "mindspeed")
_OURS = "rlprobe"


def digest(place: Path) -> str | None:
    """Digest of a package's directory, or of a module's file: names in it, and contents.

    Returns:
        64 hexadecimal digits; None where there is no code, or more files than any package has.
    """
    files = list(itertools.islice(_files(place), MOST_FILES + 1))
    if not files or len(files) > MOST_FILES:
        return None
    # a file that was not touched since is not read again in this process
    states = tuple((str(file), *_state(file)) for file in files)
    return _digest(place, states)


@functools.lru_cache(maxsize=64)
def _digest(place: Path, states: tuple[tuple[str, int, int], ...]) -> str:
    total = hashlib.sha256(b"rlprobe code 1\0")
    for name, _, _ in states:
        file = Path(name)
        relative = file.relative_to(place).as_posix() if place.is_dir() else file.name
        total.update(relative.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def _state(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_size, state.st_mtime_ns


def _files(place: Path) -> Iterator[Path]:
    """Code below a place, in order; rlprobe's own package, caches and hidden directories aside."""
    if place.is_file():
        yield place
        return
    walked: set[str] = set()
    for directory, inside, names in os.walk(place, followlinks=True):
        real = os.path.realpath(directory)
        if real in walked:
            inside.clear()  # a link that leads back
            continue
        walked.add(real)
        inside[:] = sorted(
            name
            for name in inside
            if name not in _LEFT_OUT
            and not name.startswith(".")
            and not name.endswith(".dist-info")
            and not (name == _OURS and Path(directory) == place)
            and (_of_a_package(directory, name) or not Path(directory, name).is_symlink())
        )
        for name in sorted(names):
            if name.endswith(_SUFFIXES) and Path(directory, name).is_file():
                yield Path(directory, name)


def _of_a_package(directory: str, name: str) -> bool:
    """Whether a folder is imported from: one that is linked into a checkout may be its data."""
    return Path(directory, "__init__.py").exists() or Path(directory, name, "__init__.py").exists()


def untouched(distribution: metadata.Distribution) -> bool:
    """Whether a package is as an index gave it: not from a checkout or a file, no file edited.

    Its own list of files (``RECORD``) says what each one's digest was.
    """
    if distribution.read_text("direct_url.json") is not None:
        return False
    for file in distribution.files or ():
        if file.suffix not in _SUFFIXES or file.hash is None or file.hash.mode != "sha256":
            continue
        try:
            content = Path(str(distribution.locate_file(file))).read_bytes()
        except OSError:
            return False
        found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if found != file.hash.value:
            return False
    return bool(distribution.files)


def imported() -> dict[str, str]:
    """Digests of the frameworks that this process has imported, and of every other top-level
    package that it took from outside the places where packages are installed."""
    found = {}
    installed = _installed_places()
    for name, module in sorted(sys.modules.items()):
        if "." in name or name in (_OURS, "__main__") or name.startswith("_"):
            continue
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file)
        place = path.parent if path.name == "__init__.py" else path
        inside = any(root in path.parents for root in installed)
        if name not in FRAMEWORKS and inside:
            continue
        made = digest(place)
        if made is not None:
            found[name] = made
    return found


def _installed_places() -> list[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    roots = {Path(sysconfig.get_paths()[name]) for name in names}
    # a virtual environment's interpreter has its standard library elsewhere
    roots |= {Path(sys.base_prefix, "lib"), Path(sys.prefix, "lib")}
    roots |= {Path(entry) for entry in sys.path if entry.endswith(("-packages",))}
    return [root.resolve() for root in roots] + list(roots)


_SETUP_VERSION = re.compile(r"""^\s*version\s*=\s*["']([0-9][^"']*)["']""", re.MULTILINE)


def version_of(checkout: Path) -> str | None:
    """The version that a checkout's ``setup.py`` says as a plain text; None where it says none."""
    try:
        found = _SETUP_VERSION.search((checkout / "setup.py").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return None if found is None else found.group(1)
