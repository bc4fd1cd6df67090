"""slime's debug rollout files: read safely, turned into rollouts, and written again.

``--save-debug-rollout-data`` writes ``torch.save({"rollout_id", "samples": [dict]})``, one dict per
``Sample.to_dict()``, and ``--load-debug-rollout-data`` reads it back with a full unpickler. Here
tensors, numpy's numbers and plain containers are made and nothing else (:mod:`.debug_load`). An
object of another class is refused by the name of its key where training depends on it; elsewhere
(metadata, images of a multimodal prompt) its name is kept as a text, and said.

Columns that hold one number per token become ragged tensors, everything else stays JSON.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlprobe.errors import ReplayError
from rlprobe.files import written
from rlprobe.frameworks.slime import debug_load
from rlprobe.frameworks.slime.debug_load import Foreign
from rlprobe.rollouts import Ragged, Rollouts, Sample, prompt_identity, sample_ids
from rlprobe.terminal import counted

#: Per-token columns and the element type they are kept in. Floats come as Python floats.
TOKEN_COLUMNS: dict[str, str] = {
    "tokens": "int64",
    "loss_mask": "int64",
    "rollout_log_probs": "float64",
    "teacher_log_probs": "float64",
    "rollout_top_p_token_ids": "int32",
    "rollout_top_p_token_offsets": "int32",
    "rollout_routed_experts": "int32",
}
_log = logging.getLogger(__name__)

#: Columns that training reads besides those per token: nothing in them is made a text.
_TRAINED_ON = frozenset(
    {"reward", "response_length", "status", "index", "group_index", "remove_sample", "prompt"}
)
#: Columns of log-probs, in which an engine may have left out what it could not give.
_LOG_PROBS = frozenset({"rollout_log_probs", "teacher_log_probs"})
#: Columns that slime reads back as arrays; the others must be lists (slime adds to them).
_ARRAYS = frozenset({"rollout_routed_experts"})
#: Rows that lack a per-token column, while others have it, are listed here.
_ABSENT = "_absent"
_MAX_SAMPLES = 1 << 22
#: A damaged archive is reported as any of these, depending on where it is met.
_DAMAGED = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    MemoryError,
)


def read(path: str | os.PathLike[str]) -> tuple[int, list[dict[str, Any]]]:
    """The rollout's number and its samples, as slime saved them.

    Raises:
        ReplayError: the file is missing, damaged, of another format, or holds objects that only a
            full unpickler could make.
    """
    try:
        raw = debug_load.load(path)
    except FileNotFoundError as error:
        raise ReplayError(f"debug rollout file {path} does not exist") from error
    except pickle.UnpicklingError as error:
        raise ReplayError(
            f"{path} holds objects that cannot be loaded safely ({_first_line(error)}); leave "
            "objects of your own classes out of the samples"
        ) from error
    except _DAMAGED as error:
        raise ReplayError(
            f"{path} is not a readable debug rollout file ({_first_line(error)})"
        ) from error
    return _checked(raw, os.fspath(path))


def _checked(raw: Any, path: str) -> tuple[int, list[dict[str, Any]]]:
    samples = raw.get("samples") if isinstance(raw, dict) else None
    if not isinstance(samples, list) or not all(isinstance(s, dict) for s in samples):
        raise ReplayError(
            f"{path} is not a debug rollout file of slime: expected a mapping with a list of "
            "samples"
        )
    if not samples or len(samples) > _MAX_SAMPLES:
        raise ReplayError(f"{path} holds {len(samples)} samples")
    size = Path(path).stat().st_size
    for index, sample in enumerate(samples):
        unknown = [key for key in sample if not isinstance(key, str)]
        if unknown:
            raise ReplayError(f"{path}: sample {index} has a key {unknown[0]!r} that is no text")
        for name in sorted(_TRAINED_ON | TOKEN_COLUMNS.keys()):
            value = sample.get(name)
            foreign = _foreign(value)
            if foreign is not None:
                raise ReplayError(
                    f"{path}: sample {index}: {name} holds an object of {foreign}, which is not "
                    "loaded, and training depends on it"
                )
            # an expanded tensor, and an array never filled, may claim more than the file has bytes
            count = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", 0)
            if count > size:
                raise ReplayError(f"{path}: sample {index}: {name} claims {count} numbers")
    return int(raw.get("rollout_id") or 0), samples


def _first_line(error: BaseException) -> str:
    """Why, without torch's advice to load the file unsafely and without its terminal codes."""
    text = _CODES.sub("", str(error))
    why = _WHY.search(text)
    return (why[1] if why else (text.splitlines() or [type(error).__name__])[0])[:200]


_CODES = re.compile(r"\x1b\[[0-9;]*m")
_WHY = re.compile(r"WeightsUnpickler error:\s*(\S[^\n]*)")


def to_rollouts(
    samples: Sequence[dict[str, Any]], *, step: int, trainer_step: int, sampling: dict[str, Any]
) -> Rollouts:
    """The samples of one rollout as one step's recorded rollouts.

    Multi-turn samples keep their loss masks and log-probs; a sample's response is everything
    after its prompt, whoever wrote it.

    Raises:
        ReplayError: a sample has no tokens, lengths that contradict each other, or a value that
            has no JSON form.
    """
    recorded = Rollouts(step=step, trainer_step=trainer_step, sampling=sampling)
    absent: dict[str, list[int]] = {}
    missing: dict[str, int] = {}
    as_text: set[str] = set()
    for name, dtype in TOKEN_COLUMNS.items():
        rows = [sample.get(name) for sample in samples]
        if name in _LOG_PROBS:
            rows = [_without_gaps(row, name, missing) for row in rows]
        present = [_array(row, name, dtype, i) for i, row in enumerate(rows) if row is not None]
        if not present:
            continue
        empty = np.zeros((0, *present[0].shape[1:]), dtype=dtype)
        filled = iter(present)
        recorded.tensors[name] = Ragged.from_rows(
            [empty if row is None else next(filled) for row in rows]
        )
        lacking = [i for i, row in enumerate(rows) if row is None]
        if lacking:
            absent[name] = lacking
    for name in sorted({key for sample in samples for key in sample} - TOKEN_COLUMNS.keys()):
        column = [_plain(sample.get(name), name, i, as_text) for i, sample in enumerate(samples)]
        if any(value is not None for value in column):
            recorded.values[name] = column
    recorded.meta = {"source": "slime", _ABSENT: absent}
    if missing:
        recorded.meta["missing_log_probs"] = missing
        _log.warning(
            "the engine gave no log-prob for %s; they are NaN",
            ", ".join(f"{counted(count, 'token')} of {name}" for name, count in missing.items()),
        )
    if as_text:
        _log.warning(
            "what has no form in JSON is kept as a text in %s (no number of training depends on "
            "it)",
            ", ".join(sorted(as_text)),
        )
    recorded.samples = _samples(step, samples)
    recorded.check()
    return recorded


def _array(value: Any, name: str, dtype: str, row: int) -> np.ndarray:
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        if array.size == 0:
            return np.zeros((0, *array.shape[1:]), dtype=dtype)
        if array.ndim < 1 or array.dtype.kind not in "iufb":
            raise ValueError(f"{array.dtype} of shape {list(array.shape)}")
        return np.ascontiguousarray(array, dtype=dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ReplayError(f"sample {row}: {name} is no array of numbers ({error})") from error


def _without_gaps(row: Any, name: str, missing: dict[str, int]) -> Any:
    """Log-probs with NaN where the engine gave none, which are counted."""
    if not isinstance(row, (list, tuple)) or None not in row:
        return row
    missing[name] = missing.get(name, 0) + sum(value is None for value in row)
    return [math.nan if value is None else value for value in row]


def _foreign(value: Any) -> str | None:
    """The class of an object that was not loaded, anywhere in a value."""
    if isinstance(value, Foreign):
        return value.name()
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return next((name for item in value if (name := _foreign(item)) is not None), None)
    return None


def _plain(value: Any, name: str, row: int, as_text: set[str]) -> Any:
    """A value as JSON has it; of what has no form in it, the text, and the key's name is noted."""

    def plain(item: Any) -> Any:
        if isinstance(item, (torch.Tensor, np.ndarray, np.generic)):
            item = item.tolist()
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                as_text.add(name)
            return {str(key): plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        as_text.add(name)
        if isinstance(item, (set, frozenset)):
            return sorted((plain(inner) for inner in item), key=str)
        return f"<{item.name() if isinstance(item, Foreign) else type(item).__qualname__}>"

    try:
        return json.loads(json.dumps(plain(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ReplayError(f"sample {row}: {name} cannot be recorded ({error})") from error


def _samples(step: int, samples: Sequence[dict[str, Any]]) -> list[Sample]:
    identities = [_identity(sample) for sample in samples]
    built = []
    for row, (id, sample) in enumerate(zip(sample_ids(step, identities), samples, strict=True)):
        prompt, response = split(sample, row)
        built.append(
            Sample.build(
                id,
                identities[row],
                prompt,
                response,
                prompt_text=_text(sample.get("prompt")),
                response_text=_text(sample.get("response")),
                reward=_number(sample.get("reward")),
            )
        )
    return built


def _number(value: Any) -> float | None:
    """A reward that is one number, in whatever holds it; None for any other (a dict of several)."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and math.prod(value.shape) == 1:
        value = value.reshape(()).tolist()
    return float(value) if isinstance(value, (int, float, np.number, np.bool_)) else None


def split(sample: dict[str, Any], row: int) -> tuple[list[int], list[int]]:
    """Token ids of a sample's prompt and of its response.

    Raises:
        ReplayError: the response is longer than the whole, or masks and log-probs have another
            length than the response.
    """
    raw = sample.get("tokens")
    try:
        tokens = [int(token) for token in (() if raw is None else raw)]
        length = int(sample.get("response_length") or 0)
    except (TypeError, ValueError, OverflowError) as error:
        raise ReplayError(
            f"sample {row}: tokens or response_length are no whole numbers ({error})"
        ) from error
    if not tokens or not 0 <= length <= len(tokens):
        raise ReplayError(
            f"sample {row}: {counted(len(tokens), 'token')} with a response of {length}; expected "
            "a finished rollout"
        )
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        value = sample.get(name)
        if value is not None and len(value) not in (0, length):
            raise ReplayError(
                f"sample {row}: {name} has {counted(len(value), 'entry', 'entries')}, the response "
                f"{counted(length, 'token')}"
            )
    return tokens[: len(tokens) - length], tokens[len(tokens) - length :]


def identities(prompts: Iterable[Any]) -> list[str]:
    """One digest per prompt, as :func:`to_rollouts` gives them to samples."""
    return [prompt_identity(prompt) for prompt in prompts]


def _identity(sample: dict[str, Any]) -> str:
    return prompt_identity(sample.get("prompt"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def from_rollouts(recorded: Rollouts) -> list[dict[str, Any]]:
    """The samples as slime's ``Sample.from_dict`` takes them, in any version.

    Keys whose value is None are left out: v0.2.2 takes the mere presence of ``teacher_log_probs``
    for log-probs, and dies of the None that newer versions write. Keys that a version does not know
    are set as attributes by ``from_dict`` and do no harm.
    """
    absent = recorded.meta.get(_ABSENT, {})
    samples = []
    for row in range(len(recorded)):
        sample = {name: values[row] for name, values in recorded.values.items()}
        for name, tensor in recorded.tensors.items():
            if row not in absent.get(name, ()):
                values = tensor.row(row) if isinstance(tensor, Ragged) else tensor[row]
                sample[name] = values.copy() if name in _ARRAYS else values.tolist()
        samples.append({name: value for name, value in sample.items() if value is not None})
    return samples


def write(path: Path, rollout_id: int, samples: list[dict[str, Any]]) -> None:
    """Write a debug rollout file; it appears whole or not at all."""
    with written(path) as temporary:
        torch.save({"rollout_id": rollout_id, "samples": samples}, temporary)
