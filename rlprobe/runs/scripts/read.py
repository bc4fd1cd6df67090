"""From what a user types to an alignment: a script or a command."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rlprobe.errors import UsageError
from rlprobe.runs.scripts import note, trace, training
from rlprobe.runs.scripts.draft import Draft, draft
from rlprobe.runs.scripts.trace import Command, Script


def draft_of(
    words: Sequence[str],
    *,
    name: str | None = None,
    version: str | None = None,
    benchmark: str | None = None,
    target: str | None = None,
) -> Draft:
    """The alignment of a command, or of a script and its arguments.

    Raises:
        UsageError: no training is found in it, or it cannot be read.
        ConfigError: what it says makes no alignment.
    """
    script = _script(words)
    source = script[0] if script is not None else None
    if script is not None:
        traced = trace.read(script)
        found = training.find(traced.commands, _ended(traced))
    elif (shell := note.shell_in(list(words))) is not None:
        source = shell[1][0] if shell[1][0] != "-c" else None
        traced = trace.of_command(words)
        found = training.find(traced.commands, _ended(traced))
    else:
        _require_command(words[0])
        found = training.find([Command(tuple(words), str(Path.cwd()), {})])
    if name is None:
        source = source or found.entry[-1].rpartition(".")[2]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).stem).strip("-._") or "alignment"
    if version is None:
        version = _installed(found.framework)
    return draft(found, name=name, version=version, benchmark=benchmark, target=target)


def _ended(traced: Script) -> str:
    """Why a script may have come to no training, as far as it says."""
    if "\r" in traced.last or r"\r'" in traced.last:
        return f". Something that the script reads has {trace.WINDOWS_LINES}"
    if traced.status == 0:
        return ""
    last = f", and wrote last: {traced.last}" if traced.last else ""
    how = "did not end" if traced.status is None else f"ended with status {traced.status}"
    return (
        f". The script {how}{last}. Give it the variables and arguments that it asks for, as when "
        "it trains"
    )


def _script(words: Sequence[str]) -> list[str] | None:
    """A shell script and its arguments, if the words are one; ``bash run.sh`` is."""
    rest = list(words)
    if Path(rest[0]).name in ("bash", "sh") and len(rest) > 1 and not rest[1].startswith("-"):
        return rest[1:]
    named = Path(rest[0]).suffix in (".sh", ".bash")
    # a file of this directory that is no program's name: what else can be meant?
    if named or note.is_script(rest[0], anywhere=shutil.which(rest[0]) is None):
        return rest
    return None


def _require_command(word: str) -> None:
    """Refuse a first word that leads nowhere.

    Raises:
        UsageError: it is neither a file nor a program, nor a variable before one.
    """
    known = "=" in word or Path(word).exists() or shutil.which(word) is not None
    # what trains elsewhere need not be here: an interpreter of an image, a cluster's srun
    if not known and os.sep not in word and Path(word).suffix:
        raise UsageError(f"{word}: no such file; give a shell script, or -- CMD…")


def _installed(framework: str) -> str | None:
    """slime is not on the index, and what is called so there is another project."""
    if framework == "slime":
        return None
    try:
        return metadata.version(framework)
    except metadata.PackageNotFoundError:
        return None
