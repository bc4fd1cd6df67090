"""A dump tree in scratch space becomes objects in canonical form."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlprobe.errors import DumpError, IncompleteRunError, StoreError
from rlprobe.store import canonical, packing
from rlprobe.store.filetypes import is_known
from rlprobe.store.objects import Objects, Stored

_log = logging.getLogger("rlprobe.store")

TENSORS = "dump_tensor_data"
#: Where canonical form is applied; msprobe's file names.
_EDITED: dict[str, Callable[[str, str], tuple[str, dict[str, Any]]]] = {
    "dump.json": canonical.dump_json,
    "debug.json": canonical.dump_json,
    "stack.json": lambda text, _: canonical.stack_json(text),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor file of the dump: an object of its own, or a part of a packed one."""

    #: Below the dump: ``{stage}/step{N}/rank{R}/dump_tensor_data/{name}.pt``.
    path: str
    stored: Stored
    #: Below the dump, of the zip it is packed in.
    container: str | None = None
    offset: int = 0


@dataclass
class Ingested:
    """What a dump tree became; paths are below the dump, in canonical form."""

    files: dict[str, Stored] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    #: What canonical form took out: kind, then the value to the directories it was found in.
    removed: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def note(self, kind: str, value: str, directory: str) -> None:
        """Remember a removed fact."""
        places = self.removed.setdefault(kind, {}).setdefault(value, [])
        if directory not in places[-1:]:  # files come directory by directory
            places.append(directory)

    def add(self, path: str, stored: Stored) -> None:
        """Add a file.

        Raises:
            StoreError: two files of the dump have this canonical path.
        """
        if path in self.files:
            raise StoreError(
                f"dump: two files become {path}: several processes without a rank wrote the same "
                "step, and nothing says which is which"
            )
        self.files[path] = stored


def ingest(dump: Path, objects: Objects, workspace: Path) -> Ingested:
    """Store every file below ``dump``.

    Raises:
        StoreError: there is a link or device, or a capture that failed half-way.
        DumpError: a JSON file is damaged.
    """
    result = Ingested()
    small: dict[str, list[Path]] = {}
    for path in _files(dump):
        original = path.relative_to(dump).as_posix()
        place = canonical.dump_path(original)
        directory = place.rpartition("/")[0]
        if not is_known(f"dump/{place}"):
            # a core file or a note: no store takes it, and hours of a device are in the rest
            _log.warning("left out of the store, as no kind of file that is known: %s", path)
            result.note("left_out", path.name, directory)
            continue
        if place != original and path.parent.name != TENSORS:
            result.note("directory", original.rpartition("/")[0], directory)
        edit = _EDITED.get(path.name)
        size = path.stat().st_size
        if edit is not None:
            text, removed = edit(_text(path), str(path))
            for key, value in removed.items():
                if value is not None:
                    result.note(key, value, directory)
            result.add(place, objects.put_bytes(text.encode()))
        elif path.parent.name == TENSORS and path.suffix == ".pt" and size < packing.SMALL:
            small.setdefault(directory, []).append(path)
        else:
            stored = objects.put_file(path, adopt=size >= packing.SMALL)
            result.add(place, stored)
            if path.parent.name == TENSORS:
                result.tensors.append(Tensor(place, stored))
    for tensors, paths in small.items():
        _pack(tensors, paths, result, objects, workspace)
    result.tensors.sort(key=lambda tensor: tensor.path)
    return result


def _pack(
    directory: str, paths: list[Path], result: Ingested, objects: Objects, workspace: Path
) -> None:
    temporary = workspace / "packed.zip"
    members = packing.pack(paths, temporary)
    container = directory + packing.SUFFIX
    result.add(container, objects.put_file(temporary, adopt=True))
    temporary.unlink()
    result.tensors += [
        Tensor(f"{directory}/{member.name}", member.stored, container, member.offset)
        for member in members
    ]


def _files(root: Path) -> Iterator[Path]:
    """Regular files, in order of their paths."""
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise StoreError(f"{path} is a link or device; a dump holds plain files only")
        if path.suffix == ".partial":
            raise IncompleteRunError(
                f"{path}: capture failed while it wrote this file; see the run's log"
            )
        if path.name.startswith("."):
            _log.info("left out of the store: %s", path)
            continue
        yield path


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DumpError(f"{path} is not UTF-8 text: {error}") from error
