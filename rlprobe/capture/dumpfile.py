"""dump.json, stack.json, construct.json and debug.json in msprobe's schema.

A stage may be entered several times in a step (mini-batches, epochs, LoRA's two log-prob
passes). Every entry adds to the same files: what earlier entries wrote is kept as text and the
whole is published again, so that the files on disk are complete after each.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlprobe.capture.files import write_json, write_text
from rlprobe.capture.light.stack import Stacks

#: Suffix given to a published file when a later entry of its stage failed.
PARTIAL = ".partial"


class DumpFiles:
    """The files of one stage, step and rank, growing entry by entry.

    Args:
        directory: the rank directory.
        task, level: what the files' headers say.
    """

    def __init__(self, directory: Path, task: str, level: str) -> None:
        self.directory = directory
        self._header = {
            "task": task,
            "level": level,
            "framework": "pytorch",
            "dump_data_dir": None,
        }
        self._fragments: list[str] = []
        self.construct: dict[str, str | None] = {}
        self.stacks = Stacks()

    def publish(self, data: dict[str, Any]) -> int:
        """Add an entry's records and write all three files; returns bytes on disk."""
        if data:
            self._fragments.append(json.dumps(data)[1:-1])
        size = write_text(self.directory / "stack.json", [self.stacks.text()])
        size += write_json(self.directory / "construct.json", self.construct)
        # dump.json last: where it stands, the others stand too.
        size += write_text(
            self.directory / "dump.json", document_parts(self._header, self._fragments)
        )
        return size


class DebugFile:
    """debug.json of one stage: gradients, parameter changes and losses (msprobe's save() schema).

    Names are ``{what}.{count}.debug``; ``count`` counts the uses of one name in a step.
    """

    def __init__(self, directory: Path, task: str) -> None:
        self.directory = directory
        self._header = {
            "task": task,
            "level": "debug",
            "framework": "pytorch",
            "dump_data_dir": None,
        }
        self._fragments: list[str] = []
        self._counts: dict[str, int] = {}

    def name(self, what: str) -> str:
        """The next full name for ``what``, which a loss's part may have given any characters."""
        what = re.sub(r"[^A-Za-z0-9_.-]", "_", what).replace("..", "__")
        count = self._counts.get(what, 0)
        self._counts[what] = count + 1
        return f"{what}.{count}.debug"

    def publish(self, data: dict[str, Any]) -> int:
        """Add an entry's records and write the file; returns its size, 0 when there are none."""
        if data:
            self._fragments.append(json.dumps(data)[1:-1])
        if not self._fragments:
            return 0
        return write_text(
            self.directory / "debug.json", document_parts(self._header, self._fragments)
        )


def document_parts(header: dict[str, Any], fragments: list[str]) -> list[str]:
    """Text of ``{**header, "data": {fragments…}}`` without parsing the fragments again."""
    parts = [json.dumps(header)[:-1], ', "data": {']
    for index, fragment in enumerate(fragments):
        parts.append(", " + fragment if index else fragment)
    parts.append("}}")
    return parts


def mark_partial(directory: Path) -> None:
    """Rename what earlier entries published: the stage as a whole is not complete."""
    for name in ("dump.json", "debug.json"):
        path = directory / name
        if path.exists():
            path.replace(path.with_name(name + PARTIAL))
