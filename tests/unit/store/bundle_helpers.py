"""Bundles taken apart and put together again, right and wrong."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from rlprobe.errors import StoreError
from rlprobe.store import bundle
from rlprobe.store.alignments import alignments
from rlprobe.store.importing import import_bundle
from rlprobe.store.keys import run_key
from rlprobe.store.read import keys

#: A small run.
SMALL = {"stages": ("actor_update",), "tensors": False}


def assert_nothing_came(store: Path) -> None:
    assert keys(store) == []
    assert alignments(store) == {} if store.is_dir() else True
    assert not any((store / "tmp").glob("*"))
    assert not any((store / "runs").glob("*"))


def refused(archive: Path, other: Path, message: str, **kwargs) -> None:
    with pytest.raises(StoreError, match=message):
        import_bundle(other, archive, **kwargs)
    assert_nothing_came(other)


def split(path: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(path) as archive:
        return [(m, archive.extractfile(m).read()) for m in archive.getmembers()]


def member(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""):
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def join(path: Path, members, format=tarfile.USTAR_FORMAT) -> Path:
    """An archive of any members: ours where the header is ours, tarfile's elsewhere."""
    data = b""
    for info, content in members:
        if info.isreg() and info.mtime == 0 and info.mode == 0o444 and len(info.name) <= 100:
            head = bundle.header(info.name, len(content))
        else:
            head = info.tobuf(format)
        data += head + content + bundle.padding(len(content))
    path.write_bytes(data + bundle.END)
    return path


def rewritten(exported, path: Path, change) -> Path:
    """The bundle with another index, digests and sizes right: an attacker can do that, too."""
    members = split(exported.path)
    index = json.loads(members[0][1])
    rest = change(index, members[1:])
    text = json.dumps(index, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    head = tarfile.TarInfo("rlprobe-bundle.json")
    head.mode = 0o444
    return join(path, [(head, text), *(members[1:] if rest is None else rest)])


def with_manifest(exported, path: Path, change, extra: dict[str, bytes] | None = None) -> Path:
    """The bundle with another manifest and further objects, all digests right."""

    def rebuild(index, members):
        manifest = json.loads(members[0][1])
        change(manifest)
        manifest["key"] = run_key(manifest["declared"])
        data = json.dumps(manifest).encode()
        run = {"key": manifest["key"], "sha256": hashlib.sha256(data).hexdigest()}
        index["runs"] = [{**run, "size": len(data)}]
        objects = {i.name.removeprefix("objects/"): c for i, c in members[1:]} | (extra or {})
        index["objects"] = [{"sha256": d, "size": len(objects[d])} for d in sorted(objects)]
        parts = [(f"runs/{run['key']}/manifest.json", data)]
        parts += [(f"objects/{digest}", objects[digest]) for digest in sorted(objects)]
        result = []
        for name, content in parts:
            info = tarfile.TarInfo(name)
            info.mode = 0o444
            result.append((info, content))
        return result

    return rewritten(exported, path, rebuild)


def rewritten_from(source: Path, path: Path, change) -> Path:
    class Like:
        path = source

    like = Like()
    return rewritten(like, path, change)
