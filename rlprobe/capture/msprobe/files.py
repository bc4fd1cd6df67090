"""One stage's files from several msprobe sessions.

A stage may be entered several times in a step. Each entry is dumped aside as a session whose
counters begin at 0; here its records are renumbered to follow those of the entries before, its
tensor files with them, and the whole is published. Only then is the stage's dump.json there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe.capture.dumpfile import document_parts
from rlprobe.capture.engine import Tally
from rlprobe.capture.files import write_json, write_text
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import DumpError

_TENSORS = "dump_tensor_data"
#: Of a dump.json, whose arguments nest up to 400 levels.
_MAX_BYTES, _MAX_DEPTH = 8 << 30, 410

#: The counter in a record's name: ``Module.a.Linear.forward.0``, ``Functional.linear.0.forward``,
#: ``Module.a.Linear.parameters_grad.0``.
_COUNTER = re.compile(
    r"^(?P<head>.+?)\.(?:(?P<api>\d+)\.(?P<way>forward|backward)"
    r"|(?P<kind>forward|backward|parameters_grad)\.(?P<module>\d+))(?P<rest>\..*)?$"
)


class StageFiles:
    """dump.json, stack.json, construct.json and tensors of one stage, step and rank."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: An entry of this stage failed: the stage is not published any more.
        self.failed = False
        self._fragments: list[str] = []
        self._construct: dict[str, Any] = {}
        self._stack: dict[str, Any] = {}
        #: Which of the two msprobe writes; neither under its ``extra_info: false``.
        self._extra: set[str] = set()
        #: First free number of each counter.
        self._next: dict[str, int] = {}

    def add(self, aside: Path, heads: Mapping[str, str] | None = None) -> Tally:
        """Add what one session left below ``aside`` and publish the whole.

        Args:
            aside: the session's dump path.
            heads: msprobe's names of modules that get another here (``Module.{path}.{class}``).

        Raises:
            DumpError: msprobe left no dump, one that cannot be read, or names of tensor files
                that are not there.
        """
        source = _only_dump(aside)
        document = _read(source / "dump.json")
        data = document.pop("data", {})
        missing = [name for name in _files_of(data) if not (source / _TENSORS / name).is_file()]
        if missing:
            raise DumpError(
                f"msprobe names {len(missing)} tensor files of {self.directory} that it did not "
                f"write, the first {missing[0]!r}; is the disk full?"
            )
        renumber = _Renumber(dict(self._next), heads or {})
        renamed = {renumber.name(name): renumber.entry(entry) for name, entry in data.items()}
        self._add_construct(source / "construct.json", renumber)
        self._add_stack(source / "stack.json", renumber)
        self._next.update(renumber.after)
        tally = Tally(_count(data) or len(self._construct), len(data) or len(self._construct))
        if self.failed:
            return tally
        if renamed:
            self._fragments.append(json.dumps(renamed)[1:-1])
        self._publish(source, document, renumber)
        return tally

    def _publish(self, source: Path, header: dict[str, Any], renumber: _Renumber) -> None:
        tensors = self.directory / _TENSORS
        if (source / _TENSORS).is_dir():
            tensors.mkdir(parents=True, exist_ok=True)
            for path in (source / _TENSORS).iterdir():
                path.replace(tensors / renumber.name(path.name))
            header["dump_data_dir"] = str(tensors)
        for name, content in (("stack.json", self._stack), ("construct.json", self._construct)):
            if name in self._extra:
                write_json(self.directory / name, content)
        parts = document_parts(header, self._fragments)
        write_text(self.directory / "dump.json", parts)

    def _add_construct(self, path: Path, renumber: _Renumber) -> None:
        if path.exists():
            self._extra.add(path.name)
            for name, parent in _read(path).items():
                self._construct[renumber.name(name)] = renumber.parent(parent)

    def _add_stack(self, path: Path, renumber: _Renumber) -> None:
        if path.exists():
            self._extra.add(path.name)
            for names, lines in _read(path).values():
                renamed = [renumber.name(name) for name in names]
                self._stack[str(len(self._stack))] = [renamed, lines]


class _Renumber:
    """Moves one session's counters behind those of the sessions before.

    Args:
        first: first free number of each counter.
        heads: names without a counter that are replaced.
    """

    def __init__(self, first: dict[str, int], heads: Mapping[str, str]) -> None:
        self._first = first
        self._heads = heads
        #: First free number of each counter after this session.
        self.after: dict[str, int] = {}

    def name(self, name: str) -> str:
        """A record's name, or a tensor file's, with its number moved."""
        found = _COUNTER.match(name)
        if found is None:
            return name
        head, kind, rest = found["head"], found["kind"], found["rest"] or ""
        head = self._heads.get(head, head)
        # forward and backward of a call share a number; gradients of parameters have their own
        counter = f"{head}.parameters_grad" if kind == "parameters_grad" else head
        number = int(found["api"] or found["module"]) + self._first.get(counter, 0)
        self.after[counter] = max(self.after.get(counter, 0), number + 1)
        if found["api"] is not None:
            return f"{head}.{number}.{found['way']}{rest}"
        return f"{head}.{kind}.{number}{rest}"

    def entry(self, value: Any) -> Any:
        """An entry whose leaves name their tensor files by the new number."""
        if isinstance(value, dict):
            return {
                key: self.name(item) if key == "data_name" else self.entry(item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.entry(item) for item in value]
        return value

    def parent(self, value: Any) -> Any:
        """A record's parent in construct.json: a name, ``[name, micro-step]`` or null."""
        if isinstance(value, str):
            return self.name(value)
        if isinstance(value, list):
            return [self.parent(item) for item in value]
        return value


def _only_dump(aside: Path) -> Path:
    found = sorted(aside.glob("step*/*/dump.json"))
    if len(found) != 1:
        raise DumpError(
            f"msprobe left {len(found)} dumps below {aside} where one was expected; what it said "
            "stands in the log"
        )
    return found[0].parent


def _read(path: Path) -> dict[str, Any]:
    try:
        value = jsonfile.load(path, most=_MAX_BYTES, nonfinite=True, depth=_MAX_DEPTH)
    except DocumentError as error:
        raise DumpError(f"{path}: msprobe left no readable file: {error}") from error
    if not isinstance(value, dict):
        raise DumpError(f"{path}: an object was expected, found {type(value).__name__}")
    return value


def _files_of(value: Any) -> list[str]:
    """The tensor files that leaves name."""
    if isinstance(value, dict):
        own = [value["data_name"]] if isinstance(value.get("data_name"), str) else []
        return own + [name for item in value.values() for name in _files_of(item)]
    if isinstance(value, list):
        return [name for item in value for name in _files_of(item)]
    return []


def _count(value: Any) -> int:
    """Leaves in a nest."""
    if isinstance(value, dict):
        return 1 if "type" in value else sum(_count(item) for item in value.values())
    return sum(_count(item) for item in value) if isinstance(value, list) else 0
