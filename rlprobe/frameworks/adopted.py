"""A framework's own command line, read as an alignment: what goes under which key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe.errors import UsageError


@dataclass(frozen=True)
class Training:
    """A training command, found on a command line or in a script."""

    framework: str
    #: What follows ``python``: ``("-m", MODULE)`` or ``(FILE,)``.
    entry: tuple[str, ...]
    arguments: tuple[str, ...]
    #: Directory that relative paths mean.
    cwd: Path
    #: Variables that the script sets for it.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def places(self) -> dict[str, str]:
        """``PYTHONPATH`` of a run that finds the modules which the command finds.

        ``python -m`` looks into the directory it is called in first of all, which is how a checkout
        is used that nobody installed. Empty where that has none of the entry point's.
        """
        given = [self.absolute(p) for p in self.environment.get("PYTHONPATH", "").split(":") if p]
        if self.entry[0] == "-m":
            parts = self.entry[1].split(".")
            package, module = self.cwd / parts[0], self.cwd.joinpath(*parts).with_suffix(".py")
            # a directory of that name alone would not stand before an installed package
            if (package / "__init__.py").is_file() or module.is_file():
                given.insert(0, str(self.cwd.absolute()))
        return {"PYTHONPATH": ":".join(dict.fromkeys(given))} if given else {}

    def absolute(self, path: str) -> str:
        """A path as it is found from anywhere; one that is none (an URL, a model's name on a hub)
        stays."""
        if "://" in path or path.startswith(("~", "/", "$")):
            return path
        there = self.cwd / path
        # a name with a slash may be a model on a hub; a file or directory that exists is one
        if there.exists() or path.startswith((".", "..")) or path.endswith((".parquet", ".jsonl")):
            return str(Path(there).absolute())
        return path


@dataclass
class Adopted:
    """What a command line says, in an alignment's terms."""

    #: Keys of the alignment file, without names of sides.
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: str = "cuda"
    precision: str = "bf16"
    world_size: int = 1
    nodes: int = 1
    #: Option -> key that it became.
    moved: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Option -> why it is not taken over.
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    #: What the user has to look at.
    notes: list[str] = dataclasses.field(default_factory=list)


def whole(option: str, value: str) -> int:
    """A number of processes or nodes.

    Raises:
        UsageError: the value is none.
    """
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{option}: found {value!r}; accepted: a whole number from 1")
    return int(value)
