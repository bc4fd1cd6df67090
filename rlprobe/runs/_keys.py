"""Run keys and input digests until rlprobe.store.keys has them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def run_key(declared: Mapping[str, Any]) -> str:
    text = json.dumps(declared, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def model_id(path: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")) + sorted(path.glob("*.json")):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(stream.read(1 << 16))
    return digest.hexdigest()


def data_digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
