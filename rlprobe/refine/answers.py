"""Answers of refining that stand beside its diagnosis: ``RESULTS_DIR/refine/*.json``."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from rlprobe.documents import structfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import DumpError
from rlprobe.files import replace_bytes
from rlprobe.said import kept

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


def write(path: Path, found: object) -> Path:
    """Write an answer, its sentences in both languages."""
    plain, messages = kept(found)
    replace_bytes(path, structfile.encoded(plain | {"messages": messages}))
    return path


def read(path: Path, kind: type[_Answer], version: int) -> _Answer | None:
    """What was written; None where nothing was.

    Raises:
        DumpError: it is damaged, or was changed.
    """
    if not path.is_file():
        return None
    try:
        return structfile.load(path, kind, (version,), again="refine again")
    except DocumentError as error:
        raise DumpError(f"{path} {error}; refine again") from error
