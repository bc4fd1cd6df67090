"""Digests of what rlprobe made below ``{store}/assets``: the models and prompts of the CPU default.

``{name}.digests.json`` beside an asset lists its files. An asset can always be made again, so the
way back is to remove it: the next run makes it, the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rlprobe import files, formats
from rlprobe.documents import jsonfile
from rlprobe.errors import StoreError

FORMAT = 1
_SUFFIX = ".digests.json"


def seal(asset: Path) -> None:
    """Write the digests of an asset that was just made."""
    said = {
        "format": FORMAT,
        "files": {
            path.relative_to(asset.parent).as_posix(): files.digest(path)._asdict()
            for path in _files(asset)
        },
    }
    data = msgspec.json.format(msgspec.json.encode(said), indent=1) + b"\n"
    files.replace_bytes(asset.with_name(asset.name + _SUFFIX), data)


def check(directory: Path) -> Iterator[tuple[Path, str]]:
    """Assets that are not as they were made, and what is wrong: the asset's path first."""
    for said in sorted(directory.glob(f"*{_SUFFIX}")) if directory.is_dir() else []:
        asset = said.with_name(said.name.removesuffix(_SUFFIX))
        if not asset.exists():
            continue  # removed: it is made again when it is needed
        try:
            wanted = _wanted(said)
        except StoreError as error:
            yield said, str(error)
            continue
        found = {path.relative_to(directory).as_posix(): path for path in _files(asset)}
        for name in sorted(wanted.keys() | found.keys()):
            if name not in found:
                yield asset, f"{name} is missing"
            elif name not in wanted:
                yield asset, f"{name} was not made with it"
            elif files.digest(found[name]) != wanted[name]:
                yield asset, f"{name} is not what was made"


def unsealed(directory: Path) -> list[Path]:
    """Assets without digests, made by an earlier version."""
    names = sorted(directory.iterdir()) if directory.is_dir() else []
    return [
        path
        for path in names
        if not path.name.endswith(_SUFFIX)
        and not path.name.startswith((".", "tmp"))
        and not path.with_name(path.name + _SUFFIX).exists()
    ]


def _wanted(said: Path) -> dict[str, files.Digest]:
    try:
        value = jsonfile.load(said)
        formats.check(value["format"], (FORMAT,), str(said), StoreError)
        return {
            name: files.Digest(str(entry["sha256"]), int(entry["size"]))
            for name, entry in value["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{said} lists no digests: {error}") from error


def _files(asset: Path) -> list[Path]:
    return sorted(p for p in asset.rglob("*") if p.is_file()) if asset.is_dir() else [asset]
