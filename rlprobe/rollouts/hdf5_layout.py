"""Names and digests that the writer and the reader of rollout files share."""

from __future__ import annotations

import hashlib

import numpy as np

FORMAT = b"rlprobe-rollouts"
VERSION = 1
JSON_PARTS = ("samples", "values", "value_dtypes", "meta", "sampling")


def digest(name: str, array: np.ndarray) -> str:
    """``sha256:…`` of a dataset: its path, element type, shape and bytes."""
    head = f"{name}\0{array.dtype.str}\0{list(array.shape)}\0"
    state = hashlib.sha256(head.encode())
    state.update(array.data)
    return "sha256:" + state.hexdigest()
