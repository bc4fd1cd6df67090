"""Is a file what its name says? Asked of every file that becomes a run's, here or elsewhere."""

from __future__ import annotations

from pathlib import Path

from rlprobe.errors import StoreError

#: How binary files of each kind begin.
_MAGIC: dict[str, bytes] = {
    ".parquet": b"PAR1",
    ".h5": b"\x89HDF\r\n\x1a\n",
    ".npy": b"\x93NUMPY",
    ".pt": b"PK\x03\x04",
    ".zip": b"PK",
}
#: Begins with the length of a JSON header, then that.
_SAFETENSORS = ".safetensors"
_JSON = (".json", ".jsonl")
_TEXT = (".csv", ".log", ".txt")
#: Profilers' own files, which rlprobe never opens.
_OPAQUE = "dump/memory_snapshot/"
_KNOWN = (*_MAGIC, _SAFETENSORS, *_JSON, *_TEXT)
_HEAD = 4096


def is_known(path: str) -> bool:
    """Whether files of this name's kind belong in a run."""
    return path.startswith(_OPAQUE) or Path(path).suffix in _KNOWN


def check_type(path: str, content: Path) -> None:
    """Refuse a file whose beginning is not of the kind its name says.

    Args:
        path: the file's place in its run.
        content: where its bytes are.

    Raises:
        StoreError: the kind is unknown, or the content is of another.
    """
    if path.startswith(_OPAQUE):
        return
    suffix = Path(path).suffix
    if not is_known(path):
        raise StoreError(
            f"{path}: files of this kind do not belong in a run; known: {', '.join(_KNOWN)}"
        )
    with content.open("rb") as file:
        head = file.read(_HEAD)
    if suffix in _MAGIC:
        good = head.startswith(_MAGIC[suffix])
    elif suffix == _SAFETENSORS:
        length = int.from_bytes(head[:8], "little")
        good = head[8:9] == b"{" and 8 + length <= content.stat().st_size
    else:
        opens = head.lstrip()[:1] in (b"{", b"[", b"")
        good = b"\0" not in head and (opens or suffix in _TEXT)
    if not good:
        raise StoreError(f"{path} is not the {suffix} file that its name says")
