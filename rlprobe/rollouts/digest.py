"""Digests that name a prompt, a response and a sample wherever they turn up.

Token digests cover *valid* tokens only, so that padding side, padding length and batch layout do
not change them. Each is sha256 over a tag, then for each sequence its length and its tokens, all
as 64-bit little-endian integers: with lengths in front no two different pairs share a byte string.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from rlprobe.errors import ReplayError


def prompt_digest(prompt_ids: Any) -> str:
    """``sha256:…`` of a prompt's valid token ids, shape [tokens].

    Raises:
        ReplayError: the ids are not one-dimensional integers.
    """
    return _digest(b"rlprobe prompt 1\0", prompt_ids)


def response_digest(response_ids: Any) -> str:
    """``sha256:…`` of a response's valid token ids, shape [tokens].

    Raises:
        ReplayError: the ids are not one-dimensional integers.
    """
    return _digest(b"rlprobe response 1\0", response_ids)


def sample_digest(prompt_ids: Any, response_ids: Any) -> str:
    """``sha256:…`` of a prompt and its response; shapes [prompt tokens] and [response tokens].

    Moving a token from one to the other changes it.

    Raises:
        ReplayError: the ids are not one-dimensional integers.
    """
    return _digest(b"rlprobe sample 1\0", prompt_ids, response_ids)


def prompt_identity(raw_prompt: Any) -> str:
    """``sha256:…`` of a prompt before tokenising: chat messages with their data source.

    Anything JSON can hold is accepted, and numpy arrays and scalars, tuples and bytes inside it.
    Key order does not matter.

    Raises:
        ReplayError: a value has no JSON form; the message names its type and place.
    """
    text = json.dumps(
        _plain(raw_prompt, "prompt"),
        sort_keys=True,
        ensure_ascii=True,
        separators=(",", ":"),
        allow_nan=False,
    )
    return "sha256:" + hashlib.sha256(b"rlprobe prompt text 1\0" + text.encode()).hexdigest()


def _digest(tag: bytes, *sequences: Any) -> str:
    state = hashlib.sha256(tag)
    for sequence in sequences:
        tokens = _tokens(sequence)
        state.update(np.array([tokens.size], dtype="<i8").tobytes())
        state.update(tokens.tobytes())
    return "sha256:" + state.hexdigest()


def _tokens(ids: Any) -> np.ndarray:
    array = np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtype="<i8")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ReplayError(
            f"token ids must be one-dimensional integers; found {array.dtype} of shape "
            f"{list(array.shape)}"
        )
    return array.astype("<i8")


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not np.isfinite(value):
            raise ReplayError(f"{where} holds {value}, which a prompt cannot")
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist(), where)
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": hashlib.sha256(value).hexdigest()}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ReplayError(f"{where} has a key that is not text")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ReplayError(
        f"{where} is a {type(value).__name__}, which cannot be digested; pass text, numbers, "
        "lists and mappings"
    )
