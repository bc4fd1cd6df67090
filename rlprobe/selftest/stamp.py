"""What a trial's diagnosis was made from, so that an interrupted self-test goes on where it was."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import rlprobe
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.errors import DumpError
from rlprobe.files import replace_text
from rlprobe.spec import RunSpec

_NAME = "judged_from.json"
#: What compares and what diagnoses; the code of a diagnosis is these and all that they import.
_ENTRANCES = ("rlprobe.compare.compare", "rlprobe.diagnose.run")
#: What looks again and decides.
_REFINING = ("rlprobe.refine.suspects", "rlprobe.refine.decide", "rlprobe.runs.suspects")


@functools.cache
def code(entrances: tuple[str, ...] = _ENTRANCES) -> str:
    """Digest of the code that compares and diagnoses, and of the data beside it."""
    root = Path(rlprobe.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(_reached(root, entrances)):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


def _reached(root: Path, entrances: tuple[str, ...] = _ENTRANCES) -> set[Path]:
    """The files of the package that the entrances import, directly or not."""
    reached: set[Path] = set()
    waiting = list(entrances)
    while waiting:
        file = _file(root, waiting.pop())
        if file is None or file in reached:
            continue
        reached |= {file, *file.parent.glob("*.yaml")}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting.append(node.module)
                waiting.extend(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                waiting.extend(alias.name for alias in node.names)
    return reached


def _file(root: Path, module: str) -> Path | None:
    """The file of a module of this package; None for anything else."""
    package, *parts = module.split(".")
    # the package itself hands out names of all rooms, for users, and judges nothing
    if package != "rlprobe" or not parts:
        return None
    place = root.joinpath(*parts)
    return next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)


def of(runs: Mapping[str, RunSpec]) -> str:
    """The stamp of a diagnosis of these runs by this code."""
    keys = {role: run.key for role, run in sorted(runs.items())}
    return json.dumps({"code": code(), "runs": keys}, indent=1)


def kept(directory: Path, stamp: str) -> Diagnosis | None:
    """A trial's diagnosis, if it was made from just this; None otherwise."""
    try:
        if (directory / _NAME).read_text(encoding="utf-8") != stamp:
            return None
        return diagnosis.read(directory / diagnosis.NAME)
    except (OSError, DumpError):
        return None  # made again


def write(directory: Path, stamp: str) -> None:
    """Say what the diagnosis in ``directory`` was made from; the last thing written there."""
    replace_text(directory / _NAME, stamp)


def is_refined(directory: Path) -> bool:
    """Whether a trial's refinement is there and was made by the code that is here now."""
    try:
        return (directory / "refine" / _NAME).read_text(encoding="utf-8") == code(_REFINING)
    except OSError:
        return False


def write_refined(directory: Path) -> None:
    """Say what the refinement in ``directory`` was made by; the last thing written there."""
    replace_text(directory / "refine" / _NAME, code(_REFINING))
