"""Which paths may exist in a run's directory; apart from the manifest, whose models load slowly."""

from __future__ import annotations

import re

#: What a run's directory may hold beside the manifest.
DIRECTORIES = ("dump", "logical", "records", "rollouts", "routing", "states", "token_sketches")
FILES = (
    "buffers.json",
    "environment.json",
    "gradients.parquet",
    "joined.json",
    "metrics.jsonl",
    "mock_proof.json",
    "optimizers.json",
    "tensors.parquet",
    "weights.parquet",
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")


def check_path(path: str) -> None:
    """Refuse a path that does not stay in a run's directory.

    Raises:
        ValueError: absolute, with ``..``, odd characters, or outside the known places.
    """
    parts = path.split("/")
    if (
        len(path) > 4000
        or _CONTROL.search(path)
        or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    ):
        raise ValueError(f"path {path!r} is not a plain relative path")
    if path not in FILES and (len(parts) < 2 or parts[0] not in DIRECTORIES):
        raise ValueError(
            f"path {path!r} has no place in a run; known: {', '.join((*FILES, *DIRECTORIES))}"
        )
