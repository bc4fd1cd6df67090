"""Run keys and the digests of a run's inputs, all known before anything runs."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from rlprobe.errors import ConfigError
from rlprobe.files import sha256

#: Files up to this size count with every byte; of larger ones, samples.
_WHOLE = 1 << 20
#: Bytes taken at each sampled place, and places taken in a file of unknown format.
_SAMPLE = 256
_PLACES = 64
#: The safetensors format bounds its own header with this.
_MAX_HEADER = 100 << 20


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, ASCII, no NaN.

    Raises:
        ValueError: a number is not finite.
        TypeError: a key is not text (two keys could become one), or a value has no JSON form.
    """
    _require_text_keys(value)
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def run_key(declared: Mapping[str, Any]) -> str:
    """The key of a run: 64 hexadecimal digits, sha256 of what it declares as canonical JSON.

    Raises:
        ValueError, TypeError: as :func:`canonical_json`.
    """
    return hashlib.sha256(canonical_json(dict(declared))).hexdigest()


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two runs declare otherwise, by dotted name; None stands for what one does not have.

    Overrides are compared one by one, by their keys, so that a changed one is told by its name.
    """
    left, right = _leaves(first), _leaves(second)
    return {
        name: (left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= _leaves(inner, f"{name}.{key}" if name else str(key))
        return found
    if name == "overrides" and isinstance(value, list):
        return {f"overrides: {str(o).partition('=')[0]}": str(o).partition("=")[2] for o in value}
    return {name: value}


def model_id(path: Path) -> str:
    """Identity of a model directory (or file), without reading its weights: 64 hex digits.

    Small files (configuration, index, tokenizer) count whole; a safetensors file with its header,
    its size and a few bytes from the middle of every tensor, so that a fine-tuned copy with equal
    headers is another model; other large files (``.bin``, distributed checkpoints) with their size
    and 64 samples. Names relative to the directory count, where it lies does not; READMEs, licences
    and hidden files don't either. The run itself records the digest of every parameter.

    Raises:
        ConfigError: there is no file, or one cannot be read.
    """
    total = hashlib.sha256(b"rlprobe model 1\0")
    count = 0
    for name, file in _model_files(path):
        try:
            digest = _file_identity(file)
        except OSError as error:
            raise ConfigError(f"model file {file}: {error.strerror or error}") from error
        total.update(canonical_json([name, digest]) + b"\n")
        count += 1
    if not count:
        raise ConfigError(f"{path} holds no model: expected config.json and weights")
    return total.hexdigest()


def data_digest(paths: Iterable[Path]) -> str:
    """Digest of data files in the order given, by content alone: 64 hexadecimal digits.

    Raises:
        ConfigError: a file cannot be read.
    """
    total = hashlib.sha256(b"rlprobe data 1\0")
    for path in paths:
        try:
            with path.open("rb") as stream:
                content = sha256(stream)
        except OSError as error:
            raise ConfigError(f"data file {path}: {error.strerror or error}") from error
        total.update(content)
    return total.hexdigest()


def _require_text_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not text")
            _require_text_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _require_text_keys(item)


def _model_files(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield path.name, path
        return
    found = []
    for directory, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(directory) / name for name in files if _counts(name)]
    yield from sorted((file.relative_to(path).as_posix(), file) for file in found)


def _counts(name: str) -> bool:
    return not name.startswith((".", "README", "LICENSE", "NOTICE")) and not name.endswith(".md")


def _file_identity(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as stream:
        if size <= _WHOLE:
            return hashlib.sha256(stream.read()).hexdigest()
        state = hashlib.sha256(struct.pack("<q", size))
        places = _tensor_places(stream, size, state) if path.suffix == ".safetensors" else None
        if places is None:
            places = [size * i // _PLACES for i in range(_PLACES)] + [size - _SAMPLE]
        for place in places:
            stream.seek(place)
            state.update(stream.read(_SAMPLE))
        return state.hexdigest()


def _tensor_places(stream: BinaryIO, size: int, state: Any) -> list[int] | None:
    """Where each tensor of a safetensors file has its middle; None when it is not such a file."""
    length = struct.unpack("<Q", stream.read(8))[0]
    if length > min(_MAX_HEADER, size - 8):
        return None
    header = stream.read(length)
    state.update(header)
    try:
        spans = [
            entry["data_offsets"]
            for name, entry in sorted(json.loads(header).items())
            if name != "__metadata__"
        ]
        if not all(type(place) is int for span in spans for place in span):
            return None
        middles = [8 + length + (start + end) // 2 for start, end in spans]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return [max(0, min(middle - _SAMPLE // 2, size - _SAMPLE)) for middle in middles]
