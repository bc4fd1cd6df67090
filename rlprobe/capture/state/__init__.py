"""What training has changed of a model when a step begins: kept by one run, loaded by another."""

from __future__ import annotations

from pathlib import Path


def directory(root: Path, step: int) -> Path:
    """Where the state at the start of a step lies."""
    return root / f"step{step}"
