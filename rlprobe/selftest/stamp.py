"""What a trial's diagnosis was made from, so that an interrupted self-test goes on where it was."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import rlprobe
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.errors import DumpError
from rlprobe.runs.spec import RunSpec

_NAME = "judged_from.json"
#: Packages and modules that make a diagnosis of runs.
_JUDGING = ("compare", "diagnose", "store", "sketch.py", "stages.py")


@functools.cache
def code() -> str:
    """Digest of the code that compares and diagnoses."""
    root = Path(rlprobe.__file__).parent
    digest = hashlib.sha256()
    for name in _JUDGING:
        place = root / name
        files = [place] if place.is_file() else sorted(
            file for file in place.rglob("*") if file.suffix in (".py", ".yaml")
        )  # fmt: skip
        for file in files:
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


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
    (directory / _NAME).write_text(stamp, encoding="utf-8")
